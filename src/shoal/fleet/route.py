"""Which replica takes a request: filter → candidates → score → pick.

Where replicas have roles, `split.choose` weighs whether one should compute the prompt and another decode it.

To add a criterion, write one function (a score: in scorers.py), put it into `FILTERS` or `SCORES`, and give it a row in
the table test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import mul
from typing import NamedTuple

from shoal.fleet import scorers, split
from shoal.fleet.directory import Held
from shoal.fleet.scorers import Errand
from shoal.fleet.view import ReplicaRole, ReplicaView

ALIKE = 3.0  # costs that are so much higher may be noise, of a warm-up on a machine that others share
TYPICAL = (1, 64, 16_000, 16, 8_000)  # features of the step by which that is judged (core.stepcost)
MAX_CANDIDATES = 16  # that are scored: half of them for what they hold, the others by chance

Sample = Callable[[Sequence[ReplicaView], int], list[ReplicaView]]  # random.Random.sample


class Pick(NamedTuple):
    name: str
    cached_tokens: int  # of the prompt, that the replica is believed to hold
    then: str = ""  # who goes on from the first token on; empty: the same
    reason: split.Reason | None = None  # None: nothing was to be decided, since all replicas do both


def is_ready(errand: Errand, replica: ReplicaView) -> bool:
    return replica.ready


FILTERS: tuple[Callable[[Errand, ReplicaView], bool], ...] = (is_ready,)
SCORES: tuple[Callable[[Errand, ReplicaView, int], int], ...] = (
    scorers.failed_before,
    scorers.suspect,
    scorers.only_decodes,
    scorers.expected_ns,
    scorers.load,
)  # earlier ones weigh more, low is good


def pick(errand: Errand, replicas: Iterable[ReplicaView], held: Mapping[str, Held], sample: Sample) -> Pick | None:
    """The best replica, or None where no one can take the request. Equal scores: the first name.

    `held`: what the directory knows of the errand's keys. `sample` is asked only where there are more candidates than
    are scored.
    """
    ready = [replica for replica in replicas if all(keep(errand, replica) for keep in FILTERS)]
    cached = {name: errand.tokens_of(each.blocks) for name, each in held.items()}
    candidates = _with_costs_of_their_like(_candidates(ready, cached, sample))
    if not candidates:
        return None
    if any(replica.role is not ReplicaRole.BOTH for replica in candidates):
        sound = [each for each in candidates if not (each.suspect or each.name in errand.avoid)]
        if sound:
            way, reason = split.choose(errand, sound, cached)
            return Pick(way.name, cached.get(way.name, 0), way.then, reason)

    def scores(replica: ReplicaView) -> tuple[int | str, ...]:
        cached_tokens = cached.get(replica.name, 0)
        return *(score(errand, replica, cached_tokens) for score in SCORES), replica.name

    best = min(candidates, key=scores)
    return Pick(best.name, cached.get(best.name, 0))


def _with_costs_of_their_like(replicas: list[ReplicaView]) -> list[ReplicaView]:
    """Machines that are alike learn costs that are not quite: those near the fastest one's are taken as equal. Else
    noise sends all requests to one of them, and the others, which get none, never learn better."""
    if not replicas:
        return []
    times = [sum(map(mul, replica.costs, TYPICAL)) for replica in replicas]
    alike = [number for number, time in enumerate(times) if time <= ALIKE * min(times)]
    columns = zip(*(replicas[number].costs for number in alike), strict=True)
    costs = tuple(sum(column) / len(alike) for column in columns)
    return [replace(each, costs=costs) if number in alike else each for number, each in enumerate(replicas)]


def _candidates(ready: list[ReplicaView], cached: Mapping[str, int], sample: Sample) -> list[ReplicaView]:
    """Of each role as many as are scored."""
    groups = [[replica for replica in ready if replica.role is role] for role in ReplicaRole]
    return [replica for group in groups for replica in _of_one_role(group, cached, sample)]


def _of_one_role(ready: list[ReplicaView], cached: Mapping[str, int], sample: Sample) -> list[ReplicaView]:
    if len(ready) <= MAX_CANDIDATES:
        return ready
    ready.sort(key=lambda replica: (-cached.get(replica.name, 0), replica.name))
    holders = [replica for replica in ready[: MAX_CANDIDATES // 2] if cached.get(replica.name)]
    others = ready[len(holders) :]
    return holders + sample(others, MAX_CANDIDATES - len(holders))
