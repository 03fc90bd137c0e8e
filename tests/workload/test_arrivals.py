from __future__ import annotations

import math
from random import Random
from statistics import mean, stdev

import pytest

from shoal.workload.arrivals import ClosedLoop, OpenLoop


@pytest.mark.parametrize(
    ("burstiness", "deviation_ns"),
    [(1.0, 250e6), (0.25, 500e6), (4.0, 125e6)],  # mean / sqrt(burstiness)
)
def test_intervals_have_the_stated_mean_and_deviation(burstiness: float, deviation_ns: float) -> None:
    times = OpenLoop(4.0, burstiness).times_ns(20_000, Random(1))
    intervals = [b - a for a, b in zip([0, *times], times, strict=False)]
    assert min(intervals) >= 0
    assert mean(intervals) == pytest.approx(250e6, rel=0.03)
    assert stdev(intervals) == pytest.approx(deviation_ns, rel=0.05)


def test_infinite_burstiness_is_a_constant_interval_without_drift() -> None:
    times = OpenLoop(3.0, math.inf).times_ns(3_000, Random(1))
    assert times[0] == 333_333_333
    assert times[-1] == 1_000_000_000_000


def test_equal_seeds_give_equal_times_and_others_do_not() -> None:
    load = OpenLoop(10.0)
    assert load.times_ns(50, Random(7)) == load.times_ns(50, Random(7)) != load.times_ns(50, Random(8))


def test_impossible_loads_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="rate"):
        OpenLoop(0)
    with pytest.raises(ValueError, match="rate"):
        OpenLoop(math.inf)
    with pytest.raises(ValueError, match="burstiness"):
        OpenLoop(1, 0)
    with pytest.raises(ValueError, match="concurrency"):
        ClosedLoop(0)
