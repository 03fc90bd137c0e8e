"""Whom to preempt when blocks or slots run out.

Who goes first: the least urgent; of these the longest predicted remainder, since it would hold its blocks longest and
one with few tokens left soon gives them back by itself; of equal ones the last to arrive. Never one as urgent as the
one that it would make way for, nor the first in order, so that work always ends. Who has nothing left to compute is no
victim: its step in flight returns its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush

from shoal.core.progress import Request, State

Urgency = tuple[int, ...]
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


def for_urgent(head: Request, candidates: InOrder, num_slots: int, num_blocks: int, gain: Gain) -> list[Request]:
    """Who must go so that one that waits can enter, which lacks that many slots and blocks; nobody if that is not
    enough. Each that goes gives back a slot, its blocks, and the one block that was left alone for it to grow.
    `candidates`: of all that run."""
    able = (
        each
        for each in candidates.behind(head.urgency)
        if head.outranks(each) and each.known > each.shielded and each.scheduled < each.final
    )
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
    """The first one goes first."""
    groups: dict[Urgency, list[Request]] = {}
    for each in able:
        groups.setdefault(each.urgency, []).append(each)
    return InOrder(groups, remaining).behind(())


class InOrder:
    """That order, for several to choose from: worked out as far as one of them looks. Who went meanwhile is out."""

    def __init__(self, groups: Mapping[Urgency, Iterable[Request]], remaining: Remaining) -> None:
        self._groups = groups
        self._remaining = remaining
        self._begun: dict[Urgency, tuple[list[Request], Iterator[Request]]] = {}  # those seen so far, and the others

    def behind(self, urgency: Urgency) -> Iterator[Request]:
        """Those that are less urgent."""
        for one in sorted(self._groups, reverse=True):
            if one <= urgency:
                return
            if one not in self._begun:
                self._begun[one] = ([], _longest_first(self._groups[one], self._remaining))
            seen, others = self._begun[one]
            yield from [each for each in seen if each.state is State.RUNNING]
            for each in others:
                seen.append(each)
                yield each


def _longest_first(group: Iterable[Request], remaining: Remaining) -> Iterator[Request]:
    """A remainder is predicted for as few as it takes: it is no longer than max_tokens allows."""
    allowed = [(each.known - each.limit if each.limit > each.known else 0, -each.arrival, each) for each in group]
    heapify(allowed)  # arrivals differ
    predicted: list[tuple[int, int, Request]] = []
    while allowed:
        most, arrival, request = heappop(allowed)
        while predicted and predicted[0][0] < most:
            yield heappop(predicted)[-1]
        heappush(predicted, (-remaining(request), arrival, request))
    while predicted:
        yield heappop(predicted)[-1]


def _enough(candidates: Iterable[Request], num_slots: int, num_blocks: int, gain: Gain) -> list[Request]:
    chosen: list[Request] = []
    for victim in candidates:
        if num_slots <= 0 and num_blocks <= 0:
            break
        chosen.append(victim)
        num_slots -= 1
        num_blocks -= gain(victim.blocks) + 1
    return chosen if num_slots <= 0 and num_blocks <= 0 else []
