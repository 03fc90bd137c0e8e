"""One running service for all tests that only look at one, or that wait until it has recovered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serve import Serving, serve
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a context so long that a stream outlives a test's first look at it."""
    return make_tiny_model(tmp_path_factory.mktemp("model"), max_position=16384)


@pytest.fixture(scope="session")
def service(model: Path) -> Iterator[Serving]:
    with serve(model) as serving:
        yield serving


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[Serving]:
    """Two replicas, for tests that end or kill one."""
    with serve(model, "--replicas", "2") as serving:
        yield serving
