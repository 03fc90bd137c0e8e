"""Which replica takes a request: filter → score → pick.

To add a criterion, write one function, put it into `FILTERS` or `SCORES`, and give it a row in the table test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shoal.fleet.view import ReplicaView


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """What the router knows of the request that it places."""

    avoid: frozenset[str] = frozenset()  # replicas that failed this request before: the last resort


def is_ready(errand: Errand, replica: ReplicaView) -> bool:
    return replica.ready


def failed_before(errand: Errand, replica: ReplicaView) -> int:
    return int(replica.name in errand.avoid)


def suspect(errand: Errand, replica: ReplicaView) -> int:
    """Not a filter: where all are suspect, the fault is more likely ours, and refusing everything helps nobody."""
    return int(replica.suspect)


def load(errand: Errand, replica: ReplicaView) -> int:
    return replica.num_running + replica.num_waiting + replica.num_unreported


FILTERS: tuple[Callable[[Errand, ReplicaView], bool], ...] = (is_ready,)
SCORES: tuple[Callable[[Errand, ReplicaView], int], ...] = (
    failed_before,
    suspect,
    load,
)  # earlier ones weigh more, low is good


def pick(errand: Errand, replicas: Iterable[ReplicaView]) -> str | None:
    """The name of the best replica, or None where no one can take the request. Equal scores: the first name."""
    candidates = [replica for replica in replicas if all(keep(errand, replica) for keep in FILTERS)]
    if not candidates:
        return None
    return min(candidates, key=lambda replica: (*(score(errand, replica) for score in SCORES), replica.name)).name
