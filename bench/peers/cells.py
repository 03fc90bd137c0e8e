"""The loads that servers are compared under, and the record of what was measured.

A cell is a mix of lengths at a concurrency. Each round measures every cell once on each server, one server right after
the other, with the same requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from peers.memory import Memory
from shoal.workload.lengths import Mix, Uniform

SHOAL, SHOAL_INT8 = "shoal", "shoal int8"
SHORT_CHAT, LONG_PROMPT, LONG_OUTPUT = "short chat", "long prompt", "long output"
SAMPLED = "short chat, sampled"  # against shoal's own greedy figure

MIXES = {
    SHORT_CHAT: Mix(Uniform(128, 0.5), Uniform(64, 0.5)),
    LONG_PROMPT: Mix(Uniform(1500), Uniform(32)),
    LONG_OUTPUT: Mix(Uniform(32), Uniform(256)),
    SAMPLED: Mix(Uniform(128, 0.5), Uniform(64, 0.5)),
}


class Cell(NamedTuple):
    mix: str
    concurrency: int
    requests: int
    only: str = ""  # this server; else shoal and its peers

    def is_for(self, server: str) -> bool:
        return server == self.only if self.only else server != SHOAL_INT8


# At least one request for each caller, and no more than lets a round of three servers end in 20 minutes.
CELLS = (
    Cell(SHORT_CHAT, 1, 8),
    Cell(SHORT_CHAT, 1, 8, only=SHOAL_INT8),
    Cell(SHORT_CHAT, 4, 16),
    Cell(SHORT_CHAT, 16, 64),
    Cell(SAMPLED, 16, 64, only=SHOAL),
    Cell(SHORT_CHAT, 64, 128),
    Cell(LONG_PROMPT, 1, 4),
    Cell(LONG_PROMPT, 4, 12),
    Cell(LONG_PROMPT, 16, 16),
    Cell(LONG_PROMPT, 64, 64),
    Cell(LONG_OUTPUT, 1, 2),
    Cell(LONG_OUTPUT, 4, 4),
    Cell(LONG_OUTPUT, 16, 16),
    Cell(LONG_OUTPUT, 64, 64),
)
QUICK_CELLS = (Cell(SHORT_CHAT, 1, 8), Cell(SHORT_CHAT, 16, 64))


@dataclass(frozen=True, slots=True)
class Measured:
    """One cell on one server in one round."""

    round: int
    mix: str
    concurrency: int
    server: str
    output_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    duration_s: float
    driver_lag_p99_ms: float

    @classmethod
    def of(cls, figures: Mapping[str, Any], round: int, cell: Cell, server: str) -> Self:
        """`figures` as a load run gives them."""
        return cls(
            round=round,
            mix=cell.mix,
            concurrency=cell.concurrency,
            server=server,
            output_tokens_per_s=figures["output_tokens_per_s"],
            ttft_p50_ms=figures["ttft_ms"]["p50"],
            ttft_p99_ms=figures["ttft_ms"]["p99"],
            tpot_p50_ms=figures["tpot_ms"]["p50"],
            duration_s=figures["duration_s"],
            driver_lag_p99_ms=figures["lag_p99_ms"],
        )

    def __str__(self) -> str:
        return (
            f"{self.output_tokens_per_s:.1f} output tok/s, TTFT p50 {self.ttft_p50_ms:.0f} p99 {self.ttft_p99_ms:.0f} "
            f"ms, TPOT p50 {self.tpot_p50_ms:.1f} ms"
        )


class Unusable(NamedTuple):
    """A cell on one server in which requests failed."""

    round: int
    mix: str
    concurrency: int
    server: str
    trouble: str


@dataclass(slots=True)
class Record:
    """All that is known so far; a run that is cut short leaves it incomplete."""

    peers: tuple[str, ...]
    rounds: int  # as asked for
    cells: list[Measured] = field(default_factory=list)
    unusable: list[Unusable] = field(default_factory=list)
    start_s: dict[tuple[str, str], float] = field(default_factory=dict)  # (server, which start): to its first token
    memory: dict[str, Memory] = field(default_factory=dict)  # by server, after the last round
