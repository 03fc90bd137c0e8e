"""Service classes: how urgent a request is, what it is promised, and how long it may wait at most.

A class is granted to a caller by the gateway, never claimed. Gateway and engine read the same table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceClass:
    rank: int  # lower is more urgent: it may preempt what is higher
    weight: float = 1.0  # worth of a token beside one of another class
    ttft_ms: float = 0.0  # target: from arrival to the first token; 0: none
    tpot_ms: float = 0.0  # target: mean time between tokens; 0: none
    max_wait_s: float = 120.0  # an admitted request never waits longer for its next slice
    max_queue: int = 1024  # most requests of the class that wait in a replica


STANDARD = "standard"  # of a request that names none

DEFAULT_CLASSES: dict[str, ServiceClass] = {
    "interactive": ServiceClass(rank=0, weight=8.0, ttft_ms=1000.0, tpot_ms=100.0, max_wait_s=30.0),
    STANDARD: ServiceClass(rank=1, weight=4.0, ttft_ms=5000.0, tpot_ms=250.0, max_wait_s=120.0),
    "batch": ServiceClass(rank=2, weight=1.0, max_wait_s=3600.0, max_queue=16384),
}
