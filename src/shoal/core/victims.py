"""Whom to preempt when blocks or slots run out.

Who goes first: the least urgent; of these the longest predicted remainder, since it would hold its blocks longest; of
equal ones the last to arrive. One with few tokens left gives its blocks back soon by itself: never such a one, unless
all of its urgency are. Never one as urgent as the one that it would make way for, nor the first in order, so that work
always ends. Who has nothing left to compute is no victim: its step in flight returns its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from shoal.core.request import Request

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
    head: Request, running: Iterable[Request], num_slots: int, num_blocks: int, gain: Gain, remaining: Remaining
) -> list[Request]:
    """Who must go so that one that waits can enter, which lacks that many slots and blocks; nobody if that is not
    enough. Each that goes gives back a slot, its blocks, and the one block that was left alone for it to grow."""
    able = [each for each in running if head.outranks(each) and each.known > each.shielded]
    able = [each for each in able if each.scheduled < each.final]
    return _enough(in_order(able, remaining), num_slots, num_blocks, gain)


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


def in_order(able: Iterable[Request], remaining: Remaining) -> list[Request]:
    """The first one goes first."""
    left = {each.id: remaining(each) for each in able}
    return sorted(
        able,
        key=lambda each: (each.urgency, left[each.id] > FEW_LEFT, left[each.id], each.arrival, each.id),
        reverse=True,
    )


def _enough(candidates: Iterable[Request], num_slots: int, num_blocks: int, gain: Gain) -> list[Request]:
    chosen: list[Request] = []
    for victim in candidates:
        if num_slots <= 0 and num_blocks <= 0:
            break
        chosen.append(victim)
        num_slots -= 1
        num_blocks -= gain(victim.blocks) + 1
    return chosen if num_slots <= 0 and num_blocks <= 0 else []
