"""The bench's calibration gets back the constants that a machine's steps were made of, and its watch times tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import planner
from planner import LINK_NONE, PLAIN, Watch, calibrated, reached
from shoal.core.stepcost import attended_tokens
from shoal.planner import catalogue
from shoal.planner.cost import Machine, Net, Rates
from shoal.planner.layouts import Cluster, Layout

MODEL = catalogue.model("smollm2-135m")
TRUE = Rates(
    bytes_per_s=1e10,
    matrix=((1, 1e10), (16, 5e10), (256, 6e10)),
    attention_flops_per_s=2e10,
    kv_bytes_per_s=5e9,
    step_s=3e-3,
    sequence_s=2e-4,
    token_s=1e-5,
)
ALONE = {"matrix": [list(pair) for pair in TRUE.matrix], "read": TRUE.bytes_per_s, "copy": 1.0}


def steps(turn_s: float) -> dict[str, float]:
    """What a machine with these rates takes for the bench's invented steps."""
    machine = Machine(MODEL, PLAIN, "float32", TRUE, Net(LINK_NONE), Cluster(1), Layout())

    def seconds(*parts: tuple[int, int]) -> float:
        new = sum(count for _, count in parts)
        attended = sum(attended_tokens(*part) for part in parts)
        context = sum(start + count for start, count in parts)
        return machine.predict((1, new, attended, len(parts), context), len(parts)) - turn_s

    return {
        "1 near": seconds((63, 1)),
        "16 near": seconds(*[(63, 1)] * 16),
        "16 far": seconds(*[(1023, 1)] * 16),
        "256 early": seconds((0, 256)),
        "256 late": seconds((1024, 256)),
        "turn": turn_s,
    }


def test_five_steps_tell_what_is_beside_the_arithmetic() -> None:
    found = calibrated(MODEL, ALONE, steps(1e-3))
    assert found.attention_flops_per_s == pytest.approx(TRUE.attention_flops_per_s, rel=0.02)
    assert found.kv_bytes_per_s == pytest.approx(TRUE.kv_bytes_per_s, rel=0.02)
    assert found.step_s == pytest.approx(TRUE.step_s, rel=0.1)
    assert found.sequence_s == pytest.approx(TRUE.sequence_s, rel=0.1)
    assert found.token_s == pytest.approx(TRUE.token_s, rel=0.1)


def test_in_other_company_attention_goes_with_products_and_the_rest_with_copies() -> None:
    twice = {"matrix": [[rows, 2 * rate] for rows, rate in ALONE["matrix"]], "read": 1.5e10, "copy": 1.5}
    alone, here = (reached(MODEL, {"1 thread": ALONE, "x": twice}, name, steps(0.0)) for name in ("1 thread", "x"))
    assert here.attention_flops_per_s == pytest.approx(2 * alone.attention_flops_per_s)
    assert here.kv_bytes_per_s == pytest.approx(1.5 * alone.kv_bytes_per_s)
    assert here.token_s == pytest.approx(alone.token_s / 1.5)
    assert (here.step_s, here.sequence_s) == (alone.step_s, alone.sequence_s)


def test_only_the_steady_part_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once, four requests of 3 tokens; a turn a second: a and b, then c and d."""
    clock = iter(range(100))
    monkeypatch.setattr(planner.time, "perf_counter", lambda: float(next(clock)))
    watch = Watch(num_sent_later=2)

    def turn(*updates: tuple[str, int, bool]) -> None:
        rows = [
            SimpleNamespace(id=id, tokens=(0,) * count, ending="end" if ends else None) for id, count, ends in updates
        ]
        watch(SimpleNamespace(updates={1: tuple(rows)}))

    turn(("a", 1, False), ("b", 1, False))  # 0 s
    turn(("a", 1, False), ("b", 1, False))
    turn(("a", 1, True), ("b", 1, False))  # 2 s: the steady part begins
    turn(("b", 1, True), ("c", 1, False))  # 3 s: the last one is sent
    turn(("c", 1, False), ("d", 1, False))
    turn(("c", 1, True), ("d", 1, False))
    assert watch.tokens_per_s() == 2.0
    assert watch.tpot_s() == pytest.approx(1.0)
