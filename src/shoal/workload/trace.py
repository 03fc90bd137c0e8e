"""A load as plain rows: when each request comes, how long it is, and for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from shoal.core.classes import STANDARD
from shoal.workload.arrivals import Arrivals, ClosedLoop
from shoal.workload.lengths import Mix


class Row(NamedTuple):
    due_ns: int  # from the start of the load; 0 in a closed loop, where a row is due when a caller is free
    prompt_tokens: int
    output_tokens: int
    service_class: str = STANDARD
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    rows: tuple[Row, ...]  # in order of arrival
    concurrency: int | None = None  # callers of a closed loop; None: an open loop, sent by the clock


class Part(NamedTuple):
    """One kind of requests in a mixed load."""

    num: int  # so many in each round of the mix
    service_class: str
    mix: Mix
    tenants: tuple[str, ...] = ("",)  # each row is of one of them, by chance


def make(arrivals: Arrivals, mix: Mix, count: int, seed: int) -> Trace:
    """`count` rows. Times and lengths have separate random streams: another rate sends the same requests."""
    lengths = Random(f"{seed}/lengths")
    sizes = [(mix.prompt.draw(lengths), mix.output.draw(lengths)) for _ in range(count)]
    return _timed(arrivals, [Row(0, *size) for size in sizes], seed)


def mixed(arrivals: Arrivals, parts: Sequence[Part], count: int, seed: int) -> Trace:
    """`count` rows of several kinds, separate random streams as above.

    They come in rounds that hold `num` of each part in a random order, so that every stretch of the load has the shares
    that were asked for, and not by chance twice as many of one kind.
    """
    order, lengths = Random(f"{seed}/order"), Random(f"{seed}/lengths")
    rows: list[Row] = []
    while len(rows) < count:
        round = [part for part in parts for _ in range(part.num)]
        order.shuffle(round)
        for part in round:
            size = part.mix.prompt.draw(lengths), part.mix.output.draw(lengths)
            rows.append(Row(0, *size, part.service_class, order.choice(part.tenants)))
    return _timed(arrivals, rows[:count], seed)


def _timed(arrivals: Arrivals, rows: Sequence[Row], seed: int) -> Trace:
    if isinstance(arrivals, ClosedLoop):
        return Trace(tuple(rows), arrivals.concurrency)
    times = arrivals.times_ns(len(rows), Random(f"{seed}/arrivals"))
    return Trace(tuple(row._replace(due_ns=due) for due, row in zip(times, rows, strict=True)))
