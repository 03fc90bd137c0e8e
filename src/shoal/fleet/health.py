"""Who counts as alive, by what was last heard of it and when.

A closed socket is noticed at once; these limits are for what is silent: a stopped process keeps its sockets open.
"""

from __future__ import annotations

MS_NS = 1_000_000
LEASE_NS = 5_000 * MS_NS  # registrations and sessions: over when nothing was heard for this long
SUSPECT_NS, SUSPECT_STEPS = 1_500 * MS_NS, 3
DEAD_NS, DEAD_STEPS = 3_000 * MS_NS, 5
STUCK_NS, STUCK_STEPS = 60_000 * MS_NS, 100


def suspect_after_ns(announced_ns: int) -> int:
    """How long a step counter may stand still before its replica gets no new work; `announced_ns`: the present step."""
    return max(SUSPECT_NS, SUSPECT_STEPS * announced_ns)


def dead_after_ns(announced_ns: int) -> int:
    """How long it may stand still before its replica counts as dead."""
    return max(DEAD_NS, DEAD_STEPS * announced_ns)


def stuck_after_ns(announced_ns: int) -> int:
    """How long a step may take before its own process gives up: far beyond slow, whatever was announced."""
    return max(STUCK_NS, STUCK_STEPS * announced_ns)


def expired(heard_ns: int, now_ns: int) -> bool:
    return now_ns - heard_ns > LEASE_NS
