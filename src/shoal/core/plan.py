"""The vocabulary at the scheduler's boundary: plans go out, results and events come back, all plain data.

A token range of one request, and who owns it:

    0 ........ computed ........ scheduled ........ known
      KV there          in plans         not yet
                        in flight        planned

`known` = prompt + sampled ids + placeholders (tokens that a plan in flight will sample).
There is no prefill phase and no decode phase: a slice lets a request catch up with what is known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.core.request import Finish, Refusal, Sampling


class Admit(NamedTuple):
    """A request enters the batch, for the first time or after a preemption. Applied before the step's slices."""

    id: str
    tokens: tuple[int, ...]  # prompt + output so far, all ids filled
    num_prompt: int
    computed: int  # leading tokens whose KV the given blocks already hold (prefix hit)
    blocks: tuple[int, ...]  # block table, in order; later slices append to it
    sampling: Sampling
    choice: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]  # masked until min_tokens outputs exist


class Slice(NamedTuple):
    """Compute tokens [start, start + count) of one request in this step."""

    id: str
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    blocks: tuple[int, ...]  # appended to the request's block table before the step
    from_step: int  # the last input token is the one that this earlier step samples for the request; -1: all ids known
    sample: bool  # sample the token at position start + count


class Held(NamedTuple):
    """A prefix block as whoever looks for it knows it: its key alone proves nothing, keys may collide."""

    key: bytes
    parent: bytes  # key of the block before
    tokens: tuple[int, ...]


class KvOp(NamedTuple):
    """Copy whole blocks beside the steps: between the device and the host tier; where `disk` says which, between that
    and the disk. No step in flight writes to its blocks, and nobody else gets them before it is done."""

    number: int  # counts from 1; those with the device are done in this order
    id: str  # whose KV it is; empty for prefix blocks that nobody holds
    out: bool  # away from the device; else back
    device_blocks: tuple[int, ...]  # none where the disk is the other end
    host_blocks: tuple[int, ...]  # as many as there are at the other end
    disk: tuple[Held, ...] = ()  # what is written to the disk, or read from it


class Copied(NamedTuple):
    """A KvOp is done."""

    number: int
    busy_ns: int  # time of the copy itself, without waiting for others
    # Which of its blocks, counted from 0, came back with another content than they had; with the disk: are not there.
    bad: tuple[int, ...] = ()
    dropped: tuple[bytes, ...] = ()  # keys that cannot be read from the disk any more, told after `bad`


class Fetch(NamedTuple):
    """Bring blocks from another engine, beside the steps, into blocks that nobody else gets before it is done."""

    number: int  # counts from 1; fetches are done in any order
    id: str  # whose prefix it is
    address: str  # where the other engine lends
    incarnation: str  # of that engine
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]  # as many
    limit_ns: int  # what has not come by then is given up


class Brought(NamedTuple):
    """A Fetch is done; nothing of it touches its blocks any more."""

    number: int
    num_good: int  # blocks from the first on that came whole; the others hold anything
    busy_ns: int


@dataclass(slots=True)
class StepPlan:
    """One step of one replica. `step` counts from 1 without gaps; results return in the same order.

    Where KV can only be moved, or there is only something to tell, it has no slices: nothing is computed and its result
    brings nothing.
    """

    step: int
    leaves: list[str]  # 1. forget these requests
    admits: list[Admit]  # 2. then learn these
    slices: list[Slice]  # 3. then compute; decodes and chunks mixed, in composer order
    num_tokens: int
    predicted_ns: int
    ops: list[KvOp] = field(default_factory=list)  # start these copies
    fetches: list[Fetch] = field(default_factory=list)  # and these


class Logprobs(NamedTuple):
    logprob: float  # of the token itself
    top: tuple[tuple[int, float], ...]  # (token id, logprob) of the most likely tokens, best first


@dataclass(slots=True)
class StepResult:
    step: int
    tokens: list[int]  # one per slice with `sample`, in slice order
    logprobs: dict[str, Logprobs] = field(default_factory=dict)  # only for requests that asked
    prompt_logprobs: dict[str, list[Logprobs]] = field(default_factory=dict)  # of tokens max(start, 1) .. start + count
    busy_ns: int = 0  # device time; under PP the slowest stage's cadence
    latency_ns: int = 0


class Accepted(NamedTuple):
    id: str


class Refused(NamedTuple):
    id: str
    reason: Refusal
    message: str  # names the field, the value and the limit
    retry_after_ms: int = 0  # when a place is predicted to be free; 0: no reason to try again, or nobody knows


class Token(NamedTuple):
    """One sampled token, accepted. A stop token is reported too; whether it becomes text is the gateway's matter."""

    id: str
    index: int  # type: ignore[assignment]  # position in the output, counting `RequestSpec.output`
    token: int
    logprobs: Logprobs | None


class PromptScored(NamedTuple):
    id: str
    start: int  # position in the prompt of the first entry; position 0 has no logprob, so start >= 1
    entries: list[Logprobs]


class Started(NamedTuple):
    """The first slice of a request is planned."""

    id: str
    waited_ns: int  # since it arrived, `RequestSpec.waited_ns` included


class Preempted(NamedTuple):
    id: str
    lost_tokens: int  # computed tokens that must be computed again


class Parked(NamedTuple):
    """Preempted with its KV kept in the host tier: nothing is lost."""

    id: str


class Resumed(NamedTuple):
    """Back among the running, after a Preempted or Parked."""

    id: str
    waited_ns: int  # since its last slice


class Ended(NamedTuple):
    """The one terminal event of an accepted request."""

    id: str
    reason: Finish
    stop_token: int | None
    num_output: int
    cached_tokens: int  # prompt tokens found in the prefix cache at the first admission


Event = Token | PromptScored | Started | Preempted | Parked | Resumed | Ended


class ClassView(NamedTuple):
    num_running: int
    num_waiting: int  # those without a slice, parked ones included
    num_parked: int
    longest_wait_ns: int  # of those that wait now


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A replica's numbers for heartbeats, routing and metrics. Counters only grow within one incarnation."""

    step: int
    num_running: int
    num_waiting: int
    waiting_tokens: int  # prompt and output tokens still to compute before the waiting requests sample again
    free_blocks: int
    cached_blocks: int  # unreferenced, but a prefix hit would find them
    total_blocks: int
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0  # with and without parking
    parks: int = 0
    recomputed_tokens: int = 0
    free_host_blocks: int = 0
    cached_host_blocks: int = 0  # prefix blocks that a prompt would find
    host_hits: int = 0  # tokens found in the host tier, beyond those found on the device
    disk_hits: int = 0  # tokens read from the disk into the host tier
    peer_hits: int = 0  # tokens brought from other engines
    lent_blocks: int = 0  # that other engines read
    bad_blocks: int = 0  # that came back from the host tier with another content, and were computed again
    total_host_blocks: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    classes: dict[str, ClassView] = field(default_factory=dict)
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    hash_collisions: int = 0
    chosen_worth: float = 0.0  # of the chunks that plans took (core.urgency.worth); their ratio is the composer's gain
    in_turn_worth: float = 0.0  # of those that they would have taken first come first served
    context_tokens: int = 0  # whose KV the latest step read, while any run
