"""When requests arrive: an open loop sends by the clock, a closed loop sends when an answer has come."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Intervals are gamma distributed with mean 1 / rate.

    `burstiness` is the gamma's shape, as in vLLM's load test: 1 is a Poisson process, below 1 arrivals come in
    bursts (the intervals' standard deviation is mean / sqrt(burstiness)), infinity is a constant interval.
    """

    rate_per_s: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.rate_per_s < math.inf):
            raise ValueError(f"rate must be positive and finite, got {self.rate_per_s}")
        if not self.burstiness > 0:
            raise ValueError(f"burstiness must be positive, got {self.burstiness}")

    def times_ns(self, count: int, rng: Random) -> list[int]:
        """`count` arrival times from 0, ascending; the first comes one interval after the start."""
        mean_ns = 1e9 / self.rate_per_s
        now_ns = 0.0
        times = []
        for _ in range(count):
            now_ns += mean_ns * self._interval(rng)
            times.append(round(now_ns))
        return times

    def _interval(self, rng: Random) -> float:
        if math.isinf(self.burstiness):
            return 1.0
        return rng.gammavariate(self.burstiness, 1.0 / self.burstiness)


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` callers, each of which sends its next request when its last one has ended.

    There is no schedule to fall behind, so a closed loop hides queueing that real, independent clients would see:
    use it for throughput, an open loop for latency.
    """

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {self.concurrency}")


Arrivals = OpenLoop | ClosedLoop
