"""Ratios of what was measured, and the claims made of them.

A ratio is shoal's figure by the peer's within a round; the median over rounds is what counts. A claim is made only of
cells that were measured in every round: what was not measured is absent, never met.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from peers.cells import CELLS, LONG_PROMPT, SAMPLED, SHOAL, SHOAL_INT8, SHORT_CHAT, Record

OUTPUT, TTFT_P50, TTFT_P99, TPOT_P50 = "output_tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms"
QUANTITIES = (OUTPUT, TTFT_P50, TTFT_P99, TPOT_P50)
WARM_START = (SHOAL, "warm start")


class Claim(NamedTuple):
    name: str
    value: float
    target: str  # ">= number" or "<= number"

    @property
    def ok(self) -> bool:
        sense, bound = self.target.split()
        return self.value >= float(bound) if sense == ">=" else self.value <= float(bound)


def by_round(record: Record, quantity: str, mix: str, concurrency: int, server: str) -> dict[int, float]:
    wanted = (mix, concurrency, server)
    rows = [row for row in record.cells if (row.mix, row.concurrency, row.server) == wanted]
    return {row.round: getattr(row, quantity) for row in rows}


def ratios(ours: dict[int, float], theirs: dict[int, float]) -> list[float]:
    """For each round that has both."""
    return [ours[number] / theirs[number] for number in sorted(ours.keys() & theirs.keys())]


def claims(record: Record) -> Iterator[Claim]:
    for peer in record.peers:
        yield from _against(record, peer)
    greedy, sampled = (by_round(record, OUTPUT, mix, 16, SHOAL) for mix in (SHORT_CHAT, SAMPLED))
    found = ratios(sampled, greedy)
    if len(found) == record.rounds:
        yield Claim("sampled / greedy, 16 concurrent: output tok/s", median(found), ">= 0.9")
    int8 = by_round(record, OUTPUT, SHORT_CHAT, 1, SHOAL_INT8)
    if len(int8) == record.rounds:  # the bound is llama.cpp's figure for the model in Q4_1, on two such cores
        yield Claim("int8, 1 concurrent: output tok/s", median(int8.values()), ">= 77")
    if WARM_START in record.start_s:
        yield Claim("warm start to first token, s", record.start_s[WARM_START], "<= 10")


def _against(record: Record, peer: str) -> Iterator[Claim]:
    for name, quantity, mix, concurrency, target in (
        ("16 concurrent: output tok/s", OUTPUT, SHORT_CHAT, 16, ">= 1.7" if "compiled" in peer else ">= 2.0"),
        ("1 concurrent: TPOT", TPOT_P50, SHORT_CHAT, 1, "<= 0.45"),
        ("64 concurrent: output tok/s", OUTPUT, SHORT_CHAT, 64, ">= 1.7"),
        ("long prompts, 4 concurrent: P50 TTFT", TTFT_P50, LONG_PROMPT, 4, "<= 0.6"),
        ("long prompts, 4 concurrent: P99 TTFT", TTFT_P99, LONG_PROMPT, 4, "<= 0.6"),
    ):
        if (found := _ratio(record, quantity, mix, concurrency, peer)) is not None:
            yield Claim(f"{name} / {peer}", found, target)
    for name, quantity, worst, target in (
        ("output tok/s", OUTPUT, min, ">= 1.0"),
        ("P50 TTFT", TTFT_P50, max, "<= 1.0"),
        ("P50 TPOT", TPOT_P50, max, "<= 1.0"),
    ):
        shared = [cell for cell in CELLS if not cell.only]
        every = [_ratio(record, quantity, cell.mix, cell.concurrency, peer) for cell in shared]
        complete = [found for found in every if found is not None]
        if len(complete) == len(every):
            yield Claim(f"nowhere slower, worst {name} / {peer}", worst(complete), target)
    if SHOAL in record.memory and peer in record.memory and record.memory[peer].most_pool_bytes:
        ours, theirs = record.memory[SHOAL].most_apart_bytes, record.memory[peer].least_apart_bytes
        yield Claim(f"memory without KV pools / {peer}", ours / theirs, "<= 0.6")


def _ratio(record: Record, quantity: str, mix: str, concurrency: int, peer: str) -> float | None:
    """The median, where every round has it."""
    found = ratios(*(by_round(record, quantity, mix, concurrency, server) for server in (SHOAL, peer)))
    return median(found) if len(found) == record.rounds else None
