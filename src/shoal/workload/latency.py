"""Latencies of requests: what is measured from what, exact percentiles, and the share that met its objective.

    due ------- sent ------------- first token ------ ... ------ last token
     |<---------- TTFT ---------------->|<-- (num_tokens - 1) · TPOT --->|
     |<----------------------------- end to end ------------------------>|

Everything counts from `due`, when the request should have been sent, so that a late sender cannot hide a slow server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Latency(NamedTuple):
    """One request that was answered in full. Times in nanoseconds of one clock."""

    due_ns: int
    first_ns: int
    last_ns: int
    num_tokens: int

    @property
    def ttft_ns(self) -> int:
        return self.first_ns - self.due_ns

    @property
    def tpot_ns(self) -> float | None:
        """Mean time per token after the first; None for a single token."""
        if self.num_tokens < 2:
            return None
        return (self.last_ns - self.first_ns) / (self.num_tokens - 1)

    @property
    def e2e_ns(self) -> int:
        return self.last_ns - self.due_ns


def percentile(values: Sequence[float], percent: float) -> float:
    """Over all values, none binned: linear interpolation at rank (n − 1) · percent / 100 of the sorted values from 0.

    Hyndman and Fan's type 7, which numpy and vLLM's load test use too. With fewer than 100 values p99 lies between
    the two greatest.
    """
    if not values:
        raise ValueError("no values")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent must be in [0, 100], got {percent}")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    if low == rank:
        return ordered[low]
    return ordered[low] + (ordered[low + 1] - ordered[low]) * (rank - low)


@dataclass(frozen=True, slots=True)
class Spread:
    """Summary of one measured quantity, in the unit of its values."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def spread(values: Sequence[float]) -> Spread | None:
    """None where nothing was measured: there is no such thing as a latency of no request."""
    if not values:
        return None
    p50, p90, p95, p99 = (percentile(values, percent) for percent in (50, 90, 95, 99))
    return Spread(len(values), sum(values) / len(values), p50, p90, p95, p99, max(values))


@dataclass(frozen=True, slots=True)
class Slo:
    """An objective for one request; None: no bound on that part. Bounds are inclusive."""

    ttft_ns: int | None = None
    tpot_ns: int | None = None

    def met(self, latency: Latency) -> bool:
        if self.ttft_ns is not None and latency.ttft_ns > self.ttft_ns:
            return False
        return self.tpot_ns is None or latency.tpot_ns is None or latency.tpot_ns <= self.tpot_ns


def attainment(answered: Iterable[Latency], num_requests: int, slo: Slo) -> float:
    """Share of all requests, failed and refused ones included, that were answered within the objective."""
    if num_requests < 1:
        raise ValueError("no requests")
    return sum(slo.met(latency) for latency in answered) / num_requests
