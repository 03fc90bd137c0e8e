"""How far an accepted request has got, as a replica's scheduler sees it."""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache

from shoal.core.classes import ServiceClass
from shoal.core.kv.prefix import Chain
from shoal.core.request import RequestSpec


class State(StrEnum):
    WAITING = "waiting"  # in the line; parked where the host tier holds its KV, else without any
    RUNNING = "running"  # holds blocks and takes part in steps
    PARKING = "parking"  # its KV is being copied to the host tier
    RETURNING = "returning"  # its KV is being copied back, or fetched from another engine
    FINISHED = "finished"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.RETURNING, State.FINISHED}),
    State.RUNNING: frozenset({State.WAITING, State.PARKING, State.FINISHED}),  # back to waiting: preempted
    State.PARKING: frozenset({State.WAITING, State.FINISHED}),
    State.RETURNING: frozenset({State.RUNNING, State.FINISHED}),
    State.FINISHED: frozenset(),
}


@lru_cache(maxsize=64)
def stop_set(ids: tuple[int, ...]) -> frozenset[int]:
    """One for all requests that stop at the same tokens: each step looks at that of each request."""
    return frozenset(ids)


class Account:
    """What a tenant was served in a class, in tokens: the virtual counter of fair shares (Sheng et al., OSDI 2024)."""

    __slots__ = ("line", "num_live", "served", "tenant")

    def __init__(self, tenant: str = "") -> None:
        self.tenant = tenant
        self.served = 0
        self.num_live = 0
        self.line: list[Request] = []  # those that wait, by priority and arrival


def positions(spec: RequestSpec) -> int:
    """Tokens of a request whose KV is ever stored. The last token sampled is never an input, so it needs no place."""
    num_prompt = len(spec.prompt)
    return max(num_prompt + len(spec.output), num_prompt + spec.max_tokens - 1)


AIM = 0.9  # of a target is aimed at: a turn takes some time of its own
NEVER_NS = 1 << 62  # later than any time


class Request:
    """An accepted request: its state, its tokens and its blocks. The scheduler alone changes it.

    0 <= computed <= scheduled <= known, as drawn in plan.py; known = len(tokens) + placeholders.
    """

    __slots__ = (
        "account",
        "arrival",
        "arrived_ns",
        "blocks",
        "cached_tokens",
        "capacity",
        "chain",
        "computed",
        "demand",
        "final",
        "host_blocks",
        "id",
        "kept",
        "known",
        "last_step",
        "leader",
        "limit",
        "lost",
        "max_wait_ns",
        "num_prompt",
        "order",
        "placeholders",
        "scheduled",
        "scored",
        "served_ns",
        "service",
        "shielded",
        "spec",
        "started",
        "state",
        "stops",
        "token_due_ns",
        "tokens",
        "tpot_ns",
        "ttft_ns",
        "urgency",
    )  # fmt: skip

    def __init__(
        self, spec: RequestSpec, arrival: int, chain: Chain, leader: Request | None, service: ServiceClass
    ) -> None:
        self.spec = spec
        self.id = spec.id
        self.service = service
        self.state = State.WAITING
        self.arrival = arrival
        self.urgency = (service.rank, spec.priority)
        self.order = (service.rank, spec.priority, arrival, spec.id)  # who comes first, where nothing else decides
        self.ttft_ns = int(max(service.ttft_ms, spec.ttft_ms if service.ttft_ms else 0.0) * 1e6)  # 0: no target
        self.tpot_ns = int(AIM * max(service.tpot_ms, spec.tpot_ms if service.tpot_ms else 0.0) * 1e6)
        self.max_wait_ns = int(service.max_wait_s * 1e9)
        self.leader = leader  # None once its prompt is computed, or it ended
        self.stops = stop_set(spec.stop_token_ids)
        self.num_prompt = len(spec.prompt)
        self.limit = self.num_prompt + spec.max_tokens  # known tokens at which sampling stops
        self.final = positions(spec)  # computed tokens at which nothing is left to compute

        self.tokens = [*spec.prompt, *spec.output]  # filled ids
        self.placeholders = 0  # tokens that steps in flight will sample
        self.known = len(self.tokens)
        self.scheduled = 0
        self.computed = 0
        self.last_step = 0  # newest step that names it

        self.blocks: list[int] = []
        self.capacity = 0  # tokens that fit into the blocks
        self.chain = chain
        self.cached_tokens = -1  # prompt tokens found at the first admission; -1: not admitted yet
        self.lost = 0  # computed tokens lost by the last preemption
        self.scored = 1  # next prompt position whose logprobs the caller lacks

        self.host_blocks: list[int] = []  # hold its KV while it is parked ...
        self.kept = 0  # ... of so many tokens
        self.account = Account()  # its tenant's, in its class; the waiting line sets it
        self.demand = 0  # share of what waiting bounds allow
        self.started = False  # it had a slice
        self.arrived_ns = (
            self.served_ns
        ) = -1  # when it came; when its last slice was planned, or it came. -1: nobody knows
        self.token_due_ns = NEVER_NS  # when its next token is due by its TPOT target
        self.shielded = 0  # known tokens up to which nobody preempts it for rank

    @property
    def due_ns(self) -> int:
        """When it must have had a slice, by its waiting bound."""
        return self.served_ns + self.max_wait_ns

    @property
    def presses_ns(self) -> int:
        """From when on it is served before all that do not press: half of its bound is over."""
        return self.served_ns + self.max_wait_ns // 2

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def samples(self) -> bool:
        """Whether a token is sampled when all known tokens are computed."""
        return self.known < self.limit

    def outranks(self, other: Request) -> bool:
        """Whether it may preempt the other: by class, or by priority where both are one tenant's."""
        if self.service.rank != other.service.rank:
            return self.service.rank < other.service.rank
        return self.account.tenant == other.account.tenant and self.spec.priority < other.spec.priority

    def move(self, state: State) -> None:
        assert state in TRANSITIONS[self.state], f"{self.id}: {self.state} -> {state}"
        self.state = state

    def check(self, block_tokens: int) -> None:
        """AssertionError where the ranges of plan.py do not hold."""
        ranges = (self.computed, self.scheduled, self.known)
        assert 0 <= self.computed <= self.scheduled <= self.known, f"{self.id}: computed, scheduled, known = {ranges}"
        assert self.placeholders >= 0 and self.known == len(self.tokens) + self.placeholders, (
            f"{self.id}: known {self.known}"
        )
        assert self.computed <= len(self.tokens), f"{self.id}: computed beyond its filled tokens"
        assert self.capacity == len(self.blocks) * block_tokens, f"{self.id}: capacity {self.capacity}"
        assert self.scheduled <= self.capacity, f"{self.id}: scheduled {self.scheduled} of capacity {self.capacity}"
        assert self.scheduled <= self.final, f"{self.id}: scheduled {self.scheduled} beyond {self.final}"
