"""Whom to preempt when blocks or slots run out.

Who goes first: the least urgent; of these the longest predicted remainder, since it would hold its blocks longest; of
equal ones the last to arrive. One with few tokens left gives its blocks back soon by itself: never such a one, unless
all of its urgency are. Never one as urgent as the one that it would make way for, nor the first in order, so that work
always ends. Who has nothing left to compute is no victim: its step in flight returns its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from shoal.core.request import Request, State

FEW_LEFT = 32  # tokens

Remaining = Callable[[Request], int]  # predicted output tokens that are still to come
Gain = Callable[[list[int]], int]  # blocks that come back when a table is released


def for_growth(
    growing: list[Request], running: Iterable[Request], num_blocks: int, gain: Gain, remaining: Remaining
) -> list[Request]:
    """Who must go so that each of `growing` that stays gets one of `num_blocks` blocks."""
    able = [request for request in running if request.scheduled < request.final]
    first = min(able, key=lambda each: each.order, default=None)
    chosen: list[Request] = []
    num_needed = len(growing)
    for victim in in_order([each for each in able if each is not first], remaining):
        if num_needed <= num_blocks:
            break
        chosen.append(victim)
        num_blocks += gain(victim.blocks)
        num_needed -= victim in growing
    return chosen


def for_urgent(
    head: Request, candidates: Iterable[Request], num_slots: int, num_blocks: int, gain: Gain
) -> list[Request]:
    """Who must go so that one that waits can enter, which lacks that many slots and blocks; nobody if that is not
    enough. Each that goes gives back a slot, its blocks, and the one block that was left alone for it to grow.
    `candidates`: InOrder of those that may be preempted for somebody more urgent."""
    rank = head.service.rank
    able = (each for each in candidates if each.service.rank > rank or head.outranks(each))
    return _enough(able, num_slots, num_blocks, gain)


def for_bound(
    running: Iterable[Request],
    spared: Collection[Request],
    num_slots: int,
    num_blocks: int,
    gain: Gain,
    remaining: Remaining,
) -> list[Request]:
    """The same for one whose waiting bound comes near: anybody but those that are served for that reason too."""
    able = [each for each in running if each not in spared and each.scheduled < each.final]
    return _enough(in_order(able, remaining), num_slots, num_blocks, gain)


def in_order(able: Iterable[Request], remaining: Remaining) -> Iterator[Request]:
    """The first one goes first. Whoever is more urgent is not looked at before it is asked for."""
    groups: dict[tuple[int, int], list[Request]] = {}
    for each in able:
        groups.setdefault(each.urgency, []).append(each)
    for urgency in sorted(groups, reverse=True):
        left = [((num := remaining(each)) > FEW_LEFT, num, each.arrival, each) for each in groups[urgency]]
        left.sort(reverse=True)  # arrivals differ
        yield from [one[-1] for one in left]


class InOrder:
    """The same order, for several to choose from: worked out as far as one of them looks. Who went meanwhile is out."""

    def __init__(self, able: Iterable[Request], remaining: Remaining) -> None:
        self._seen: list[Request] = []
        self._more = in_order(able, remaining)

    def __iter__(self) -> Iterator[Request]:
        yield from [each for each in self._seen if each.state is State.RUNNING]
        for each in self._more:
            self._seen.append(each)
            yield each


def _enough(candidates: Iterable[Request], num_slots: int, num_blocks: int, gain: Gain) -> list[Request]:
    chosen: list[Request] = []
    for victim in candidates:
        if num_slots <= 0 and num_blocks <= 0:
            break
        chosen.append(victim)
        num_slots -= 1
        num_blocks -= gain(victim.blocks) + 1
    return chosen if num_slots <= 0 and num_blocks <= 0 else []
