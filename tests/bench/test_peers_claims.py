"""Ratios and claims of a comparison, from figures that were never measured."""

from __future__ import annotations

import pytest

from peers.cells import (
    CELLS,
    LONG_PROMPT,
    QUICK_CELLS,
    SAMPLED,
    SHOAL,
    SHOAL_INT8,
    SHORT_CHAT,
    Cell,
    Measured,
    Record,
)
from peers.claims import WARM_START, claims
from peers.memory import Memory

PEERS = ("vLLM eager", "vLLM compiled")


def measured(round: int, cell: Cell, server: str, tokens_per_s: float, ttft_ms: float, tpot_ms: float) -> Measured:
    return Measured(
        round=round,
        mix=cell.mix,
        concurrency=cell.concurrency,
        server=server,
        output_tokens_per_s=tokens_per_s,
        ttft_p50_ms=ttft_ms,
        ttft_p99_ms=2 * ttft_ms,
        tpot_p50_ms=tpot_ms,
        duration_s=1.0,
        driver_lag_p99_ms=1.0,
    )


def whole() -> Record:
    """Three rounds of all cells: shoal twice as fast as eager, 1.8 times as fast as compiled, TTFT half, TPOT 0.4."""
    record = Record(peers=PEERS, rounds=3)
    for number in (1, 2, 3):
        for cell in CELLS:
            record.cells.append(measured(number, cell, cell.only or SHOAL, 180.0, 50.0, 4.0))
            if not cell.only:
                record.cells.append(measured(number, cell, PEERS[0], 90.0, 100.0, 10.0))
                record.cells.append(measured(number, cell, PEERS[1], 100.0, 100.0, 10.0))
    record.start_s = {(SHOAL, "first start"): 30.0, WARM_START: 4.0}
    record.memory = {SHOAL: Memory(4, 700, 100, 200), **{peer: Memory(4, 1500, 400, 500) for peer in PEERS}}
    return record


def made(record: Record) -> dict[str, tuple[float, bool]]:
    return {claim.name: (round(claim.value, 6), claim.ok) for claim in claims(record)}


def test_all_claims_of_a_whole_run() -> None:
    shared = {
        "1 concurrent: TPOT": 0.4,
        "long prompts, 4 concurrent: P50 TTFT": 0.5,
        "long prompts, 4 concurrent: P99 TTFT": 0.5,
        "nowhere slower, worst P50 TTFT": 0.5,
        "nowhere slower, worst P50 TPOT": 0.4,
        "memory without KV pools": 0.6,  # (700 - 100) / (1500 - 500): both bounds against shoal
    }
    by_output = {
        f"{name} / {peer}": (value, True)
        for name in ("16 concurrent: output tok/s", "64 concurrent: output tok/s", "nowhere slower, worst output tok/s")
        for peer, value in zip(PEERS, (2.0, 1.8), strict=True)
    }
    assert made(whole()) == {
        **{f"{name} / {peer}": (value, True) for name, value in shared.items() for peer in PEERS},
        **by_output,
        "sampled / greedy, 16 concurrent: output tok/s": (1.0, True),
        "int8, 1 concurrent: output tok/s": (180.0, True),
        "warm start to first token, s": (4.0, True),
    }


@pytest.mark.parametrize(("tokens_per_s", "against"), [(174.0, ("vLLM eager",)), (169.0, PEERS)])
def test_compiled_has_another_target_than_eager(tokens_per_s: float, against: tuple[str, ...]) -> None:
    record = whole()
    record.cells = [
        measured(row.round, Cell(SHORT_CHAT, 16, 1), row.server, tokens_per_s, 50.0, 4.0)
        if (row.server, row.mix, row.concurrency) == (SHOAL, SHORT_CHAT, 16)
        else row
        for row in record.cells
    ]
    missed = {name for name, (_, ok) in made(record).items() if not ok}
    assert missed == {f"16 concurrent: output tok/s / {peer}" for peer in against}


def test_the_median_of_each_rounds_ratio_counts_not_the_ratio_of_medians() -> None:
    record = Record(peers=PEERS[:1], rounds=3)
    for number, (ours, theirs) in enumerate([(100.0, 100.0), (300.0, 100.0), (200.0, 200.0)], 1):
        record.cells.append(measured(number, Cell(SHORT_CHAT, 16, 1), SHOAL, ours, 1.0, 1.0))
        record.cells.append(measured(number, Cell(SHORT_CHAT, 16, 1), PEERS[0], theirs, 1.0, 1.0))
    assert made(record) == {"16 concurrent: output tok/s / vLLM eager": (1.0, False)}


def test_what_was_not_measured_in_every_round_is_not_claimed() -> None:
    record = whole()
    record.cells = [
        row
        for row in record.cells
        if (row.round, row.mix, row.concurrency, row.server) != (3, LONG_PROMPT, 4, "vLLM compiled")
    ]
    absent = made(whole()).keys() - made(record).keys()
    assert absent == {
        f"{name} / vLLM compiled"
        for name in (
            "long prompts, 4 concurrent: P50 TTFT",
            "long prompts, 4 concurrent: P99 TTFT",
            "nowhere slower, worst output tok/s",
            "nowhere slower, worst P50 TTFT",
            "nowhere slower, worst P50 TPOT",
        )
    }
    quick = whole()
    quick.peers = PEERS[:1]
    places = {(cell.mix, cell.concurrency) for cell in QUICK_CELLS}
    quick.cells = [row for row in quick.cells if (row.mix, row.concurrency) in places and row.server != SHOAL_INT8]
    quick.memory, quick.start_s = {}, {}
    assert made(quick).keys() == {"16 concurrent: output tok/s / vLLM eager", "1 concurrent: TPOT / vLLM eager"}
    assert made(Record(peers=PEERS, rounds=3)) == {}


def test_one_slower_cell_is_seen_and_so_is_slow_sampling() -> None:
    record = whole()
    for row in list(record.cells):
        if row.server == SHOAL and (row.mix, row.concurrency) in {(LONG_PROMPT, 64), (SAMPLED, 16)}:
            record.cells.remove(row)
            record.cells.append(measured(row.round, Cell(row.mix, row.concurrency, 1), SHOAL, 81.0, 101.0, 4.0))
    found = made(record)
    assert found["nowhere slower, worst output tok/s / vLLM eager"] == (0.9, False)
    assert found["nowhere slower, worst P50 TTFT / vLLM compiled"] == (1.01, False)
    assert found["sampled / greedy, 16 concurrent: output tok/s"] == (0.45, False)


def test_memory_is_not_compared_where_the_peers_pool_was_not_found() -> None:
    record = whole()
    record.memory["vLLM eager"] = Memory(4, 1500, 0, 0)
    assert "memory without KV pools / vLLM eager" not in made(record)
    assert "memory without KV pools / vLLM compiled" in made(record)
