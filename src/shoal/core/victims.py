"""Whom to preempt when blocks or slots run out.

Today: the last arrival of the lowest priority; its KV is dropped and computed again later. Never for a request of the
same priority that waits, and never the first in order, so that work always ends. A request that has nothing left to
compute is no victim: its last step in flight returns its blocks anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter

from shoal.core.request import Request

_order = attrgetter("order")


def for_growth(
    growing: list[Request], running: Iterable[Request], num_blocks: int, gain: Callable[[list[int]], int]
) -> list[Request]:
    """Who must go so that each of `growing` that stays gets one of `num_blocks` blocks.

    `gain`: blocks that come back when a table is released.
    """
    candidates = sorted([request for request in running if request.scheduled < request.final], key=_order)
    chosen: list[Request] = []
    num_needed = len(growing)
    while num_needed > num_blocks and len(candidates) > 1:
        victim = candidates.pop()
        chosen.append(victim)
        num_blocks += gain(victim.blocks)
        num_needed -= victim in growing
    return chosen


def for_urgent(
    head: Request, running: Iterable[Request], num_slots: int, num_blocks: int, gain: Callable[[list[int]], int]
) -> list[Request]:
    """Who must go so that the first in line can enter, which lacks that many slots and blocks; nobody if that is not
    enough. Each that goes gives back a slot, its blocks, and the one block that was left alone for it to grow."""
    priority = head.order[0]
    worse = sorted([r for r in running if r.order[0] > priority and r.scheduled < r.final], key=_order)
    chosen: list[Request] = []
    while num_slots > 0 or num_blocks > 0:
        if not worse:
            return []
        victim = worse.pop()
        chosen.append(victim)
        num_slots -= 1
        num_blocks -= gain(victim.blocks) + 1
    return chosen
