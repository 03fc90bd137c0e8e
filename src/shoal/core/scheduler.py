"""submit / abort / plan / apply: the short loop that keeps one replica busy and uses the other files to decide.

    submit ──► waiting line ──admit──► running ──► plan ──► (the runner computes) ──► apply ──► events
                     ▲                    │
                     └──── preempt ───────┘

Several plans may be in flight. What keeps that safe:
  - a planned token is a placeholder until its step returns; only filled blocks enter the prefix index;
  - results apply in step order, and a token for a request that ended meanwhile is dropped;
  - blocks of a request that left are given back when the last step that names it has returned, and a preempted
    request comes back only after that step, with the tokens which steps in flight sampled for it.

`now_ns` comes with every input although no decision looks at the time yet: deadlines and ageing will.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from operator import attrgetter

from shoal.core import invariants, victims
from shoal.core.admission import refuse
from shoal.core.compose import BATCHING, Room, split
from shoal.core.kv.hashing import scope_key
from shoal.core.kv.prefix import Chain
from shoal.core.limits import Limits
from shoal.core.plan import (
    Accepted,
    Admit,
    Ended,
    Event,
    Logprobs,
    Preempted,
    PromptScored,
    Refused,
    Slice,
    StepPlan,
    StepResult,
    Token,
    View,
)
from shoal.core.request import Finish, Request, RequestSpec, State
from shoal.core.stepcost import Features, StepCost
from shoal.core.tables import BlockTables
from shoal.core.waiting import WaitingLine

_order = attrgetter("order")


@dataclass(slots=True)
class Flight:
    """A plan whose result has not come back."""

    step: int
    features: Features
    decodes: list[Request]  # one token each, all sampled; the plan's first slices
    chunks: list[tuple[Request, Slice]]  # the others
    sampled: list[Request]  # whose tokens the result brings, in its order


class Scheduler:
    def __init__(self, limits: Limits, *, hash_root: bytes, cost: StepCost | None = None) -> None:
        """`hash_root`: kv.hashing.root_key of the model and the KV's layout; `cost`: learned on, in place."""
        self.limits = limits
        self.cost = cost or StepCost()
        self._root = hash_root
        self._max_running = min(limits.max_num_seqs, limits.max_num_batched_tokens)  # each gets its token, every step
        self._tables = BlockTables(limits)
        self._requests: dict[str, Request] = {}  # all that have not ended
        self._line = WaitingLine()
        self._batching = BATCHING[limits.batching](self._max_running)
        self._running: dict[str, Request] = {}  # in the order in which steps serve them
        self._flights: deque[Flight] = deque()
        self._leaves: list[str] = []  # requests that the runner still knows and must forget
        self._yielded: list[Request] = []  # preempted by the plan that is being made
        self._events: list[Event] = []  # of plan(), told by the next apply()
        self._step = 0  # newest planned
        self._returned = 0  # newest applied
        self._num_accepted = 0
        self._prompt_tokens = self._generation_tokens = 0
        self._preemptions = self._recomputed_tokens = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    def submit(self, spec: RequestSpec, now_ns: int) -> Accepted | Refused:
        leader = self._requests.get(spec.leader) if spec.leader is not None else None
        refused = refuse(
            spec,
            self.limits,
            known_id=spec.id in self._requests,
            known_leader=spec.leader is None or leader is not None,
            num_waiting=len(self._line),
        )
        if refused is not None:
            return refused
        keys = spec.prefix_keys[: len(spec.prompt) // self.limits.block_tokens]
        chain = Chain(scope_key(self._root, spec.salt), keys)
        self._num_accepted += 1
        request = Request(spec, self._num_accepted, chain, leader)
        self._requests[spec.id] = request
        self._line.add(request)
        return Accepted(spec.id)

    def abort(self, id: str, now_ns: int) -> list[Event]:
        """Its one Ended event; empty for an id that is unknown or has ended."""
        request = self._requests.get(id)
        if request is None:
            return []
        self._events = [event for event in self._events if event.id != id]  # nothing is told after the end
        return [self._end(request, Finish.ABORT, None)]

    # -- plan ----------------------------------------------------------------------------------------------------------

    def plan(self, now_ns: int) -> StepPlan | None:
        """The next step, or None: nothing to compute, or everything waits for steps in flight."""
        if len(self._flights) >= self.limits.max_steps_in_flight:
            return None
        self._yielded = []
        self._yield_to_urgent()
        decodes, behind = split(self._running.values())
        room = Room(self.limits, self.cost)
        num_fit = room.fit(decodes)
        full = num_fit < len(decodes)
        if full:
            self._serve_first(decodes[num_fit])
            del decodes[num_fit:]
        ready = self._find_blocks(decodes)
        room.take_decodes(ready)

        step = self._step + 1
        slices = self._decode(ready, step)
        chunks: list[tuple[Request, Slice]] = []
        admits: list[Admit] = []
        if not full:
            self._catch_up(behind, room, step, chunks)
            self._admit(room, step, admits, chunks)
        if not slices and not chunks:
            return None
        slices += [part for _, part in chunks]
        sampled = ready + [request for request, part in chunks if part.sample]
        features = room.features
        self._flights.append(Flight(step, features, ready, chunks, sampled))
        self._step = step
        leaves, self._leaves = self._leaves, []
        return StepPlan(step, leaves, admits, slices, room.num_tokens, self.cost.predict(features))

    def _decode(self, decodes: list[Request], step: int) -> list[Slice]:
        """One token for each. This loop runs for every request in every step, hence without calls."""
        slices: list[Slice] = []
        append, new = slices.append, tuple.__new__
        for request in decodes:
            start = request.scheduled
            blocks = self._tables.grow(request) if start == request.capacity else ()
            from_step = request.last_step if request.placeholders else -1
            append(new(Slice, (request.id, start, 1, blocks, from_step, True)))
            request.scheduled = start + 1
            request.known += 1
            request.placeholders += 1
            request.last_step = step
        return slices

    def _catch_up(self, behind: list[Request], room: Room, step: int, chunks: list[tuple[Request, Slice]]) -> None:
        for request in behind:
            if request.state is State.RUNNING:  # not preempted for the sake of this step
                count = room.take_chunk(request.scheduled, request.known - request.scheduled, request.samples)
                if count:
                    chunks.append((request, _chunk(request, count, step)))

    def _serve_first(self, request: Request) -> None:
        """The step was full before this request's turn came; the next step starts with it."""
        running = list(self._running.values())
        place = running.index(request)
        self._running = {each.id: each for each in running[place:] + running[:place]}

    # -- into the batch ------------------------------------------------------------------------------------------------

    def _admit(self, room: Room, step: int, admits: list[Admit], chunks: list[tuple[Request, Slice]]) -> None:
        """Newcomers in order of the line, each with blocks for all its known tokens, while the step has room."""
        for request in self._batching.candidates(self._line):
            if len(self._running) >= self._max_running:
                return
            if not self._leader_done(request):
                continue
            if request.last_step > self._returned or request in self._yielded:
                return  # not yet, and nobody overtakes it
            if self._blocks_to_enter(request) > self._tables.pool.num_available:
                return
            start = len(request.chain.matched) * self.limits.block_tokens
            count = room.take_chunk(start, request.known - start, request.samples)
            if not count:
                return
            admits.append(self._enter(request))
            chunks.append((request, _chunk(request, count, step)))

    def _leader_done(self, request: Request) -> bool:
        """The choices of one prompt wait until the first has computed it, then find its blocks in the prefix index."""
        leader = request.leader
        if leader is not None and leader.state is not State.FINISHED and leader.computed < leader.num_prompt:
            return False
        request.leader = None
        return True

    def _blocks_to_enter(self, request: Request) -> int:
        """Blocks that must be available to admit the request: its own, and one for each running request, which is left
        alone so that the newcomer is not preempted as soon as they grow."""
        return self._tables.blocks_to_enter(request) + len(self._running)

    def _enter(self, request: Request) -> Admit:
        self._line.remove(request)
        self._running[request.id] = request
        request.move(State.RUNNING)
        self._tables.enter(request)
        num_hit = request.computed
        self._recomputed_tokens += max(0, request.lost - num_hit)
        if request.cached_tokens < 0:
            request.cached_tokens = min(num_hit, request.num_prompt)
            self._prompt_tokens += request.num_prompt
        spec = request.spec
        return Admit(
            request.id,
            tuple(request.tokens),
            request.num_prompt,
            num_hit,
            tuple(request.blocks),
            spec.sampling,
            spec.choice,
            spec.min_tokens,
            spec.stop_token_ids,
        )

    # -- under pressure ------------------------------------------------------------------------------------------------

    def _yield_to_urgent(self) -> None:
        """Preempts for the first in line where less urgent requests are in its way."""
        head = next((request for request in self._batching.candidates(self._line) if self._leader_done(request)), None)
        running = self._running.values()
        if head is None or head.last_step > self._returned or not running:
            return
        if max([each.order[0] for each in running]) <= head.order[0]:
            return
        num_slots = len(running) + 1 - self._max_running
        num_blocks = self._blocks_to_enter(head) - self._tables.num_coming(running)
        for victim in victims.for_urgent(head, running, num_slots, num_blocks, self._tables.pool.num_sole):
            self._preempt(victim)

    def _find_blocks(self, decodes: list[Request]) -> list[Request]:
        """Those of `decodes` that have a block for their token. Where blocks are short, others are preempted, or left
        out of this step since blocks will come back with a step in flight."""
        growing = [request for request in decodes if request.scheduled == request.capacity]
        if len(growing) <= self._tables.pool.num_available:
            return decodes
        running = self._running.values()
        for victim in victims.for_growth(
            growing, running, self._tables.num_coming(running), self._tables.pool.num_sole
        ):
            self._preempt(victim)
        growing = sorted([request for request in growing if request.state is State.RUNNING], key=_order)
        left_out = growing[self._tables.pool.num_available :]
        return [each for each in decodes if each.state is State.RUNNING and each not in left_out]

    def _preempt(self, request: Request) -> None:
        """Back to the line. Its tokens stay, those of steps in flight included; its KV is computed again."""
        lost = request.computed
        self._leave_batch(request)
        request.move(State.WAITING)
        request.lost = lost
        request.scheduled = request.computed = 0
        self._line.add(request)
        self._yielded.append(request)
        self._preemptions += 1
        self._events.append(Preempted(request.id, lost))

    def _leave_batch(self, request: Request) -> None:
        del self._running[request.id]
        self._leaves.append(request.id)
        self._tables.leave(request, self._returned)

    # -- apply ---------------------------------------------------------------------------------------------------------

    def apply(self, result: StepResult, now_ns: int) -> list[Event]:
        """What the oldest step in flight brought. ValueError: another step's result, or a wrong number of tokens."""
        if not self._flights or self._flights[0].step != result.step:
            raise ValueError(f"result of step {result.step}; expected {self._returned + 1} of {self._step} planned")
        flight = self._flights[0]
        if len(result.tokens) != len(flight.sampled):
            raise ValueError(f"step {result.step} brought {len(result.tokens)} tokens, not {len(flight.sampled)}")
        self._flights.popleft()
        self._returned = flight.step
        self.cost.update(flight.features, result.busy_ns)
        events, self._events = self._events, []
        self._advance(flight, result, events)
        self._accept(flight.sampled, result, events)
        self._tables.step_returned(flight.step)
        return events

    def _advance(self, flight: Flight, result: StepResult, events: list[Event]) -> None:
        """The KV of the step's tokens is there. A request that left meanwhile has no use for it."""
        size = self.limits.block_tokens
        running = State.RUNNING
        for request in flight.decodes:
            if request.state is running:
                request.computed = computed = request.computed + 1
                if not computed % size:
                    self._tables.filled_later(request)
        for request, part in flight.chunks:
            if result.prompt_logprobs and request.state is not State.FINISHED:
                self._score(request, part, result.prompt_logprobs.get(request.id), events)
            if request.state is running:
                request.computed += part.count
                self._tables.filled(request)
                if request.computed == request.final and not part.sample:
                    events.append(self._end(request, Finish.LENGTH, None))

    def _score(self, request: Request, part: Slice, entries: list[Logprobs] | None, events: list[Event]) -> None:
        """Prompt logprobs, each position once, also where a preemption made it computed twice."""
        if not entries:
            return
        first = max(part.start, 1)
        skip = max(0, request.scored - first)
        entries = entries[skip : request.num_prompt - first]
        if entries:
            events.append(PromptScored(request.id, first + skip, entries))
            request.scored = first + skip + len(entries)

    def _accept(self, sampled: list[Request], result: StepResult, events: list[Event]) -> None:
        """The sampled tokens. Like _decode, without calls in the usual case."""
        logprobs = result.logprobs
        finished, append, new = State.FINISHED, events.append, tuple.__new__
        num_tokens = 0
        for request, token in zip(sampled, result.tokens, strict=True):
            if request.state is finished:
                continue  # past its end
            tokens = request.tokens
            num_output = len(tokens) - request.num_prompt
            tokens.append(token)
            request.placeholders -= 1
            num_tokens += 1
            append(new(Token, (request.id, num_output, token, logprobs.get(request.id) if logprobs else None)))
            if token in request.stops and num_output + 1 >= request.spec.min_tokens:
                append(self._end(request, Finish.STOP, token))
            elif len(tokens) == request.limit:
                append(self._end(request, Finish.LENGTH, None))
        self._generation_tokens += num_tokens

    def _end(self, request: Request, reason: Finish, stop_token: int | None) -> Ended:
        if request.state is State.RUNNING:
            self._leave_batch(request)
        else:
            self._line.remove(request)
        request.move(State.FINISHED)
        del self._requests[request.id]
        return Ended(request.id, reason, stop_token, request.num_output, max(0, request.cached_tokens))

    # -- watching ------------------------------------------------------------------------------------------------------

    def view(self) -> View:
        return View(
            step=self._step,
            num_running=len(self._running),
            num_waiting=len(self._line),
            waiting_tokens=self._line.num_tokens,
            free_blocks=self._tables.pool.num_free,
            cached_blocks=self._tables.pool.num_cached,
            total_blocks=self.limits.num_blocks,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            preemptions=self._preemptions,
            recomputed_tokens=self._recomputed_tokens,
            prefix_queries=self._tables.num_queried,
            prefix_hits=self._tables.num_hit,
            hash_collisions=self._tables.index.collisions,
        )

    def check(self) -> None:
        """AssertionError, with a message that says what, where an invariant is broken."""
        invariants.check(self)


def _chunk(request: Request, count: int, step: int) -> Slice:
    """Plans the next `count` tokens of a request that has all its ids, and a placeholder where they reach its end."""
    start = request.scheduled
    request.scheduled = start + count
    request.last_step = step
    samples = request.scheduled == request.known and request.samples
    if samples:
        request.known += 1
        request.placeholders += 1
    return Slice(request.id, start, count, (), -1, samples)
