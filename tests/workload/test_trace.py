from __future__ import annotations

from shoal.workload import trace
from shoal.workload.arrivals import ClosedLoop, OpenLoop
from shoal.workload.lengths import MIXES


def test_equal_seeds_give_equal_traces() -> None:
    make = lambda seed: trace.make(OpenLoop(8.0), MIXES["chat"], 100, seed)  # noqa: E731
    assert make(1) == make(1) != make(2)
    assert make(1).concurrency is None
    assert [row.due_ns for row in make(1).rows] == sorted(row.due_ns for row in make(1).rows)


def test_another_rate_or_a_closed_loop_sends_the_same_requests() -> None:
    slow = trace.make(OpenLoop(1.0), MIXES["chat"], 50, 1)
    fast = trace.make(OpenLoop(100.0, 0.5), MIXES["chat"], 50, 1)
    closed = trace.make(ClosedLoop(4), MIXES["chat"], 50, 1)
    assert closed.concurrency == 4
    assert {row.due_ns for row in closed.rows} == {0}
    assert [row[1:] for row in slow.rows] == [row[1:] for row in fast.rows] == [row[1:] for row in closed.rows]
