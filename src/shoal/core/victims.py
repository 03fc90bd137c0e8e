"""Whom to preempt when blocks or slots run out, and who may be.

Today: the last arrival of the lowest priority; its KV is dropped and computed again later.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from shoal.core.request import Request

_order = attrgetter("order")


def pick(running: Iterable[Request]) -> Request | None:
    """The victim, or None where only one request is left: the first in order always advances, so work always ends.

    A request that has nothing left to compute is no victim: its last step returns its blocks anyway.
    """
    candidates = [request for request in running if request.scheduled < request.final]
    return max(candidates, key=_order) if len(candidates) > 1 else None
