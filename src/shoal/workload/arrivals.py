"""When requests arrive: an open loop sends by the clock, a closed loop sends when an answer has come."""

from __future__ import annotations

import itertools
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
class Bursts:
    """A Poisson process whose rate changes in turn: calm for `calm_s` seconds, a burst of `burst_s`, calm again."""

    calm_per_s: float
    calm_s: float
    burst_per_s: float
    burst_s: float

    def __post_init__(self) -> None:
        for name in ("calm_per_s", "calm_s", "burst_per_s", "burst_s"):
            value = getattr(self, name)
            if not (0 < value < math.inf):
                raise ValueError(f"{name} must be positive and finite, got {value}")

    def expected(self, num_cycles: int) -> int:
        """Arrivals in so many calms and bursts, on average."""
        return round(num_cycles * (self.calm_per_s * self.calm_s + self.burst_per_s * self.burst_s))

    def times_ns(self, count: int, rng: Random) -> list[int]:
        """`count` arrival times from 0, ascending. Between two of them the rate, summed over time, is Exp(1)."""
        phases = itertools.cycle(((self.calm_per_s, self.calm_s), (self.burst_per_s, self.burst_s)))
        rate, left_s = next(phases)
        now_s = 0.0
        times = []
        for _ in range(count):
            left = rng.expovariate(1.0)
            while left > rate * left_s:
                left -= rate * left_s
                now_s += left_s
                rate, left_s = next(phases)
            now_s += left / rate
            left_s -= left / rate
            times.append(round(now_s * 1e9))
        return times

    def burst_of(self, due_ns: int) -> int | None:
        """The number, from 0, of the burst that an arrival belongs to; None: it came in a calm."""
        cycle, place_s = divmod(due_ns / 1e9, self.calm_s + self.burst_s)
        return int(cycle) if place_s >= self.calm_s else None


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


Arrivals = OpenLoop | Bursts | ClosedLoop
