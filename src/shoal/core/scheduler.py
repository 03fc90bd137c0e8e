"""submit, abort, plan, apply, copied: the short loop that keeps one replica busy; the other files decide.

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

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from shoal.core import invariants, victims
from shoal.core.admission import refuse
from shoal.core.bound import Promises
from shoal.core.compose import COMPOSERS, Candidate, Chosen, Room, split
from shoal.core.kv.hashing import scope_key
from shoal.core.kv.prefix import Chain
from shoal.core.lengths import Lengths
from shoal.core.limits import Limits
from shoal.core.parking import Parking
from shoal.core.plan import (
    Accepted,
    Admit,
    ClassView,
    Copied,
    Ended,
    Event,
    KvOp,
    Logprobs,
    Parked,
    Preempted,
    PromptScored,
    Refused,
    Resumed,
    Slice,
    Started,
    StepPlan,
    StepResult,
    Token,
    View,
)
from shoal.core.request import NEVER_NS, Finish, Refusal, Request, RequestSpec, State
from shoal.core.stepcost import Features, StepCost
from shoal.core.tables import BlockTables
from shoal.core.urgency import LEAST_SHARE, Hurry, Leeway, worth

MIN_CHOICE, MAX_CANDIDATES = 16, 64  # of the waiting line, weighed in one plan
MAX_LOOKS = 128  # at requests of the line, in one plan
MAX_HEADS = 8  # of the waiting line, for whom one plan makes way
RESERVED = 32  # one of so many blocks is kept for more urgent newcomers
AHEAD_STEPS = 4  # within so many steps a copy to the host should be done
SHIELD_TOKENS = 32  # what a request that pressed gets before somebody more urgent may preempt it


@dataclass(slots=True)
class Flight:
    """A plan whose result has not come back."""

    step: int
    features: Features
    decodes: list[Request]  # one token each, all sampled; the plan's first slices
    chunks: list[tuple[Request, Slice]]  # the others
    sampled: list[Request]  # whose tokens the result brings, in its order


@dataclass(slots=True)
class Part:
    """A plan that is being made."""

    step: int
    room: Room
    admits: list[Admit]
    decodes: list[Request] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)  # of the decodes
    chunks: list[tuple[Request, Slice]] = field(default_factory=list)


class Scheduler:
    def __init__(self, limits: Limits, *, hash_root: bytes, cost: StepCost | None = None) -> None:
        """`hash_root`: kv.hashing.root_key of the model and the KV's layout; `cost`: learned on, in place."""
        self.limits = limits
        self.cost = cost or StepCost()
        self._root = hash_root
        self._max_running = min(limits.max_num_seqs, limits.max_num_batched_tokens)  # each gets its token, every step
        self._tables = BlockTables(limits)
        self._parking = Parking(limits, self._tables, self.cost)
        self._promises = Promises(limits, self.cost, self._max_running)
        self._lengths = Lengths()
        self._requests: dict[str, Request] = {}  # all that have not ended
        self._composer = COMPOSERS[limits.composer](limits, self._max_running)
        self._line = self._composer.make_line()
        self._hurry = Hurry()
        self._running: dict[str, Request] = {}  # in the order in which steps serve them
        self._num_returning = 0  # hold a slot and blocks, and run when their copy is done
        self._flights: deque[Flight] = deque()
        self._leaves: list[str] = []  # requests that the runner still knows and must forget
        self._arrivals: list[Request] = []  # run again after a copy; the runner does not know them yet
        self._ops: list[KvOp] = []  # copies that the next plan starts
        self._yielded: list[Request] = []  # preempted by the plan that is being made
        self._spared: set[Request] = set()  # not to be preempted by it
        self._events: list[Event] = []  # of plan(), told by the next apply()
        self._some_left_out = False  # of the running, by the last plan
        self._now_ns = 0
        self._step = 0  # newest planned
        self._returned = 0  # newest applied
        self._num_accepted = 0
        self._prompt_tokens = self._generation_tokens = 0
        self._preemptions = self._parks = self._recomputed_tokens = 0
        self._tokens_lost = 0  # of those that wait to be computed again
        self._ns_per_token = 1e6  # of a step, learned
        self._drain = (-1, 0)  # (newest applied step, predicted milliseconds)

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
            num_waiting=self._line.num_of_class[spec.service_class],
        )
        if refused is not None:
            late = refused.reason is Refusal.QUEUE_FULL
            return refused._replace(retry_after_ms=self._drain_ms()) if late else refused
        keys = spec.prefix_keys[: len(spec.prompt) // self.limits.block_tokens]
        chain = Chain(scope_key(self._root, spec.salt), keys)
        request = Request(spec, self._num_accepted + 1, chain, leader, self.limits.classes[spec.service_class])
        if self._composer.weighs:
            request.demand = self._promises.demand(request)
            if not self._promises.allow(request):
                bound_s = request.service.max_wait_s
                message = f"one more wait of at most {bound_s:g} s cannot be promised to class {spec.service_class}"
                return Refused(spec.id, Refusal.WAITING_BOUND, message, self._drain_ms())
        self._num_accepted += 1
        self._requests[spec.id] = request
        self._promises.give(request)
        self._line.admitted(request)
        self._line.add(request)
        return Accepted(spec.id)

    def _drain_ms(self) -> int:
        """When half of what is here is predicted to be done."""
        if self._drain[0] != self._returned:
            tokens = self._line.num_tokens + sum([self._remaining(request) for request in self._requests.values()])
            self._drain = (self._returned, int(tokens * self._ns_per_token / 2e6) + 1)
        return self._drain[1]

    def _remaining(self, request: Request) -> int:
        """Predicted output tokens that are still to come."""
        spec, left = request.spec, request.limit - request.known
        return self._lengths.remaining(spec.service_class, spec.tenant, request.known - request.num_prompt, left)

    def abort(self, id: str, now_ns: int) -> list[Event]:
        """Its one Ended event; empty for an id that is unknown or has ended."""
        request = self._requests.get(id)
        if request is None:
            return []
        self._events = [event for event in self._events if event.id != id]  # nothing is told after the end
        return [self._end(request, Finish.ABORT, None)]

    # -- plan ----------------------------------------------------------------------------------------------------------

    def plan(self, now_ns: int) -> StepPlan | None:
        """The next step, or None: nothing to compute, or everything waits for steps or copies in flight."""
        if len(self._flights) >= self.limits.max_steps_in_flight:
            return None
        self._now_ns = now_ns
        self._yielded = []
        for request in self._line.stamp(now_ns):
            self._hurry.arrived(request)
        pressing = self._pressing()
        crowded = self._make_way(pressing)
        if not crowded:
            self._yield_to_urgent(pressing)
            self._park_ahead()

        decodes, behind = split(self._running.values())
        num_running = len(decodes) + len(behind)
        num_arrivals = len(self._arrivals)
        part = Part(self._step + 1, Room(self.limits, self.cost), [self._admit(request) for request in self._arrivals])
        self._spared = set(self._arrivals)
        if pressing:
            crowded |= not self._serve(pressing, part)
            decodes, behind = (
                [each for each in group if each.state is State.RUNNING and each.last_step != part.step]
                for group in (decodes, behind)
            )
        full = self._decode_all(decodes, part)
        if not full:
            self._take_chunks(behind, part, crowded)
        ops = self._ops + self._parking.start_leaving(self._returned)
        if not part.slices and not part.chunks and not ops:
            return None
        num_served, num_newcomers = len(part.decodes) + len(part.chunks), len(part.admits) - num_arrivals
        self._some_left_out = num_served < num_running + num_newcomers
        return self._launch(part, ops)

    def _launch(self, part: Part, ops: list[KvOp]) -> StepPlan:
        slices = part.slices + [chunk for _, chunk in part.chunks]
        sampled = part.decodes + [request for request, chunk in part.chunks if chunk.sample]
        features = part.room.features
        self._flights.append(Flight(part.step, features, part.decodes, part.chunks, sampled))
        self._step = part.step
        leaves, self._leaves = self._leaves, []
        self._arrivals, self._ops = [], []
        predicted_ns = self.cost.predict(features) if slices else 0
        return StepPlan(part.step, leaves, part.admits, slices, part.room.num_tokens, predicted_ns, ops)

    def _decode_all(self, decodes: list[Request], part: Part) -> bool:
        """One token for each, as far as the step has room. True: it is full."""
        limit_ns = part.room.max_ns
        if self._composer.weighs:
            decodes, limit_ns = self._in_time(decodes, part.room)
        num_fit = part.room.fit(decodes, limit_ns)
        full = num_fit < len(decodes)
        if full and not self._composer.weighs:
            self._serve_first(decodes[num_fit])
        ready = self._find_blocks(decodes[:num_fit] if full else decodes)
        self._decode(ready, part)
        return full and not self._composer.weighs

    def _in_time(self, decodes: list[Request], room: Room) -> tuple[list[Request], int]:
        """Where the step would be too long for the token that is due next, the less urgent may have to wait: decodes in
        order of urgency, and the time that the step may take."""
        if not decodes:
            return decodes, room.max_ns
        due_ns = min([request.token_due_ns for request in decodes])
        if room.fit(decodes, max(1, min(room.max_ns, due_ns - self._now_ns))) == len(decodes):
            return decodes, room.max_ns
        decodes = sorted(decodes, key=lambda each: (each.service.rank, each.token_due_ns, each.served_ns, each.order))
        rank = next(each.service.rank for each in decodes if each.token_due_ns == due_ns)
        urgent = [each for each in decodes if each.service.rank <= rank]
        least_ns = int(room.time_with(urgent) * (1.0 + LEAST_SHARE))
        return decodes, min(room.max_ns, max(least_ns, due_ns - self._now_ns))

    def _decode(self, decodes: list[Request], part: Part) -> None:
        """One token for each. This loop runs for every request in every step, hence without calls."""
        step, now_ns = part.step, self._now_ns
        append, new = part.slices.append, tuple.__new__
        part.room.add(decodes)
        part.decodes += decodes
        for request in decodes:
            start = request.scheduled
            blocks = self._tables.grow(request) if start == request.capacity else ()
            from_step = request.last_step if request.placeholders else -1
            append(new(Slice, (request.id, start, 1, blocks, from_step, True)))
            request.scheduled = start + 1
            request.known += 1
            request.placeholders += 1
            request.last_step = step
            request.served_ns = now_ns
            request.account.served += 1

    def _serve_first(self, request: Request) -> None:
        """The step was full before this request's turn came; the next step starts with it."""
        running = list(self._running.values())
        place = running.index(request)
        self._running = {each.id: each for each in running[place:] + running[:place]}

    # -- chunks, and into the batch ------------------------------------------------------------------------------------

    def _take_chunks(self, behind: list[Request], part: Part, crowded: bool) -> None:
        """Who is behind, and newcomers, share what is left of the step."""
        room = part.room
        if room.tokens_left < 1:
            return
        running = [each for each in behind if each.state is State.RUNNING]  # not preempted for the sake of this step
        num_slots, num_blocks, weighs = self._free_slots, self._free_blocks, self._composer.weighs
        newcomers = [] if crowded or num_slots < 1 or num_blocks < 1 else self._newcomers(num_slots, num_blocks)
        if not running and not newcomers:
            return
        leeway = Leeway(part.decodes if weighs else (), self._hurry, self._now_ns, room.time_ns(), room.max_ns)
        if weighs:
            leeway.leave_to(min([each.service.rank for each in (*running, *(one for one, _ in newcomers))]))
        candidates = [self._candidate(request, 0, leeway, room) for request in running]
        candidates += [self._candidate(request, blocks, leeway, room) for request, blocks in newcomers]
        num_slots, num_blocks = self._free_slots, self._free_blocks
        for chosen in self._composer.choose(candidates, room, num_blocks, num_slots):
            self._advance_by(chosen, part)

    def _newcomers(self, num_slots: int, num_blocks: int) -> list[tuple[Request, int]]:
        """Those of the waiting line that could enter, with the available blocks that each takes: its own for all its
        known tokens, and one that is left alone for it to grow. Parked ones that can return are sent for on the way.

        Nobody takes what one that outranks it waits for: it would be driven out again.
        """
        found: list[tuple[Request, int]] = []
        weighs = self._composer.weighs
        waits: list[Request] = []  # cannot enter yet
        most = min(MAX_CANDIDATES, max(MIN_CHOICE, num_slots)) if weighs else num_slots
        slots, left = num_slots, num_blocks  # what those found leave
        first = (NEVER_NS, 0)  # least urgency of those found
        for request in islice(self._composer.newcomers(self._line), MAX_LOOKS if weighs else None):
            if len(found) == most or num_slots < 1:
                break
            if not self._leader_done(request) or any(other.outranks(request) for other in waits):
                continue
            ready = request.last_step <= self._returned and request not in self._yielded
            blocks = self._blocks_for(request) if ready else 0
            if weighs and self._running and self._hurry.ttft_ns(request.service.rank, self._now_ns):
                blocks += self.limits.num_blocks // RESERVED  # a more urgent one would have to wait for a copy
            ahead: list[int] = []
            if request.urgency > first:  # else none of them outranks it
                ahead = [taken for other, taken in found if other.outranks(request)]
            if not ready or sum(ahead) + blocks > num_blocks or len(ahead) >= num_slots:
                if not weighs or (ready and request.started):
                    break  # nobody overtakes it
                waits = [request, *waits][:MAX_CANDIDATES]
            elif not self._parking.must_copy(request):
                found.append((request, blocks))
                first = min(first, request.urgency)
                slots, left = slots - 1, left - blocks
            elif slots > 0 and blocks <= left:
                self._return(request)
                slots, left = slots - 1, left - blocks
                num_slots, num_blocks = num_slots - 1, num_blocks - blocks
        return found

    def _blocks_for(self, request: Request) -> int:
        """Blocks that must be available before the request enters: for its known tokens, and one for it to grow. Who
        had to go before comes back when there is room for all that it is predicted to need."""
        blocks = self._tables.blocks_to_enter(request) + 1
        if request.started and self._running:
            size = self.limits.block_tokens
            end = min(request.final, request.known + self._remaining(request))
            blocks += max(0, -(-end // size) - -(-request.known // size))
        return blocks

    def _candidate(self, request: Request, num_blocks: int, leeway: Leeway, room: Room) -> Candidate:
        start = len(request.chain.matched) * self.limits.block_tokens if num_blocks else request.scheduled
        need = request.known - start
        value = worth(request, self._now_ns, room.time_of(start, need)) if self._composer.weighs else 1.0
        limit_ns = leeway.limit_ns(request.service.rank)
        return Candidate(request, start, need, num_blocks, int(num_blocks > 0), value, limit_ns)

    def _advance_by(self, chosen: Chosen, part: Part) -> None:
        request = chosen.candidate.request
        if chosen.candidate.num_slots:
            if self._tables.blocks_to_enter(request) > self._tables.pool.num_available:
                return  # two newcomers counted on the same cached blocks
            part.admits.append(self._enter(request))
        self._chunk(request, chosen.tokens, part)

    def _chunk(self, request: Request, count: int, part: Part) -> None:
        """The next `count` tokens of a request that has all its ids, and a placeholder where they reach its end."""
        start = request.scheduled
        end = request.scheduled = start + count
        request.last_step = part.step
        request.served_ns = self._now_ns
        request.account.served += count
        samples = end == request.known and request.samples
        if samples:
            request.known += 1
            request.placeholders += 1
        part.room.add_chunk(start, count)
        part.chunks.append((request, Slice(request.id, start, count, (), -1, samples)))

    @property
    def _free_slots(self) -> int:
        return self._max_running - len(self._running) - self._num_returning

    @property
    def _free_blocks(self) -> int:
        """Available blocks, but for one that is left alone for each running request to grow; a newcomer brings its own
        along, so one of them counts as free."""
        return max(0, self._tables.pool.num_available - len(self._running) + 1)

    def _leader_done(self, request: Request) -> bool:
        """The choices of one prompt wait until the first has computed it, then find its blocks in the prefix index."""
        leader = request.leader
        if leader is not None and leader.state is not State.FINISHED and leader.computed < leader.num_prompt:
            return False
        request.leader = None
        return True

    def _enter(self, request: Request) -> Admit:
        """From the line into the batch, with blocks for all its known tokens."""
        self._line.remove(request)
        self._tables.enter(request)
        self._parking.drop(request)
        waited_ns = self._now_ns - request.served_ns
        self._events.append((Resumed if request.started else Started)(request.id, waited_ns))
        request.started = True
        request.move(State.RUNNING)
        self._running[request.id] = request
        self._recomputed_tokens += max(0, request.lost - request.computed)
        self._found_again(request)
        if request.cached_tokens < 0:
            request.cached_tokens = min(request.computed, request.num_prompt)
            self._prompt_tokens += request.num_prompt
        return self._admit(request)

    @staticmethod
    def _admit(request: Request) -> Admit:
        spec = request.spec
        return Admit(
            request.id,
            tuple(request.tokens),
            request.num_prompt,
            request.computed,
            tuple(request.blocks),
            spec.sampling,
            spec.choice,
            spec.min_tokens,
            spec.stop_token_ids,
        )

    def _found_again(self, request: Request) -> None:
        self._tokens_lost -= request.lost
        request.lost = 0

    def _return(self, request: Request) -> None:
        """A parked request gets its blocks, and its KV is copied into those that the prefix index does not have."""
        self._line.remove(request)
        self._tables.enter(request)
        self._ops.append(self._parking.bring(request))
        self._num_returning += 1

    def copied(self, done: Iterable[Copied], now_ns: int) -> list[Event]:
        """Copies that are done, in the order of their numbers. ValueError: another one was due."""
        for each in done:
            request = self._parking.done(each)
            if request.state is State.WAITING:
                self._line.add(request)
            elif request.state is State.RUNNING:
                self._num_returning -= 1
                self._events.append(Resumed(request.id, now_ns - request.served_ns))
                self._running[request.id] = request
                self._arrivals.append(request)  # the next plan makes it known to the runner
                request.token_due_ns = now_ns + request.tpot_ns if request.tpot_ns else NEVER_NS
        events, self._events = self._events, []
        return events

    # -- the waiting bound ---------------------------------------------------------------------------------------------

    def _pressing(self) -> list[Request]:
        """Who has waited for half of its bound and can be served, the end of whose bound is nearest first."""
        if not self._composer.weighs:
            return []
        now_ns = self._now_ns
        found = [r for r in self._line.pressing(now_ns) if r.last_step <= self._returned and self._leader_done(r)]
        if self._some_left_out:
            found += [r for r in self._running.values() if r.presses_ns <= now_ns and r.scheduled < r.final]
        return sorted(found, key=lambda each: (each.due_ns, each.id)) if found else found

    def _make_way(self, pressing: list[Request]) -> bool:
        """Preempts for those that press and wait. True: not all of them will find room in this plan."""
        num_slots = self._free_slots
        num_blocks = self._tables.pool.num_available
        for request in pressing:
            if request.state is State.RUNNING:
                continue
            needed = self._tables.blocks_to_enter(request) + 1
            if num_slots < 1 or num_blocks < needed:
                running = self._running.values()
                gain = self._tables.pool.num_sole
                lacking = (1 - num_slots, min(needed, self.limits.num_blocks) - num_blocks)
                spared = self._not_to_yield(request, pressing)
                chosen = victims.for_bound(running, spared, *lacking, gain, self._remaining)
                if not chosen:
                    return True
                for victim in chosen:
                    num_slots += 1
                    num_blocks += gain(victim.blocks)
                    self._preempt(victim, keep=False)  # a copy would hold its blocks
            num_slots -= 1
            num_blocks -= needed
        return False

    def _not_to_yield(self, request: Request, served: Iterable[Request]) -> set[Request]:
        """Whom one that presses cannot drive out: those that are served as it is and, once its bound is broken in spite
        of all, who pressed before and has not got far yet. Else, where steps take longer than was assumed, all would
        take turns and nobody would get anywhere."""
        spared = set(served)
        if request.due_ns < self._now_ns:
            spared |= {each for each in self._running.values() if each.known <= each.shielded}
        return spared

    def _serve(self, pressing: list[Request], part: Part) -> bool:
        """Each of those that press gets a slice, in order, until one does not fit: False."""
        for request in pressing:
            if request.state is State.RUNNING:
                served = self._serve_running(request, part)
            elif request.state is State.WAITING:
                served = self._serve_waiting(request, part)
            else:
                served = True  # on its way
            if not served:
                return False
            request.shielded = request.known + SHIELD_TOKENS
            self._spared.add(request)
        return True

    def _serve_running(self, request: Request, part: Part) -> bool:
        if request.last_step > self._returned:
            return True  # in a step in flight
        if request.known - request.scheduled > 1 or request.scheduled < request.num_prompt:
            need = request.known - request.scheduled
            count = part.room.chunk(request.scheduled, need, part.room.max_ns)
            if count:
                self._chunk(request, count, part)
            return count > 0
        if request.scheduled == request.capacity and not self._tables.pool.num_available:
            running, gain = self._running.values(), self._tables.pool.num_sole
            spared = self._not_to_yield(request, [request, *self._spared])
            for victim in victims.for_bound(running, spared, 0, 1, gain, self._remaining):
                self._preempt(victim, keep=False)
        if request.scheduled == request.capacity and not self._tables.pool.num_available:
            return False
        if not part.room.fit([request], part.room.max_ns):
            return False
        self._decode([request], part)
        return True

    def _serve_waiting(self, request: Request, part: Part) -> bool:
        if self._free_slots < 1 or self._tables.blocks_to_enter(request) > self._tables.pool.num_available:
            return False
        if self._parking.must_copy(request):
            self._return(request)
            return True
        start = len(request.chain.matched) * self.limits.block_tokens
        count = part.room.chunk(start, request.known - start, part.room.max_ns)
        if count:
            part.admits.append(self._enter(request))
            self._chunk(request, count, part)
        return count > 0

    # -- under pressure ------------------------------------------------------------------------------------------------

    def _yield_to_urgent(self, pressing: list[Request]) -> None:
        """Preempts for the first in line where less urgent requests are in their way."""
        running = self._running.values()
        if not running or not self._line:
            return
        worst = max([each.urgency for each in running])
        num_slots, num_blocks = self._free_slots, self._num_coming() - len(running) + 1
        gain, num_heads = self._tables.pool.num_sole, 0
        for head in islice(self._composer.newcomers(self._line), MAX_LOOKS):
            if head in pressing or head.last_step > self._returned or not self._leader_done(head):
                continue
            num_slots, num_blocks, num_heads = num_slots - 1, num_blocks - self._blocks_for(head), num_heads + 1
            if head.urgency >= worst or num_heads > MAX_HEADS:
                return
            if num_slots < 0 or num_blocks < 0:
                chosen = victims.for_urgent(head, running, -num_slots, -num_blocks, gain, self._remaining)
                if not chosen:
                    return
                for victim in chosen:
                    num_slots, num_blocks = num_slots + 1, num_blocks + gain(victim.blocks) + 1
                    self._preempt(victim)

    def _park_ahead(self) -> None:
        """A copy takes a few steps: whose blocks others will need by then is parked now, not when all wait for them."""
        running = self._running.values()
        if not self.limits.num_host_blocks or self._tables.pool.num_available >= len(running):
            return
        soon = [each for each in running if each.capacity - each.scheduled < AHEAD_STEPS and each.capacity < each.final]
        coming = self._num_coming()
        if len(soon) > coming:
            gain = self._tables.pool.num_sole
            for victim in victims.for_growth(soon, running, coming, gain, self._remaining):
                if self._parking.pays(victim, self._tokens_lost):
                    self._preempt(victim)

    def _num_coming(self) -> int:
        """Blocks that are available now, or will be without anyone's help when steps and copies in flight are done."""
        return self._tables.num_coming(self._running.values()) + self._parking.num_leaving_blocks

    def _find_blocks(self, decodes: list[Request]) -> list[Request]:
        """Those of `decodes` that have a block for their token. Where blocks are short, others are preempted, or left
        out of this step since blocks will come back with a step or a copy in flight."""
        growing = [request for request in decodes if request.scheduled == request.capacity]
        if len(growing) <= self._tables.pool.num_available:
            return decodes
        able = [each for each in self._running.values() if each not in self._spared]
        gain = self._tables.pool.num_sole
        for victim in victims.for_growth(growing, able, self._num_coming(), gain, self._remaining):
            self._preempt(victim)
        growing = sorted([each for each in growing if each.state is State.RUNNING], key=lambda each: each.order)
        left_out = growing[self._tables.pool.num_available :]
        return [each for each in decodes if each.state is State.RUNNING and each not in left_out]

    def _preempt(self, request: Request, keep: bool = True) -> None:
        """Out of the batch. Its tokens stay, those of steps in flight included; its KV goes to the host tier where that
        pays and `keep` allows it, or is computed again."""
        parked = keep and self._parking.pays(request, self._tokens_lost)
        self._leave_batch(request)
        self._yielded.append(request)
        self._preemptions += 1
        if parked:
            self._parks += 1
            self._parking.park(request)
            self._events.append(Parked(request.id))
            return
        lost = request.computed
        self._tables.leave(request, self._returned)
        request.move(State.WAITING)
        request.lost = lost
        self._tokens_lost += lost
        request.scheduled = request.computed = 0
        self._line.add(request)
        self._events.append(Preempted(request.id, lost))

    def _leave_batch(self, request: Request) -> None:
        del self._running[request.id]
        if request in self._arrivals:
            self._arrivals.remove(request)  # the runner never heard of it
        else:
            self._leaves.append(request.id)

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
        num_tokens = flight.features[1]
        if num_tokens:
            self.cost.update(flight.features, result.busy_ns)
            self._ns_per_token += 0.05 * (result.busy_ns / num_tokens - self._ns_per_token)
        events, self._events = self._events, []
        self._advance(flight, result, events, now_ns)
        self._accept(flight.sampled, result, events)
        self._tables.step_returned(flight.step)
        return events

    def _advance(self, flight: Flight, result: StepResult, events: list[Event], now_ns: int) -> None:
        """The KV of the step's tokens is there. A request that holds no blocks any more has no use for it."""
        size = self.limits.block_tokens
        for request in flight.decodes:
            if request.blocks:
                request.computed = computed = request.computed + 1
                if not computed % size:
                    self._tables.filled_later(request)
        for request, part in flight.chunks:
            if result.prompt_logprobs and request.state is not State.FINISHED:
                self._score(request, part, result.prompt_logprobs.get(request.id), events)
            if request.blocks:
                request.computed += part.count
                if part.sample:
                    request.token_due_ns = now_ns if request.tpot_ns else NEVER_NS
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
            request.token_due_ns += request.tpot_ns
            num_tokens += 1
            append(new(Token, (request.id, num_output, token, logprobs.get(request.id) if logprobs else None)))
            if token in request.stops and num_output + 1 >= request.spec.min_tokens:
                append(self._end(request, Finish.STOP, token))
            elif len(tokens) == request.limit:
                append(self._end(request, Finish.LENGTH, None))
        self._generation_tokens += num_tokens

    def _end(self, request: Request, reason: Finish, stop_token: int | None) -> Ended:
        state = request.state
        if state is State.RUNNING:
            self._leave_batch(request)
            self._tables.leave(request, self._returned)
        elif state is State.WAITING:
            self._line.remove(request)
            self._found_again(request)
        elif state is State.RETURNING:
            self._num_returning -= 1
        self._parking.abandon(request, self._returned)
        request.move(State.FINISHED)
        del self._requests[request.id]
        self._promises.take_back(request)
        self._line.ended(request)
        spec = request.spec
        censored = reason is not Finish.STOP
        self._lengths.ended(spec.service_class, spec.tenant, request.num_output, by_limit=censored)
        return Ended(request.id, reason, stop_token, request.num_output, max(0, request.cached_tokens))

    # -- watching ------------------------------------------------------------------------------------------------------

    def view(self) -> View:
        pool, host = self._tables.pool, self._parking.host
        return View(
            step=self._step,
            num_running=len(self._running),
            num_waiting=len(self._requests) - len(self._running),
            waiting_tokens=self._line.num_tokens,
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            total_blocks=self.limits.num_blocks,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            preemptions=self._preemptions,
            parks=self._parks,
            recomputed_tokens=self._recomputed_tokens,
            free_host_blocks=host.num_free,
            total_host_blocks=host.num_blocks,
            swapped_out_bytes=self._parking.swapped_out_bytes,
            swapped_in_bytes=self._parking.swapped_in_bytes,
            prefix_queries=self._tables.num_queried,
            prefix_hits=self._tables.num_hit,
            hash_collisions=self._tables.index.collisions,
            classes=self._classes(),
        )

    def _classes(self) -> dict[str, ClassView]:
        running = Counter([request.spec.service_class for request in self._running.values()])
        line, parked = self._line, self._parking.num_of_class
        return {
            name: ClassView(
                running[name],
                line.num_live[name] - running[name],
                parked[name],
                line.longest_wait_ns(name, self._now_ns),
            )
            for name in self.limits.classes
        }

    def check(self) -> None:
        """AssertionError, with a message that says what, where an invariant is broken."""
        invariants.check(self)
