"""Lines of text in many scripts, the same on every machine: pieces of the seeds, cut and joined at random."""

from __future__ import annotations

import random
import re
from pathlib import Path

SEEDS = Path(__file__).parent.parent / "data" / "text_seeds.txt"
ESCAPES = {"\\s": " ", "\\t": "\t", "\\n": "\n", "\\r": "\r", "\\\\": "\\"}
JOINTS = ["", "", " ", " ", "  ", "\n", "\t", ", ", "\n\n", "   ", "\r\n", "\u3000", "7", "'"]


def seeds() -> list[str]:
    lines = SEEDS.read_text(encoding="utf-8").split("\n")
    return [_unescape(line.split(": ", 1)[1]) for line in lines if line and not line.startswith("#")]


def corpus(num_lines: int = 2000, seed: int = 0) -> list[str]:
    """The seeds themselves, then mixtures: 1 to 4 pieces, each cut anywhere (also inside an emoji's sequence)."""
    rng = random.Random(seed)
    texts = seeds()
    lines = list(texts)
    while len(lines) < num_lines:
        pieces = []
        for _ in range(rng.randint(1, 4)):
            text = rng.choice(texts)
            start = rng.randrange(len(text))
            pieces += [text[start : start + rng.randint(1, 40)], rng.choice(JOINTS)]
        lines.append("".join(pieces))
    return lines[:num_lines]


def _unescape(text: str) -> str:
    def character(match: re.Match[str]) -> str:
        return chr(int(match[1] or match[2], 16)) if match[1] or match[2] else ESCAPES[match[0]]

    return re.sub(r"\\u([0-9a-f]{4})|\\U([0-9a-f]{8})|\\[stnr\\]", character, text)
