from __future__ import annotations

import math
from collections import Counter
from random import Random
from statistics import mean, stdev

import pytest

from shoal.workload.arrivals import Bursts, ClosedLoop, OpenLoop


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


def test_bursts_come_in_turn_with_their_rates() -> None:
    """Cycles of 2 s at 5 per second and 1 s at 40: 50 arrivals each, 10 of them in the calm."""
    load = Bursts(5.0, 2.0, 40.0, 1.0)
    assert load.expected(3) == 150
    times = load.times_ns(20_000, Random(1))
    assert times == sorted(times)
    assert times[-1] == pytest.approx(400 * 3e9, rel=0.03)
    calm = [time for time in times if load.burst_of(time) is None]
    assert len(calm) / len(times) == pytest.approx(0.2, abs=0.01)
    bursts = Counter(load.burst_of(time) for time in times if load.burst_of(time) is not None)
    assert mean(bursts.values()) == pytest.approx(40, rel=0.03)
    assert stdev(bursts.values()) == pytest.approx(40**0.5, rel=0.15)  # Poisson


@pytest.mark.parametrize(
    ("due_s", "burst"), [(0.0, None), (1.99, None), (2.0, 0), (2.99, 0), (3.0, None), (5.5, 1), (6.5, None)]
)
def test_the_burst_of_an_arrival(due_s: float, burst: int | None) -> None:
    assert Bursts(5.0, 2.0, 40.0, 1.0).burst_of(int(due_s * 1e9)) == burst


def test_impossible_bursts_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="calm_per_s"):
        Bursts(0.0, 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="burst_s"):
        Bursts(1.0, 1.0, 1.0, math.inf)
