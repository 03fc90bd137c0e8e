"""A supervised process: its states, and how long to wait before it is started again.

RUNNING ──stop──► STOPPING ──► STOPPED
  │  ▲                            ▲
 died └── BACKING_OFF ──stop──────┤
  └─────► PARKED ────────stop─────┘      (parked: a crash loop, somebody has to look at the cause)
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

SECOND_NS = 1_000_000_000
FIRST_WAIT_NS = 1 * SECOND_NS
LONGEST_WAIT_NS = 30 * SECOND_NS
STABLE_NS = 60 * SECOND_NS  # a process that lived this long starts again with FIRST_WAIT_NS
CRASH_LOOP_DEATHS = 5
CRASH_LOOP_NS = 60 * SECOND_NS


class Life(StrEnum):
    RUNNING = "running"
    BACKING_OFF = "backing_off"
    PARKED = "parked"
    STOPPING = "stopping"
    STOPPED = "stopped"


TRANSITIONS: dict[Life, frozenset[Life]] = {
    Life.RUNNING: frozenset({Life.BACKING_OFF, Life.PARKED, Life.STOPPING}),
    Life.BACKING_OFF: frozenset({Life.RUNNING, Life.STOPPED}),
    Life.PARKED: frozenset({Life.STOPPED}),
    Life.STOPPING: frozenset({Life.STOPPED}),
    Life.STOPPED: frozenset(),
}


class Restarts:
    """When to start one process again: after 1, 2, 4 … 30 s, and not at all once it is in a crash loop."""

    def __init__(self) -> None:
        self._deaths: deque[int] = deque(maxlen=CRASH_LOOP_DEATHS)
        self._started_ns = 0
        self._wait_ns = FIRST_WAIT_NS

    def started(self, now_ns: int) -> None:
        self._started_ns = now_ns

    def died(self, now_ns: int) -> int | None:
        """Nanoseconds to wait; None: park it."""
        if now_ns - self._started_ns >= STABLE_NS:
            self._wait_ns = FIRST_WAIT_NS
        self._deaths.append(now_ns)
        if len(self._deaths) == CRASH_LOOP_DEATHS and now_ns - self._deaths[0] <= CRASH_LOOP_NS:
            return None
        wait_ns = self._wait_ns
        self._wait_ns = min(2 * wait_ns, LONGEST_WAIT_NS)
        return wait_ns
