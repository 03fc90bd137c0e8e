from __future__ import annotations

from collections import Counter

from shoal.core.classes import STANDARD
from shoal.workload import trace
from shoal.workload.arrivals import Bursts, ClosedLoop, OpenLoop
from shoal.workload.lengths import MIXES, Mix, Uniform
from shoal.workload.trace import Part

PARTS = (
    Part(7, "interactive", Mix(Uniform(10), Uniform(1)), ("a", "b")),
    Part(2, "standard", Mix(Uniform(20), Uniform(2))),
    Part(1, "batch", Mix(Uniform(30, 0.5), Uniform(3)), ("c",)),
)


def test_equal_seeds_give_equal_traces() -> None:
    make = lambda seed: trace.make(OpenLoop(8.0), MIXES["chat"], 100, seed)  # noqa: E731
    assert make(1) == make(1) != make(2)
    assert make(1).concurrency is None
    assert [row.due_ns for row in make(1).rows] == sorted(row.due_ns for row in make(1).rows)
    assert {row.service_class for row in make(1).rows} == {STANDARD}


def test_another_rate_or_a_closed_loop_sends_the_same_requests() -> None:
    slow = trace.make(OpenLoop(1.0), MIXES["chat"], 50, 1)
    fast = trace.make(OpenLoop(100.0, 0.5), MIXES["chat"], 50, 1)
    closed = trace.make(ClosedLoop(4), MIXES["chat"], 50, 1)
    assert closed.concurrency == 4
    assert {row.due_ns for row in closed.rows} == {0}
    assert [row[1:] for row in slow.rows] == [row[1:] for row in fast.rows] == [row[1:] for row in closed.rows]


def test_a_mixed_trace_has_its_shares_in_every_stretch() -> None:
    rows = trace.mixed(OpenLoop(5.0), PARTS, 200, seed=1).rows
    for first in range(0, 200, 10):
        kinds = Counter(row.service_class for row in rows[first : first + 10])
        assert kinds == {"interactive": 7, "standard": 2, "batch": 1}
    assert len({tuple(row.service_class for row in rows[first : first + 10]) for first in range(0, 200, 10)}) > 10
    sizes = {row.service_class: (row.prompt_tokens, row.output_tokens) for row in rows}
    assert (sizes["interactive"], sizes["standard"], sizes["batch"][1]) == ((10, 1), (20, 2), 3)
    tenants = Counter((row.service_class, row.tenant) for row in rows)
    assert set(tenants) == {("interactive", "a"), ("interactive", "b"), ("standard", ""), ("batch", "c")}
    assert 45 < tenants["interactive", "a"] < 95


def test_a_mixed_trace_may_end_within_a_round_and_is_the_same_at_any_rate() -> None:
    slow, fast = (trace.mixed(Bursts(rate, 1.0, 3 * rate, 1.0), PARTS, 33, seed=2) for rate in (1.0, 50.0))
    assert len(slow.rows) == 33 and [row[1:] for row in slow.rows] == [row[1:] for row in fast.rows]
    assert slow.rows[-1].due_ns > fast.rows[-1].due_ns
    assert trace.mixed(ClosedLoop(3), PARTS, 33, seed=2).concurrency == 3
