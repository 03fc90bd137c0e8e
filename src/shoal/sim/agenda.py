"""Virtual time: what happens next, in a total order."""

from __future__ import annotations

import heapq
from collections.abc import Callable

NEVER_NS = 1 << 62


class Agenda:
    """Actions in order of (time, order of adding): two runs with equal inputs do the same things in the same order."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._num_added = 0

    def at(self, when_ns: int, action: Callable[[], None]) -> None:
        assert when_ns >= self.now_ns, f"{when_ns} is over, it is {self.now_ns}"
        self._num_added += 1
        heapq.heappush(self._heap, (when_ns, self._num_added, action))

    def run(self, until_ns: int = NEVER_NS - 1) -> None:
        """Until nothing is left that happens at or before `until_ns`."""
        while self._heap and self._heap[0][0] <= until_ns:
            self.now_ns, _, action = heapq.heappop(self._heap)
            action()
