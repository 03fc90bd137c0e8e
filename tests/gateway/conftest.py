from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.gateway.text.tokenizer import Tokenizer
from tests.support.processes import socket_folder
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


@pytest.fixture
def folder() -> Iterator[Path]:
    """For Unix sockets."""
    with socket_folder() as path:
        yield path
