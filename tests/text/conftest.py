from __future__ import annotations

from pathlib import Path

import pytest

from shoal.gateway.text.tokenizer import Tokenizer
from tests.support.default_model import default_model
from tests.support.tiny_sentencepiece import make_tiny_sentencepiece


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return Tokenizer.load(default_model())


@pytest.fixture(scope="session")
def sentencepiece_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_sentencepiece(tmp_path_factory.mktemp("sentencepiece"))


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_dir: Path) -> Tokenizer:
    return Tokenizer.load(sentencepiece_dir)
