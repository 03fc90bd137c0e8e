from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.gateway.text.tokenizer import Tokenizer
from tests.support.gateways import Service, service
from tests.support.processes import socket_folder
from tests.support.scripted import Rule, Script
from tests.support.tiny_model import make_tiny_model

EOS = 2
WINDOW = 128


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


@pytest.fixture(scope="session")
def small(model_dir: Path, tokenizer: Tokenizer) -> Iterator[Service]:
    """Gateway and engine processes with a window of WINDOW tokens. What prompts with these words are answered:
    "xyz": abc. "XYZ": whatever their choice, in words of its own. Others are repeated for ever."""

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text))

    rules = (
        Rule(prompt=ids("xyz"), tokens=(*ids("abc"), EOS)),
        Rule(prompt=ids("XYZ"), choices=((*ids("one"), EOS), (*ids("two😀"), EOS)), tokens=(EOS,)),
    )
    with service(model_dir, Script(rules=rules, step_ms=1, max_model_len=WINDOW)) as made:
        yield made
        assert made.balanced()
