"""What a chunk is worth now, and how long a step may become: the targets of the waiting and of the running."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.core.progress import NEVER_NS, Request

MOST_URGENT = 4.0  # times as much as one that has all its time left
STALL_TOKENS = 8  # after a preemption, so many token intervals are the time within which the next token is due
RECENT_NS = 10_000_000_000
NO_RANK = 1 << 30  # behind all
LEAST_SHARE = 0.75  # others may add so much to a step of decodes, even where these are late already ...
CATCH_UP = 0.8  # ... but if they can catch up, no more than leaves the step this part of the time that a token may take


def late_ns(first_ns: int, tpot_ns: int) -> int:
    """How long a step may become for the sake of the less urgent, where tokens are late. `first_ns`: without these;
    `tpot_ns`: the late one's target, 0: none."""
    shared_ns = int(first_ns * (1.0 + LEAST_SHARE))
    if first_ns >= tpot_ns:
        return shared_ns
    return min(shared_ns, max(first_ns, int(CATCH_UP * tpot_ns)))


def worth(request: Request, now_ns: int, takes_ns: int) -> float:
    """Its class's weight, times an urgency from 1 to MOST_URGENT: how much of the time to its deadline is used up, the
    time that its tokens take left out. One whose deadline cannot be met any more is worth no more than one that is not
    urgent, so that it does not make others late too; the waiting bound looks after it.
    """
    weight = request.service.weight
    due_ns = request.token_due_ns
    if due_ns == NEVER_NS:
        return weight * (1.0 + (now_ns - request.served_ns) / request.max_wait_ns)
    slack_ns = due_ns - now_ns - takes_ns
    if slack_ns < 0:
        return weight
    horizon_ns = STALL_TOKENS * request.tpot_ns if request.num_output else request.ttft_ns
    return weight * (MOST_URGENT - (MOST_URGENT - 1.0) * min(1.0, slack_ns / max(1, horizon_ns)))


class Hurry:
    """More urgent requests that may come at any moment, since some came lately: what is kept ready for them."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}  # by rank: when one came last, and its TTFT target

    def arrived(self, request: Request) -> None:
        self._seen[request.service.rank] = (request.arrived_ns, request.ttft_ns or NEVER_NS)

    def ttft_ns(self, rank: int, now_ns: int) -> int:
        """The least target among classes above this rank; 0: none of them is to be expected."""
        recent = [
            ttft_ns for other, (came_ns, ttft_ns) in self._seen.items() if other < rank and now_ns - came_ns < RECENT_NS
        ]
        return min(recent, default=0)


class Leeway:
    """How long the step may become for the sake of a chunk of a class: the tokens of decodes that are as urgent, or
    more, stay in time, and so does a more urgent request that may come meanwhile."""

    def __init__(
        self,
        decodes: Sequence[Request],
        hurry: Hurry,
        now_ns: int,
        decodes_ns: int,
        max_ns: int,
        num_stages: int = 1,
    ) -> None:
        """`decodes_ns`: the time of the step with the decodes alone. `num_stages`: each takes as long as the step."""
        self._decodes = decodes
        self._hurry = hurry
        self._now_ns = now_ns
        self._decodes_ns = min(max_ns, decodes_ns)
        self._least_ns = min(max_ns, int(decodes_ns * (1.0 + LEAST_SHARE)))
        self._max_ns = max_ns
        self._num_stages = num_stages
        self._first_rank, self._first_due_ns = NO_RANK, NEVER_NS
        self._limits_ns: dict[int, int] = {}

    def leave_to(self, candidates: Iterable[Request]) -> None:
        """Chunks of these are to be computed: the less urgent do not make the step longer than the most urgent's first
        tokens may take."""
        self._first_rank, self._first_due_ns = min([(each.service.rank, each.token_due_ns) for each in candidates])

    def limit_ns(self, rank: int) -> int:
        found = self._limits_ns.get(rank)
        if found is None:
            found = self._limits_ns[rank] = self._limit_ns(rank)
        return found

    def _limit_ns(self, rank: int) -> int:
        decodes = [each for each in self._decodes if each.service.rank <= rank]
        first = min(decodes, key=lambda each: each.token_due_ns, default=None)
        left_ns, least_ns = NEVER_NS, self._least_ns
        if first is not None:
            left_ns = (first.token_due_ns - self._now_ns) // self._num_stages
            if first.service.rank < rank:
                least_ns = min(self._max_ns, late_ns(self._decodes_ns, first.tpot_ns))
        if hurry_ns := self._hurry.ttft_ns(rank, self._now_ns):
            left_ns = min(left_ns, hurry_ns // 2)
        left_ns = min(left_ns, self._max_ns)
        if rank > self._first_rank:
            left_ns, least_ns = min(left_ns, self._first_due_ns - self._now_ns), self._decodes_ns
        return max(least_ns, left_ns)
