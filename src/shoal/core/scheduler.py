"""submit / abort / plan / apply: the short loop that keeps one replica busy and uses the other files to decide.

    submit ──► waiting line ──admit──► running ──► plan ──► (the runner computes) ──► apply ──► events
                     ▲                    │
                     └──── preempt ───────┘

Several plans may be in flight. What keeps that safe:
  - a planned token is a placeholder until its step returns; only filled blocks enter the prefix index;
  - results apply in step order, and a token for a request that ended meanwhile is dropped;
  - blocks of a request that left are given back when the last step that names it has returned, and a preempted
    request comes back only after that step, with the tokens which steps in flight sampled for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass

from shoal.core import victims
from shoal.core.admission import refuse
from shoal.core.compose import Room, split
from shoal.core.kv.blocks import BlockPool
from shoal.core.kv.hashing import scope_key
from shoal.core.kv.prefix import Chain, PrefixIndex
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
from shoal.core.waiting import WaitingLine


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
        self._index = PrefixIndex(limits.block_tokens)
        self._pool = BlockPool(limits.num_blocks, self._index)
        self._requests: dict[str, Request] = {}  # all that have not ended
        self._line = WaitingLine()
        self._running: dict[str, Request] = {}  # in the order in which steps serve them
        self._flights: deque[Flight] = deque()
        self._held: dict[int, list[list[int]]] = {}  # step -> block tables to release when it has returned
        self._leaves: list[str] = []  # requests that the runner still knows and must forget
        self._events: list[Event] = []  # of plan(), told by the next apply()
        self._step = 0  # newest planned
        self._returned = 0  # newest applied
        self._num_accepted = 0
        self._prompt_tokens = self._generation_tokens = 0
        self._preemptions = self._recomputed_tokens = 0
        self._prefix_queries = self._prefix_hits = 0

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
        return [] if request is None else [self._end(request, Finish.ABORT, None)]

    # -- plan ----------------------------------------------------------------------------------------------------------

    def plan(self, now_ns: int) -> StepPlan | None:
        """The next step, or None: nothing to compute, or everything waits for steps in flight."""
        if len(self._flights) >= self.limits.max_steps_in_flight:
            return None
        num_yielded = self._yield_to_urgent()
        decodes, behind = split(self._running.values())
        room = Room(self.limits, self.cost)
        num_fit = room.fit(decodes)
        full = num_fit < len(decodes)
        if full:
            self._serve_first(decodes[num_fit])
            del decodes[num_fit:]
        short = self._find_blocks(decodes, behind)
        room.take_decodes(decodes)

        step = self._step + 1
        slices = self._decode(decodes, step)
        chunks: list[tuple[Request, Slice]] = []
        admits: list[Admit] = []
        if not full:
            for request in behind:
                count = room.take_chunk(request.scheduled, request.known - request.scheduled, request.samples)
                if count:
                    chunks.append((request, _chunk(request, count, step)))
        if not full and not short:
            self._admit(room, step, admits, chunks, most=1 if num_yielded else self._max_running)
        if not slices and not chunks:
            return None
        slices += [part for _, part in chunks]
        sampled = decodes + [request for request, part in chunks if part.sample]
        features = room.features
        self._flights.append(Flight(step, features, decodes, chunks, sampled))
        self._step = step
        leaves, self._leaves = self._leaves, []
        return StepPlan(step, leaves, admits, slices, room.num_tokens, self.cost.predict(features))

    def _decode(self, decodes: list[Request], step: int) -> list[Slice]:
        """One token for each. This loop runs for every request in every step, hence without calls."""
        slices: list[Slice] = []
        append, new = slices.append, tuple.__new__
        for request in decodes:
            start = request.scheduled
            blocks = self._grow(request) if start == request.capacity else ()
            from_step = request.last_step if request.placeholders else -1
            append(new(Slice, (request.id, start, 1, blocks, from_step, True)))
            request.scheduled = start + 1
            request.known += 1
            request.placeholders += 1
            request.last_step = step
        return slices

    def _grow(self, request: Request) -> tuple[int, ...]:
        blocks = self._pool.allocate(1)
        request.blocks += blocks
        request.capacity += self.limits.block_tokens
        return tuple(blocks)

    def _serve_first(self, request: Request) -> None:
        """The step was full before this request's turn came; the next step starts with it."""
        running = list(self._running.values())
        place = running.index(request)
        self._running = {each.id: each for each in running[place:] + running[:place]}

    # -- into the batch ------------------------------------------------------------------------------------------------

    def _admit(
        self, room: Room, step: int, admits: list[Admit], chunks: list[tuple[Request, Slice]], *, most: int
    ) -> None:
        """Newcomers in order of the line, each with blocks for all its known tokens, while the step has room."""
        for request in self._line:
            if len(admits) == most or len(self._running) >= self._max_running:
                return
            if not self._leader_done(request):
                continue
            if request.last_step > self._returned or self._blocks_to_enter(request) > self._pool.num_available:
                return  # nobody overtakes it
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
        """Available blocks that it takes to admit the request; leaves its prefix hits in `chain.matched`.

        All known tokens get their blocks at once, so a prompt that started never waits for blocks half way. One block
        for each running request is left alone, so that the newcomer is not preempted as soon as they grow.
        """
        size = self.limits.block_tokens
        hits = request.chain.matched
        if self.limits.prefix_caching and request.spec.sampling.prompt_logprobs is None:
            # At least one token is computed, since its logits are what the next token is sampled from.
            hits = self._index.match(request.chain, request.tokens, (request.known - 1) // size)
        num_new = -(-request.known // size) - len(hits)
        return num_new + self._pool.num_cached_of(hits) + len(self._running)

    def _enter(self, request: Request) -> Admit:
        size = self.limits.block_tokens
        hits = request.chain.matched
        num_hit = len(hits) * size
        self._line.remove(request)
        self._running[request.id] = request
        request.move(State.RUNNING)
        request.blocks = self._pool.acquire(hits)
        request.blocks += self._pool.allocate(-(-request.known // size) - len(hits))
        request.capacity = len(request.blocks) * size
        request.scheduled = request.computed = num_hit
        request.chain.adopt(hits)
        self._prefix_queries += request.known
        self._prefix_hits += num_hit
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

    def _yield_to_urgent(self) -> int:
        """Preempts for the first in line, where less urgent requests are in its way and that is enough; how many."""
        head = next((request for request in self._line if self._leader_done(request)), None)
        if head is None or head.last_step > self._returned:
            return 0
        worse = [
            each for each in self._running.values() if each.order[0] > head.order[0] and each.scheduled < each.final
        ]
        if not worse:
            return 0
        within_reach = self._num_coming() + sum([len(each.blocks) for each in worse])
        if self._blocks_to_enter(head) - len(worse) > within_reach:
            return 0
        count = 0
        while worse and (len(self._running) >= self._max_running or self._blocks_to_enter(head) > self._num_coming()):
            victim = max(worse, key=lambda each: each.order)
            worse.remove(victim)
            self._preempt(victim)
            count += 1
        return count

    def _find_blocks(self, decodes: list[Request], behind: list[Request]) -> bool:
        """Sees to it that each of `decodes` that needs a new block gets one: preempts, or takes it out of this step
        where blocks will come back with a step in flight. Both lists change in place. True: blocks were short."""
        growing = [request for request in decodes if request.scheduled == request.capacity]
        if len(growing) <= self._pool.num_available:
            return False
        while len(growing) > self._num_coming():
            victim = victims.pick(self._running.values())
            if victim is None:
                break
            self._preempt(victim)
            for requests in (decodes, behind, growing):
                if victim in requests:
                    requests.remove(victim)
        growing.sort(key=lambda request: request.order)
        for request in growing[self._pool.num_available :]:
            decodes.remove(request)
        return True

    def _num_coming(self) -> int:
        """Blocks that are available now, or will be as soon as every step in flight has returned."""
        held = [table for tables in self._held.values() for table in tables]
        ending = [request.blocks for request in self._running.values() if request.scheduled >= request.final]
        return self._pool.num_available + sum([self._pool.num_sole(table) for table in held + ending])

    def _preempt(self, request: Request) -> None:
        """Back to the line. Its tokens stay, those of steps in flight included; its KV is computed again."""
        lost = request.computed
        self._leave_batch(request)
        request.move(State.WAITING)
        request.lost = lost
        request.scheduled = request.computed = 0
        self._line.add(request)
        self._preemptions += 1
        self._events.append(Preempted(request.id, lost))

    def _leave_batch(self, request: Request) -> None:
        del self._running[request.id]
        self._leaves.append(request.id)
        if request.last_step > self._returned:
            self._held.setdefault(request.last_step, []).append(request.blocks)
        else:
            self._pool.release(request.blocks)
        request.blocks = []
        request.capacity = 0

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
        for table in self._held.pop(flight.step, ()):
            self._pool.release(table)
        return events

    def _advance(self, flight: Flight, result: StepResult, events: list[Event]) -> None:
        """The KV of the step's tokens is there. A request that left meanwhile has no use for it."""
        size = self.limits.block_tokens
        running = State.RUNNING
        for request in flight.decodes:
            if request.state is running:
                request.computed = computed = request.computed + 1
                if not computed % size:
                    self._enter_blocks(request)
        for request, part in flight.chunks:
            if result.prompt_logprobs and request.state is not State.FINISHED:
                self._score(request, part, result.prompt_logprobs.get(request.id), events)
            if request.state is running:
                request.computed += part.count
                self._enter_blocks(request)
                if request.computed == request.final and not part.sample:
                    events.append(self._end(request, Finish.LENGTH, None))

    def _enter_blocks(self, request: Request) -> None:
        if self.limits.prefix_caching:
            num_filled = request.computed // self.limits.block_tokens
            self._index.extend(request.chain, request.tokens, request.blocks, num_filled)

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
            free_blocks=self._pool.num_free,
            cached_blocks=self._pool.num_cached,
            total_blocks=self.limits.num_blocks,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            preemptions=self._preemptions,
            recomputed_tokens=self._recomputed_tokens,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            hash_collisions=self._index.collisions,
        )

    def check(self) -> None:
        """AssertionError, with a message that says what, where an invariant is broken."""
        self._pool.check([r.blocks for r in self._running.values()] + [t for ts in self._held.values() for t in ts])
        assert self._returned + len(self._flights) == self._step, "steps in flight are not consecutive"
        assert all(self._returned < step <= self._step for step in self._held), f"blocks held for {list(self._held)}"
        waiting = list(self._line)
        assert [r.order for r in waiting] == sorted(r.order for r in waiting), "the line is out of order"
        assert self._line.num_tokens == sum(r.known for r in waiting), "the line counts its tokens wrongly"
        assert len(self._running) <= self._max_running, f"{len(self._running)} requests run"
        assert len(set(self._leaves)) == len(self._leaves), f"a request leaves twice: {self._leaves}"
        assert not any(id in self._running for id in self._leaves), f"a running request leaves: {self._leaves}"
        live = {request.id: request for request in waiting} | self._running
        assert live == self._requests, f"lost or kept too long: {live.keys() ^ self._requests.keys()}"
        for request in waiting:
            assert request.state is State.WAITING and not request.blocks, f"{request.id} waits with blocks"
        for request in self._running.values():
            assert request.state is State.RUNNING, f"{request.id} runs as {request.state}"
        for request in live.values():
            request.check(self.limits.block_tokens)
            planned = sum(each is request for flight in self._flights for each in flight.sampled)
            assert planned == request.placeholders, (
                f"{request.id}: {request.placeholders} placeholders, {planned} planned"
            )
        for name, value in asdict(self.view()).items():
            assert value >= 0, f"{name} is {value}"


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
