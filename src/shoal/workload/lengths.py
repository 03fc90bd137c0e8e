"""How long prompts and outputs are: distributions over token counts, each at least 1."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every whole number from floor(tokens · (1 − ratio)) to ceil(tokens · (1 + ratio)), as vLLM's random dataset.

    ratio 0 is a fixed length.
    """

    tokens: int
    ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"length must be at least 1 token, got {self.tokens}")
        if not 0 <= self.ratio < 1:
            raise ValueError(f"ratio must be in [0, 1), got {self.ratio}")

    def draw(self, rng: Random) -> int:
        low = math.floor(self.tokens * (1 - self.ratio))
        high = math.ceil(self.tokens * (1 + self.ratio))
        return max(1, rng.randint(low, high))


@dataclass(frozen=True, slots=True)
class LongTail:
    """Log-normal around a median, cut to `most`. With sigma 1 one in six is longer than 2.7 medians."""

    median: int
    sigma: float
    most: int

    def draw(self, rng: Random) -> int:
        return min(self.most, max(1, round(rng.lognormvariate(math.log(self.median), self.sigma))))


@dataclass(frozen=True, slots=True)
class Mixture:
    """One of `parts`, chosen by weight: (weight, lengths)."""

    parts: tuple[tuple[float, Lengths], ...]

    def draw(self, rng: Random) -> int:
        weights = [weight for weight, _ in self.parts]
        ((_, lengths),) = rng.choices(self.parts, weights)
        return lengths.draw(rng)


Lengths = Uniform | LongTail | Mixture


class Mix(NamedTuple):
    prompt: Lengths
    output: Lengths


# Named mixes, for command lines and tests. To add one: a row here and a row in the test.
MIXES: dict[str, Mix] = {
    # mostly short turns, some pasted documents; answers with a long tail
    "chat": Mix(
        prompt=Mixture(((0.8, LongTail(64, 0.8, 512)), (0.2, LongTail(512, 0.6, 1500)))),
        output=LongTail(64, 0.9, 512),
    ),
    # what breaks batching that waits for its longest member: nine short answers to each long one
    "bimodal": Mix(
        prompt=Uniform(64, 0.5),
        output=Mixture(((0.9, Uniform(16, 0.5)), (0.1, Uniform(384, 0.25)))),
    ),
}
