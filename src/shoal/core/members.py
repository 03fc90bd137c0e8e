"""Who waits, who runs, who is on the way, and the moves between them. What moves whom is decided elsewhere.

waiting line ──enter──► running ──preempt──► waiting line       its KV is computed again,
                           ▲  └────preempt──► (parking.py) ──copied──► waiting line     or kept in the host tier
                           └──copied or fetched── returning ◄──bring── waiting line
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shoal.core.fetching import Fetching
from shoal.core.kv.host import HostEntry
from shoal.core.lending import Lending
from shoal.core.lengths import Lengths
from shoal.core.limits import Limits
from shoal.core.parking import Parking
from shoal.core.plan import (
    Admit,
    Brought,
    ClassView,
    Copied,
    Event,
    Fetch,
    Held,
    KvOp,
    Parked,
    Preempted,
    Resumed,
    Started,
)
from shoal.core.progress import NEVER_NS, Request, State
from shoal.core.sharing import Sharing
from shoal.core.stepcost import StepCost
from shoal.core.storing import Storing
from shoal.core.tables import BlockTables
from shoal.core.waiting import Line


class Source(NamedTuple):
    """Of the KV of one that waits; neither of both: its own, which is parked."""

    shared: Sequence[HostEntry] = ()  # prefix blocks in the host tier
    num_fetched: int = 0  # blocks that a peer brings; then no others


class Members:
    def __init__(self, limits: Limits, cost: StepCost, line: Line, on_disk: Iterable[Held] = ()) -> None:
        self.limits = limits
        self.line = line
        self.tables = BlockTables(limits)
        self.parking = Parking(limits, self.tables, cost)
        self.sharing = Sharing(limits, self.tables, self.parking)
        self.storing = Storing(limits, self.tables, self.parking, on_disk)
        self.fetching = Fetching(limits, self.tables, self.parking)
        self.lending = Lending(limits, self.tables)
        self.lengths = Lengths()
        self.running: dict[str, Request] = {}  # in the order in which steps serve them
        self.of_urgency: dict[tuple[int, int], dict[str, Request]] = {}  # the same; nobody's urgency is left out
        self.num_of_class: Counter[str] = Counter()  # of them
        self.num_returning = 0  # hold a slot and blocks, and run when their copy or fetch is done
        self.leaves: list[str] = []  # requests that the runner still knows and must forget
        self.arrivals: list[Request] = []  # run again after a copy; the runner does not know them yet
        self.ops: list[KvOp] = []  # copies that the next plan starts
        self.fetches: list[Fetch] = []  # the same
        self.prefetches: list[Request] = []  # wait to be sent for (prefetching.py)
        self.prefetched: list[Request] = []  # done with, and nobody was told
        self.yielded: list[Request] = []  # preempted by the plan that is being made
        self.events: list[Event] = []  # of plan(), told by the next apply()
        self.now_ns = 0
        self.planned = self.returned = 0  # newest step that was planned, and that was applied
        self.prompt_tokens = 0
        self.preemptions = self.parks = self.recomputed_tokens = 0
        self.tokens_lost = 0  # of those that wait to be computed again

    @property
    def worst_rank(self) -> int:
        """Of those that run; -1: nobody does."""
        return max(self.of_urgency)[0] if self.of_urgency else -1

    @property
    def free_slots(self) -> int:
        return self.limits.max_running - len(self.running) - self.num_returning

    @property
    def free_blocks(self) -> int:
        """Available blocks, but for one that is left alone for each running request to grow; a newcomer brings its own
        along, so one of them counts as free."""
        return max(0, self.tables.pool.num_available - len(self.running) + 1)

    @property
    def num_coming(self) -> int:
        """Blocks that are available now, or will be without anyone's help when what is in flight is done."""
        num_kept = self.parking.num_leaving_blocks + self.lending.num_coming
        in_flight = self.running.values() if self.planned > self.returned else ()
        return self.tables.num_coming(in_flight) + num_kept

    def remaining(self, request: Request) -> int:
        """Predicted output tokens that are still to come."""
        spec, known = request.spec, request.known
        return self.lengths.remaining(
            spec.service_class, spec.tenant, known - request.num_prompt, request.limit - known
        )

    def leader_done(self, request: Request) -> bool:
        """The choices of one prompt wait until the first has computed it, then find its blocks in the prefix index."""
        leader = request.leader
        if leader is not None and leader.state is not State.FINISHED and leader.computed < leader.num_prompt:
            return False
        request.leader = None
        return True

    # -- into the batch ------------------------------------------------------------------------------------------------

    def enter(self, request: Request) -> Admit:
        """From the line into the batch, with blocks for all its known tokens."""
        self.line.remove(request)
        self.tables.enter(request)
        self.parking.drop(request)
        self.recomputed_tokens += max(0, request.lost - request.computed)
        self._found_again(request)
        request.move(State.RUNNING)
        self._join(request, self.now_ns)
        return admit(request)

    def _join(self, request: Request, now_ns: int) -> None:
        self.running[request.id] = request
        self.of_urgency.setdefault(request.urgency, {})[request.id] = request
        self.num_of_class[request.spec.service_class] += 1
        self.events.append((Resumed if request.started else Started)(request.id, now_ns - request.served_ns))
        request.started = True
        if request.cached_tokens < 0:
            request.cached_tokens = min(request.computed, request.num_prompt)
            self.prompt_tokens += request.num_prompt

    def source(self, request: Request) -> Source | None:
        """From where KV comes before it can enter; None: from nowhere, it can enter now. `chain.matched` is up to
        date."""
        if self.parking.must_copy(request):
            return Source()
        shared = self.sharing.find(request)
        num_fetched = self.fetching.find(request, len(shared), self.now_ns)
        return Source(shared, num_fetched) if shared or num_fetched else None

    def bring(self, request: Request, source: Source) -> None:
        """One that waits gets its blocks, and its KV is copied into those that the prefix index does not have, or
        fetched."""
        self.line.remove(request)
        self.tables.enter(request)
        if source.num_fetched:
            self.fetches.append(self.fetching.bring(request, source.num_fetched))
        elif source.shared:
            self.parking.drop(request)
            self.ops.append(self.sharing.bring(request, source.shared))
            self.recomputed_tokens += max(0, request.lost - request.kept)
        else:
            self.ops.append(self.parking.bring(request))
        self._found_again(request)
        self.num_returning += 1

    def copied(self, done: Iterable[Copied], now_ns: int) -> None:
        """Copies that are done; those with the device in order of number. ValueError: another one was due."""
        for each in done:
            if self.storing.is_under_way(each.number):
                self.storing.done(each)
                continue
            request = self.parking.done(each)
            if request is None:
                continue
            self.sharing.came(request)
            if request.state is State.WAITING:
                self.line.add(request)
            elif request.state is State.RUNNING:
                self._returned(request, now_ns)

    def fetched(self, done: Iterable[Brought], now_ns: int) -> None:
        """Fetches that are done, in any order. ValueError: one that is not under way."""
        for each in done:
            request = self.fetching.done(each, now_ns)
            if request is None:
                continue
            if request.spec.prefetch:
                self._prefetched(request)
            else:
                self._returned(request, now_ns)

    def _prefetched(self, request: Request) -> None:
        """Its blocks are cached from now on."""
        self.num_returning -= 1
        self.tables.leave(request, self.returned)
        self.prefetch_done(request, request.computed)

    def prefetch_done(self, request: Request, num_tokens: int) -> None:
        """So many of its tokens are here."""
        request.move(State.FINISHED)
        request.cached_tokens = num_tokens
        self.prefetched.append(request)

    def _returned(self, request: Request, now_ns: int) -> None:
        self.num_returning -= 1
        if request.num_output:
            request.token_due_ns = now_ns + request.tpot_ns if request.tpot_ns else NEVER_NS
        self._join(request, now_ns)
        self.arrivals.append(request)  # the next plan makes it known to the runner

    # -- out of it -----------------------------------------------------------------------------------------------------

    def preempt(self, request: Request, keep: bool = True) -> None:
        """Its tokens stay, those of steps in flight included; its KV goes to the host tier where that pays and `keep`
        allows it, or is computed again."""
        parked = keep and self.parking.pays(request, self.tokens_lost)
        self._leave_batch(request)
        self.yielded.append(request)
        self.preemptions += 1
        if parked:
            self.parks += 1
            self.parking.park(request)
            self.events.append(Parked(request.id))
            return
        lost = request.computed
        self.tables.leave(request, self.returned)
        request.move(State.WAITING)
        request.lost = lost
        self.tokens_lost += lost
        request.scheduled = request.computed = 0
        self.line.add(request)
        self.events.append(Preempted(request.id, lost))

    def end(self, request: Request) -> None:
        """For good, wherever it is. What steps or copies in flight hold comes back when these are done."""
        state = request.state
        if state is State.RUNNING:
            self._leave_batch(request)
            self.tables.leave(request, self.returned)
        elif state is State.WAITING:
            self.line.remove(request)
            self._found_again(request)
        elif state is State.RETURNING:
            self.num_returning -= 1
        self.parking.abandon(request, self.returned)
        self.sharing.ended(request)
        request.move(State.FINISHED)
        self.line.ended(request)

    def _leave_batch(self, request: Request) -> None:
        del self.running[request.id]
        group = self.of_urgency[request.urgency]
        del group[request.id]
        if not group:
            del self.of_urgency[request.urgency]
        self.num_of_class[request.spec.service_class] -= 1
        if request in self.arrivals:
            self.arrivals.remove(request)  # the runner never heard of it
        else:
            self.leaves.append(request.id)

    def _found_again(self, request: Request) -> None:
        self.tokens_lost -= request.lost
        request.lost = 0

    # -- watching ------------------------------------------------------------------------------------------------------

    def classes(self) -> dict[str, ClassView]:
        line, running, parked = self.line, self.num_of_class, self.parking.num_of_class
        return {
            name: ClassView(
                running[name],
                line.num_live[name] - running[name],
                parked[name],
                line.longest_wait_ns(name, self.now_ns),
            )
            for name in self.limits.classes
        }


def admit(request: Request) -> Admit:
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
