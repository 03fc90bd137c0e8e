"""Runners shared by the tests of a session: reading weights once is most of what they cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.engine.config import EngineConfig
from shoal.engine.loop import Runner
from tests.support.default_model import default_model
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def new_runner() -> Callable[..., Any]:
    """Loads a folder in float32 on one thread, with a pool of 8 MiB unless told otherwise."""

    def load(folder: Path, **settings: Any) -> Runner:
        from shoal.engine import runner

        return runner.load(
            folder, EngineConfig(**{"dtype": "float32", "threads": 1, "kv_cache_bytes": 8 << 20, **settings})
        )

    return load


@pytest.fixture(scope="session")
def tiny_runner(tiny: Path, new_runner: Callable[..., Runner]) -> Runner:
    return new_runner(tiny)


@pytest.fixture(scope="session")
def smollm2(new_runner: Callable[..., Runner]) -> Runner:
    """The default model in float32, with room for all parity prompts at once."""
    return new_runner(default_model(), kv_cache_bytes=400 << 20, max_model_len=2048)
