"""Leaves what keeps failing alone for a while, instead of paying for each failure."""

from __future__ import annotations

from collections import deque
from enum import Enum

MOST_ERRORS = 5
WINDOW_NS = 30_000_000_000
RETRY_NS = 30_000_000_000


class State(Enum):
    CLOSED = "closed"  # all is well; five errors within 30 s: OPEN
    OPEN = "open"  # to be left alone; after 30 s it is due for a try: TRYING
    TRYING = "trying"  # one error: OPEN; one success: CLOSED


class Breaker:
    """Times are of one monotonic clock, the caller's."""

    def __init__(self) -> None:
        self.state = State.CLOSED
        self.num_openings = 0
        self._errors_ns: deque[int] = deque(maxlen=MOST_ERRORS)
        self._opened_ns = 0

    def error(self, now_ns: int) -> bool:
        """True: it opens now. Errors of calls that began before it opened count for nothing."""
        if self.state is State.OPEN:
            return False
        self._errors_ns.append(now_ns)
        many = len(self._errors_ns) == MOST_ERRORS and now_ns - self._errors_ns[0] < WINDOW_NS
        if not many and self.state is State.CLOSED:
            return False
        self.open(now_ns)
        return True

    def open(self, now_ns: int) -> None:
        """At once, or again: the time before the next try starts anew."""
        self.num_openings += self.state is not State.OPEN
        self.state = State.OPEN
        self._opened_ns = now_ns
        self._errors_ns.clear()

    def due(self, now_ns: int) -> bool:
        return self.state is State.OPEN and now_ns - self._opened_ns >= RETRY_NS

    def retry(self) -> None:
        assert self.state is State.OPEN
        self.state = State.TRYING

    def success(self) -> None:
        if self.state is State.TRYING:
            self.state = State.CLOSED
