"""Every transcript in tests/transcripts is acted out again and must read the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.core.transcripts import replay

TRANSCRIPTS = sorted((Path(__file__).parents[1] / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    acted = replay(path)
    if os.environ.get("REWRITE_TRANSCRIPTS"):
        path.write_text(acted, encoding="utf-8")
    assert acted == path.read_text(encoding="utf-8")


def test_there_are_transcripts() -> None:
    assert len(TRANSCRIPTS) >= 15
