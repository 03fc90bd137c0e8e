"""submit, abort, plan, apply, copied, fetched: the short loop that keeps one replica busy; the other files decide.

    submit ──► waiting line ──admit──► running ──► plan ──► (the runner computes) ──► apply ──► events
                     ▲  ▲                 │
                     │  └──── preempt ────┤
                     └─ copied ◄── park ──┘            a copy that is done comes back through `copied`

Several plans may be in flight. What keeps that safe:
  - a planned token is a placeholder until its step returns; only filled blocks enter the prefix index;
  - results apply in step order, and a token for a request that ended meanwhile is dropped;
  - blocks of a request that left are given back when the last step that names it has returned, and a preempted
    request comes back only after that step, with the tokens which steps in flight sampled for it;
  - blocks that are being copied belong to their request until the copy is done (parking.py).

The time that decisions look at is that of plan, apply and copied: who arrived since the last plan arrived at this one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, repeat

from shoal.core import invariants, prefetching, pressing, pressure, stages
from shoal.core.admission import refuse
from shoal.core.bound import Promises
from shoal.core.compose import COMPOSERS, Candidate, Chosen, Room, split
from shoal.core.kv.hashing import scope_key
from shoal.core.kv.news import KvEvent
from shoal.core.kv.prefix import Chain
from shoal.core.limits import Limits
from shoal.core.members import Members
from shoal.core.newcomers import newcomers
from shoal.core.part import Part
from shoal.core.plan import (
    Accepted,
    Brought,
    Copied,
    Ended,
    Event,
    Held,
    KvOp,
    Logprobs,
    PromptScored,
    Refused,
    Slice,
    StepPlan,
    StepResult,
    Token,
    View,
)
from shoal.core.progress import NEVER_NS, Request, State
from shoal.core.request import Finish, Refusal, RequestSpec
from shoal.core.stepcost import Features, StepCost
from shoal.core.urgency import Hurry, Leeway, late_ns, worth


@dataclass(slots=True)
class Flight:
    """A plan whose result has not come back."""

    step: int
    features: Features
    decodes: list[Request]  # one token each, all sampled; the plan's first slices
    chunks: list[tuple[Request, Slice]]  # the others
    sampled: list[Request]  # whose tokens the result brings, in its order


class Scheduler:
    def __init__(
        self, limits: Limits, *, hash_root: bytes, cost: StepCost | None = None, on_disk: Iterable[Held] = ()
    ) -> None:
        """`hash_root`: kv.hashing.root_key of the model and the KV's layout; `cost`: learned on, in place; `on_disk`:
        prefix blocks that an earlier run left there."""
        self.limits = limits
        self.cost = cost or StepCost()
        self._root = hash_root
        self._composer = COMPOSERS[limits.composer](limits)
        self._members = Members(limits, self.cost, self._composer.make_line(), on_disk)
        self._promises = Promises(limits, self.cost)
        self._requests: dict[str, Request] = {}  # all that have not ended
        self._hurry = Hurry()
        self._flights: deque[Flight] = deque()
        self._some_left_out = False  # of the running, by the last plan
        self._num_accepted = 0
        self._generation_tokens = 0
        self._ns_per_token = 1e6  # of a step, learned
        self._drain = (-1, 0)  # (newest applied step, predicted milliseconds)
        self._context_tokens = 0  # of the newest applied step

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
            num_waiting=self._members.line.num_of_class[spec.service_class],
        )
        if refused is not None:
            late = refused.reason is Refusal.QUEUE_FULL
            return refused._replace(retry_after_ms=self._drain_ms()) if late else refused
        keys = spec.prefix_keys[: len(spec.prompt) // self.limits.block_tokens]
        chain = Chain(scope_key(self._root, spec.salt), keys)
        request = Request(spec, self._num_accepted + 1, chain, leader, self.limits.classes[spec.service_class])
        if spec.prefetch:
            self._num_accepted += 1
            self._requests[spec.id] = request
            self._members.prefetches.append(request)
            return Accepted(spec.id)
        if self._composer.weighs:
            request.demand = self._promises.demand(request)
            if not self._promises.allow(request):
                bound_s = request.service.max_wait_s
                message = f"one more wait of at most {bound_s:g} s cannot be promised to class {spec.service_class}"
                return Refused(spec.id, Refusal.WAITING_BOUND, message, self._drain_ms())
        self._num_accepted += 1
        self._requests[spec.id] = request
        self._promises.give(request)
        self._members.line.admitted(request)
        self._members.line.add(request)
        return Accepted(spec.id)

    def _drain_ms(self) -> int:
        """When half of what is here is predicted to be done."""
        members = self._members
        if self._drain[0] != members.returned:
            tokens = members.line.num_tokens + sum(map(members.remaining, self._requests.values()))
            self._drain = (members.returned, int(tokens * self._ns_per_token / 2e6) + 1)
        return self._drain[1]

    def abort(self, id: str, now_ns: int) -> list[Event]:
        """Its one Ended event; empty for an id that is unknown or has ended."""
        request = self._requests.get(id)
        if request is None:
            return []
        members = self._members
        if request.spec.prefetch:
            prefetching.end(members, request)
            return [self._prefetched(request, Finish.ABORT)]
        members.events = [event for event in members.events if event.id != id]  # nothing is told after the end
        return [self._end(request, Finish.ABORT, None)]

    # -- plan ----------------------------------------------------------------------------------------------------------

    def plan(self, now_ns: int) -> StepPlan | None:
        """The next step, or None: nothing to compute, or everything waits for steps or copies in flight."""
        if len(self._flights) >= self.limits.max_steps_in_flight:
            return None
        members = self._members
        members.now_ns = now_ns
        members.yielded = []
        for request in members.line.stamp(now_ns):
            self._hurry.arrived(request)
            members.ops += members.storing.fetch(request)
        pressed = pressing.pressing(members, self._some_left_out) if self._composer.weighs else []
        crowded = pressing.make_way(members, pressed)
        if not crowded:
            pressure.yield_to_urgent(members, self._composer.newcomers(members.line), pressed)
            pressure.park_ahead(members, self._hurry)

        running = members.running.values()
        decodes, behind = split(running if self.limits.num_stages == 1 else stages.resolved(running))
        num_running = len(decodes) + len(behind)
        part = Part(members, Room(self.limits, self.cost), members.planned + 1)
        if pressed:
            crowded |= not pressing.serve(members, pressed, part)
            decodes, behind = (
                [each for each in group if each.state is State.RUNNING and each.last_step != part.step]
                for group in (decodes, behind)
            )
        full = self._decode_all(decodes, behind, part)
        if not full:
            self._take_chunks(behind, part, crowded)
        ops = members.ops + members.parking.start_leaving(members.returned)
        prefetching.start(members)
        ops = (ops or members.sharing.start_spilling()) + members.storing.start_writing()
        if not (part.slices or part.chunks or ops or members.fetches or members.prefetched):
            return None
        self._some_left_out = len(part.decodes) + len(part.chunks) < num_running + len(part.admits)
        return self._launch(part, ops)

    def _launch(self, part: Part, ops: list[KvOp]) -> StepPlan:
        slices = part.slices + [chunk for _, chunk in part.chunks]
        sampled = part.decodes + [request for request, chunk in part.chunks if chunk.sample]
        features = part.room.features
        self._flights.append(Flight(part.step, features, part.decodes, part.chunks, sampled))
        members = self._members
        members.planned = part.step
        admits = [told for request, told in part.arrived if request in members.arrivals] + part.admits
        leaves, members.leaves = members.leaves, []
        fetches, members.fetches = members.fetches, []
        members.arrivals, members.ops = [], []
        predicted_ns = self.cost.predict(features) if slices else 0
        return StepPlan(part.step, leaves, admits, slices, part.room.num_tokens, predicted_ns, ops, fetches)

    def _decode_all(self, decodes: list[Request], behind: list[Request], part: Part) -> bool:
        """One token for each, as far as the step has room. True: it is full."""
        limit_ns, later = part.room.max_ns, list[Request]()
        if self.limits.num_stages > 1:
            decodes, later = stages.share(decodes, self._members.running.values(), self.limits)
        part.wanted_ns = part.room.time_with(decodes)
        if self._composer.weighs and decodes:
            decodes, limit_ns = self._in_time(decodes, behind, part)
        num_fit = part.room.fit(decodes, limit_ns, part.wanted_ns)
        full = num_fit < len(decodes)
        if full and not self._composer.weighs:
            self._serve_first(decodes[num_fit])
        found = pressure.find_blocks(self._members, decodes[:num_fit] if full else decodes, part)
        while num_fit and full and not found and len(decodes) > num_fit:  # the first ones were driven out
            decodes = [each for each in decodes[num_fit:] if each.state is State.RUNNING]
            found = pressure.find_blocks(self._members, decodes[:num_fit], part)
        if num_fit and not found and later:
            decodes = [each for each in later if each.state is State.RUNNING]
            found = pressure.find_blocks(self._members, decodes[:num_fit], part)
        part.decode(found)
        return full and not self._composer.weighs

    def _in_time(self, decodes: list[Request], behind: list[Request], part: Part) -> tuple[list[Request], int]:
        """Where the step would be too long for the token that is due next, or for more urgent prompts, the less urgent
        may have to wait: decodes in order of urgency, and the time that they may take."""
        room, now_ns = part.room, self._members.now_ns
        prompts = self._urgent_prompts(self._members.worst_rank, behind)
        prompts_ns = sum([room.time_of(start, need) for _, start, need in prompts])
        due_ns = min([request.token_due_ns for request in decodes])
        due_ns = min([due_ns, *(request.token_due_ns for request, _, _ in prompts)])
        limit_ns = min(room.max_ns, (due_ns - now_ns) // self.limits.num_stages) - prompts_ns
        if room.fit(decodes, max(1, limit_ns), part.wanted_ns) == len(decodes):
            return decodes, room.max_ns
        decodes = sorted(decodes, key=lambda each: (each.service.rank, each.token_due_ns, each.served_ns, each.order))
        limit_ns = room.max_ns
        waiting = [*decodes, *(one for one, _, _ in prompts)]
        for rank in sorted({each.service.rank for each in waiting})[:-1]:
            first = min([each for each in waiting if each.service.rank == rank], key=lambda each: each.token_due_ns)
            urgent_ns = room.time_with([each for each in decodes if each.service.rank <= rank])
            # Late as it may be, a token does not keep all others waiting; a prompt does.
            least_ns = urgent_ns if prompts else late_ns(urgent_ns, first.tpot_ns)
            left_ns = min(room.max_ns, (first.token_due_ns - now_ns) // self.limits.num_stages) - prompts_ns
            limit_ns = min(limit_ns, max(least_ns, left_ns))
        return decodes, limit_ns

    def _urgent_prompts(self, rank: int, behind: list[Request]) -> list[tuple[Request, int, int]]:
        """Those above this rank that could get a chunk in this step, the position of its first token and how many."""
        members = self._members
        found = [(each, each.scheduled, each.known - each.scheduled) for each in behind if each.service.rank < rank]
        num_slots, num_blocks = members.free_slots, members.free_blocks
        for request in islice(self._composer.newcomers(members.line), pressure.MAX_HEADS):
            if request.service.rank >= rank:
                break
            num_slots, num_blocks = num_slots - 1, num_blocks - pressure.blocks_for(members, request)
            if num_slots < 0 or num_blocks < 0:
                break
            if members.source(request) is None:
                start = len(request.chain.matched) * self.limits.block_tokens
                found.append((request, start, request.known - start))
        return found

    def _serve_first(self, request: Request) -> None:
        """The step was full before this request's turn came; the next step starts with it."""
        running = list(self._members.running.values())
        place = running.index(request)
        self._members.running = {each.id: each for each in running[place:] + running[:place]}

    # -- chunks, and into the batch ------------------------------------------------------------------------------------

    def _take_chunks(self, behind: list[Request], part: Part, crowded: bool) -> None:
        """Who is behind, and newcomers, share what is left of the step."""
        members, room, weighs = self._members, part.room, self._composer.weighs
        if room.tokens_left < 1:
            return
        running = [each for each in behind if each.state is State.RUNNING]  # not preempted for the sake of this step
        found: list[tuple[Request, int]] = []
        if not crowded and members.free_slots > 0 and members.free_blocks > 0:
            line = self._composer.newcomers(members.line)
            found = newcomers(members, line, self._hurry, weighs)
        if not running and not found:
            return
        leeway = Leeway(
            part.decodes if weighs else [],
            self._hurry,
            members.now_ns,
            max(part.wanted_ns, room.time_ns()),
            room.max_ns,
            self.limits.num_stages,
        )
        if weighs:
            leeway.leave_to([*running, *(one for one, _ in found)])
        candidates = [self._candidate(request, 0, leeway, room) for request in running]
        candidates += [self._candidate(request, blocks, leeway, room) for request, blocks in found]
        if self.limits.num_stages > 1:
            room.leave(stages.piece_tokens(candidates, self.limits, self.cost))
        for chosen in self._composer.choose(candidates, room, members.free_blocks, members.free_slots):
            self._advance(chosen, part)

    def _candidate(self, request: Request, num_blocks: int, leeway: Leeway, room: Room) -> Candidate:
        start = len(request.chain.matched) * self.limits.block_tokens if num_blocks else request.scheduled
        need = request.known - start
        value = worth(request, self._members.now_ns, room.time_of(start, need)) if self._composer.weighs else 1.0
        limit_ns = leeway.limit_ns(request.service.rank)
        return Candidate(request, start, need, num_blocks, int(num_blocks > 0), value, limit_ns)

    def _advance(self, chosen: Chosen, part: Part) -> None:
        request, tables = chosen.candidate.request, self._members.tables
        if not chosen.candidate.num_slots:
            part.chunk(request, chosen.tokens)
        elif tables.blocks_to_enter(request) <= tables.pool.num_available:  # two may count on the same cached blocks
            part.enter(request, chosen.tokens)

    # -- results -------------------------------------------------------------------------------------------------------

    def copied(self, done: Iterable[Copied], now_ns: int) -> list[Event]:
        """Copies that are done; those with the device in order of number. ValueError: another one was due."""
        self._members.copied(done, now_ns)
        return self._take_events()

    def fetched(self, done: Iterable[Brought], now_ns: int) -> list[Event]:
        """Fetches that are done, in any order. ValueError: one that is not under way."""
        self._members.fetched(done, now_ns)
        return self._take_events()

    def _take_events(self) -> list[Event]:
        """Of the moves since the call before."""
        members = self._members
        events, members.events = members.events, []
        done, members.prefetched = members.prefetched, []
        return events + [self._prefetched(request, Finish.LENGTH) for request in done]

    def _prefetched(self, request: Request, reason: Finish) -> Ended:
        del self._requests[request.id]
        return Ended(request.id, reason, None, 0, max(0, request.cached_tokens))

    def apply(self, result: StepResult, now_ns: int) -> list[Event]:
        """What the oldest step in flight brought. ValueError: another step's result, or a wrong number of tokens."""
        members = self._members
        if not self._flights or self._flights[0].step != result.step:
            expected = f"{members.returned + 1} of {members.planned} planned"
            raise ValueError(f"result of step {result.step}; expected {expected}")
        flight = self._flights[0]
        if len(result.tokens) != len(flight.sampled):
            raise ValueError(f"step {result.step} brought {len(result.tokens)} tokens, not {len(flight.sampled)}")
        self._flights.popleft()
        members.returned = flight.step
        num_tokens, self._context_tokens = flight.features[1], flight.features[4]
        if num_tokens:
            self.cost.update(flight.features, result.busy_ns)
            self._ns_per_token += 0.05 * (result.busy_ns / num_tokens - self._ns_per_token)
        events = self._take_events()
        self._advance_chunks(flight, result, events, now_ns)
        num_decodes = len(flight.decodes)
        self._accept(flight.decodes, result.tokens[:num_decodes], result, events, 1)
        self._accept(flight.sampled[num_decodes:], result.tokens[num_decodes:], result, events, 0)
        members.tables.step_returned(flight.step)
        return events

    def _advance_chunks(self, flight: Flight, result: StepResult, events: list[Event], now_ns: int) -> None:
        """The KV of the chunks' tokens is there. A request that holds no blocks any more has no use for it."""
        for request, part in flight.chunks:
            if result.prompt_logprobs and request.state is not State.FINISHED:
                self._score(request, part, result.prompt_logprobs.get(request.id), events)
            if request.blocks:
                request.computed += part.count
                if part.sample:
                    request.token_due_ns = now_ns if request.tpot_ns else NEVER_NS
                self._members.tables.filled(request)
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

    def _accept(
        self, sampled: list[Request], sampled_tokens: list[int], result: StepResult, events: list[Event], computed: int
    ) -> None:
        """The sampled tokens, of requests that each `computed` so many tokens beside chunks. Like Part.decode, without
        calls in the usual case."""
        size, filled_later = self.limits.block_tokens, self._members.tables.filled_later
        logprobs, running, finished = result.logprobs, State.RUNNING, State.FINISHED
        rows: list[tuple[object, ...]] = []  # of tokens that `events` lacks
        num_before = self._generation_tokens
        for request, token in zip(sampled, sampled_tokens, strict=True):
            state = request.state
            if computed and (state is running or request.blocks):
                request.computed = end = request.computed + computed
                if not end % size:
                    filled_later(request)
            if state is finished:
                num_before -= 1
                continue  # past its end
            tokens = request.tokens
            num_output = len(tokens) - request.num_prompt
            tokens.append(token)
            request.placeholders -= 1
            request.token_due_ns += request.tpot_ns
            rows.append((request.id, num_output, token, logprobs.get(request.id) if logprobs else None))
            stopped = token in request.stops and num_output + 1 >= request.spec.min_tokens
            if stopped or len(tokens) == request.limit:
                events += map(tuple.__new__, repeat(Token), rows)
                rows.clear()
                events.append(self._end(request, *((Finish.STOP, token) if stopped else (Finish.LENGTH, None))))
        events += map(tuple.__new__, repeat(Token), rows)
        self._generation_tokens = num_before + len(sampled)

    def _end(self, request: Request, reason: Finish, stop_token: int | None) -> Ended:
        self._members.end(request)
        del self._requests[request.id]
        self._promises.take_back(request)
        spec = request.spec
        censored = reason is not Finish.STOP
        self._members.lengths.ended(spec.service_class, spec.tenant, request.num_output, by_limit=censored)
        return Ended(request.id, reason, stop_token, request.num_output, max(0, request.cached_tokens))

    # -- blocks that other engines read --------------------------------------------------------------------------------

    def lend(self, lease: int, keys: Sequence[bytes], now_ns: int) -> list[int]:
        """The blocks of these keys, from the first on, as far as they are here: nobody writes to them until `unlend`.
        ValueError: there is such a lease already."""
        return self._members.lending.lend(lease, keys)

    def unlend(self, lease: int, now_ns: int) -> None:
        """ValueError: there is no such lease."""
        self._members.lending.unlend(lease)

    # -- watching ------------------------------------------------------------------------------------------------------

    def view(self) -> View:
        members = self._members
        tables, parking = members.tables, members.parking
        pool, host = tables.pool, parking.host
        return View(
            step=members.planned,
            num_running=len(members.running),
            num_waiting=len(self._requests) - len(members.running),
            waiting_tokens=members.line.num_tokens,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            total_blocks=self.limits.num_blocks,
            prompt_tokens=members.prompt_tokens,
            generation_tokens=self._generation_tokens,
            preemptions=members.preemptions,
            parks=members.parks,
            recomputed_tokens=members.recomputed_tokens,
            free_host_blocks=host.num_free,
            cached_host_blocks=host.num_cached,
            host_hits=members.sharing.num_hit,
            disk_hits=members.storing.num_hit,
            peer_hits=members.fetching.num_brought,
            lent_blocks=members.lending.num_blocks,
            bad_blocks=parking.num_bad,
            total_host_blocks=host.num_blocks,
            swapped_out_bytes=parking.swapped_out_bytes,
            swapped_in_bytes=parking.swapped_in_bytes,
            prefix_queries=tables.num_queried,
            prefix_hits=tables.num_hit,
            hash_collisions=tables.index.collisions,
            chosen_worth=self._composer.chosen_worth,
            in_turn_worth=self._composer.in_turn_worth,
            classes=members.classes(),
            context_tokens=self._context_tokens if members.running else 0,
        )

    def kv_news(self) -> list[KvEvent]:
        """Prefix blocks stored and dropped since the call before, in order. From the first call on they are noted."""
        index = self._members.tables.index
        begun, news = index.news is not None, index.take_news()
        if not begun:
            self._members.storing.tell_held()
        return news

    def check(self) -> None:
        """AssertionError, with a message that says what, where an invariant is broken."""
        invariants.check(self)
