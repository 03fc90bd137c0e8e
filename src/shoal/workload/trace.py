"""A load as plain rows: when each request comes and how long it is."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from shoal.workload.arrivals import Arrivals, OpenLoop
from shoal.workload.lengths import Mix


class Row(NamedTuple):
    due_ns: int  # from the start of the load; 0 in a closed loop, where a row is due when a caller is free
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    rows: tuple[Row, ...]  # in order of arrival
    concurrency: int | None = None  # callers of a closed loop; None: an open loop, sent by the clock


def make(arrivals: Arrivals, mix: Mix, count: int, seed: int) -> Trace:
    """`count` rows. Times and lengths have separate random streams: another rate sends the same requests."""
    lengths = Random(f"{seed}/lengths")
    sizes = [(mix.prompt.draw(lengths), mix.output.draw(lengths)) for _ in range(count)]
    if isinstance(arrivals, OpenLoop):
        times, concurrency = arrivals.times_ns(count, Random(f"{seed}/arrivals")), None
    else:
        times, concurrency = [0] * count, arrivals.concurrency
    return Trace(tuple(Row(due, *size) for due, size in zip(times, sizes, strict=True)), concurrency)
