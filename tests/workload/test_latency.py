from __future__ import annotations

from random import Random

import numpy
import pytest

from shoal.workload.latency import Latency, Slo, attainment, percentile, spread


def test_latency_counts_from_the_moment_the_request_was_due() -> None:
    latency = Latency(due_ns=100, first_ns=400, last_ns=1_000, num_tokens=4)
    assert (latency.ttft_ns, latency.tpot_ns, latency.e2e_ns) == (300, 200.0, 900)


def test_a_single_token_has_no_time_per_token() -> None:
    assert Latency(0, 5, 5, 1).tpot_ns is None


@pytest.mark.parametrize(
    ("percent", "expected"),
    [(0, 10), (50, 25), (90, 37), (99, 39.7), (100, 40), (100 / 3, 20)],  # rank (4 - 1) · percent / 100
)
def test_percentile_by_hand(percent: float, expected: float) -> None:
    assert percentile([40, 10, 30, 20], percent) == pytest.approx(expected)


def test_percentile_is_numpys_default() -> None:
    rng = Random(1)
    for size in (1, 2, 3, 10, 99, 100, 101, 1_000):
        values = [rng.randrange(10**9) for _ in range(size)]
        for percent in (0, 1, 50, 90, 95, 99, 99.9, 100):
            assert percentile(values, percent) == pytest.approx(float(numpy.percentile(values, percent)), rel=1e-12)


def test_percentile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
    with pytest.raises(ValueError, match="percent"):
        percentile([1], 101)


def test_spread() -> None:
    assert spread([]) is None
    got = spread([3, 1, 2])
    assert got is not None
    assert (got.count, got.mean, got.p50, got.max) == (3, 2.0, 2, 3)
    assert got.p99 == pytest.approx(2.98)


def test_attainment_counts_failures_as_misses_and_bounds_as_met() -> None:
    answered = [
        Latency(0, 100, 400, 4),  # TTFT 100, TPOT 100: just met
        Latency(0, 101, 401, 4),  # TTFT missed
        Latency(0, 50, 353, 4),  # TPOT 101: missed
        Latency(0, 100, 100, 1),  # one token: only the TTFT counts
    ]
    assert attainment(answered, 5, Slo(ttft_ns=100, tpot_ns=100)) == 2 / 5
    assert attainment(answered, 4, Slo(ttft_ns=100)) == 3 / 4
    assert attainment(answered, 4, Slo()) == 1.0
    with pytest.raises(ValueError, match="no requests"):
        attainment([], 0, Slo())
