"""The waiting line: who is admitted next.

Today: priority, then arrival; a preempted request keeps its arrival, so it comes back before later ones.
Classes, tenants and ageing will change `Request.order` and the order in here, nothing else.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from shoal.core.request import Request

_order = attrgetter("order")


class WaitingLine:
    def __init__(self) -> None:
        self._line: list[Request] = []  # sorted by order
        self.num_tokens = 0  # known tokens of all that wait

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Request]:
        """In order. The request just seen may be removed meanwhile, no other."""
        place = 0
        while place < len(self._line):
            request = self._line[place]
            yield request
            if place < len(self._line) and self._line[place] is request:
                place += 1

    def add(self, request: Request) -> None:
        insort(self._line, request, key=_order)
        self.num_tokens += request.known

    def remove(self, request: Request) -> None:
        place = bisect_left(self._line, request.order, key=_order)
        assert self._line[place] is request, f"{request.id} does not wait"
        del self._line[place]
        self.num_tokens -= request.known
