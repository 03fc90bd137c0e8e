"""The step loop: one thread that plans, computes and applies, turn after turn; it never waits for a gateway.

    inbox ─► copied, fetched, submit, abort, lend ─► plan ─► start copies, fetches ─► launch ─► collect ─► apply ─► Turn
      ▲                                                             │
      └────────────── copier and peers, when one is done ───────────┘

What the I/O thread asks for waits in the inbox until the next turn, so an abort takes effect within one step. One time
is told to all calls of a turn up to its plans: a simulated turn happens at one moment too (sim/agreement.py).
An exception in here, or of a copy, is the end of the process: every stream is told, then `failed` is called.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from shoal.core.kv.news import KvEvent
from shoal.core.plan import Brought, Copied, Ended, Fetch, KvOp, Refused, StepPlan, StepResult, View
from shoal.core.request import Finish, RequestSpec
from shoal.engine.updates import Updates
from shoal.fleet import health
from shoal.telemetry.journal import Planner
from shoal.wire.messages import Refusing, Update

ANNOUNCE_NS = 250_000_000  # a step predicted longer than this is announced before it runs
COPIER_END_S = 1.0  # what the copy under way gets when the loop has ended

log = logging.getLogger("shoal.engine")


class Runner(Protocol):
    """Who computes steps. `collect` returns the oldest launched step and blocks until it is done."""

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult: ...


class Copier(Protocol):
    """Who carries out a plan's copies, beside the steps: those with the device in the order of their numbers."""

    def start(self, op: KvOp, tell: Callable[[Copied | Exception], None]) -> None:
        """Returns at once. `tell` is called on a thread of the copier's own: with the copy that is done, or with why
        none will be done any more."""
        ...

    def close(self, limit_s: float) -> bool:
        """Gives up what is not done. False: a copy still touches memory."""
        ...


class Peers(Protocol):
    """Who brings blocks from other engines, beside the steps and in any order."""

    def fetch(self, fetch: Fetch, tell: Callable[[Brought], None]) -> None:
        """Returns at once. `tell` is called on another thread, at the fetch's limit at the latest."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """One finished step, for the metrics."""

    kind: str  # "decode": one token per request; "prefill": chunks only; "mixed"
    num_tokens: int
    predicted_ns: int
    busy_ns: int
    latency_ns: int


class Wait(NamedTuple):
    """A request got a slice after it had none for a while: at its start, or when it resumed."""

    service_class: str
    waited_ns: int


class _Launched(NamedTuple):
    plan: StepPlan
    at_ns: int


class _Owner(NamedTuple):
    session: int
    service_class: str


@dataclass(slots=True)
class Turn:
    """What one turn of the loop has to say. Keys of the maps are session keys."""

    view: View
    updates: dict[int, tuple[Update, ...]] = field(default_factory=dict)
    refused: dict[int, list[Refusing]] = field(default_factory=dict)
    step: Step | None = None
    waits: list[Wait] = field(default_factory=list)
    kv: list[KvEvent] = field(default_factory=list)


class _Lease(NamedTuple):
    number: int
    keys: tuple[bytes, ...]  # none: it is over
    tell: Callable[[Sequence[int]], None]


@dataclass(slots=True)
class _Inbox:
    """Filled by other threads, emptied whole by the step thread; both under the loop's condition."""

    copied: list[Copied] = field(default_factory=list)
    brought: list[Brought] = field(default_factory=list)
    submits: list[tuple[int, RequestSpec]] = field(default_factory=list)
    aborts: list[tuple[int, str]] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)  # sessions that ended
    leases: list[_Lease] = field(default_factory=list)
    end_all: str = ""  # message for every stream that is left
    failure: Exception | None = None  # of a copy, or of another rank

    def __bool__(self) -> bool:
        asked = self.submits or self.aborts or self.gone or self.leases or self.end_all
        return bool(asked or self.copied or self.brought or self.failure)


class StepLoop:
    """`publish`, `announce` and `failed` are called on the step thread and must return at once."""

    def __init__(
        self,
        scheduler: Planner,
        runner: Runner,
        *,
        publish: Callable[[Turn], None],
        announce: Callable[[int], None],
        failed: Callable[[BaseException], None],
        copier: Copier | None = None,  # where the scheduler's limits have a host tier
        peers: Peers | None = None,  # where they fetch
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._copier = copier
        self._peers = peers
        self._publish = publish
        self._announce = announce
        self._failed = failed
        self._clock = clock
        self._view = scheduler.view()
        scheduler.kv_news()  # from here on
        self._changed = threading.Condition()
        self._inbox = _Inbox()
        self._stopping = False
        self._owners: dict[str, _Owner] = {}  # of live requests; step thread only
        self._in_flight: deque[_Launched] = deque()  # launched and not collected
        self._copies: deque[KvOp] = deque()  # with the device, started and not reported
        self._moves: dict[int, KvOp] = {}  # the same with the disk, by number
        self._num_fetches = 0  # started and not reported
        self._leases: set[int] = set()  # that are not over
        self._blocked = False  # requests are live, and only the inbox can change that nothing can be planned
        self._applied = False  # by the turn before: there may be copies to start, though nobody waits for them
        self._collected_ns = 0
        self._turn_since_ns: int | None = None  # None: waiting for the inbox
        self._announced_ns = 0  # predicted time of the step that the present turn announced
        self._copying: tuple[int, int] | None = None  # since when the oldest copy may run, and its predicted time
        self._running = False
        self._ended = threading.Event()

    # -- called from any thread ----------------------------------------------------------------------------------------

    def submit(self, session: int, specs: Iterable[RequestSpec]) -> None:
        with self._changed:
            self._inbox.submits += [(session, spec) for spec in specs]
            self._changed.notify()

    def abort(self, session: int, ids: Iterable[str]) -> None:
        """Ids that are not streams of this session are ignored: they ended already, or belong to another gateway."""
        with self._changed:
            self._inbox.aborts += [(session, id) for id in ids]
            self._changed.notify()

    def end_session(self, session: int) -> None:
        """Abort everything of a session that is over; nothing is published to it any more."""
        with self._changed:
            self._inbox.gone.append(session)
            self._changed.notify()

    def lend(self, lease: int, keys: Sequence[bytes], tell: Callable[[Sequence[int]], None]) -> None:
        """Blocks of these keys are kept until `unlend`; `tell` is called with them on the step thread."""
        with self._changed:
            self._inbox.leases.append(_Lease(lease, tuple(keys), tell))
            self._changed.notify()

    def unlend(self, lease: int) -> None:
        with self._changed:
            self._inbox.leases.append(_Lease(lease, (), lambda blocks: None))
            self._changed.notify()

    def fail(self, error: Exception) -> None:
        """What the loop needs has failed: so does the next turn."""
        with self._changed:
            self._inbox.failure = self._inbox.failure or error
            self._changed.notify()

    def end_all(self, message: str) -> None:
        """Every stream that is left ends with an error that says so."""
        with self._changed:
            self._inbox.end_all = message
            self._changed.notify()

    def stop(self, limit_s: float) -> bool:
        """False: the thread did not come back from its step within the limit, or the copier not from its copy."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        return self._ended.wait(limit_s)

    @property
    def num_streams(self) -> int:
        with self._changed:
            return len(self._owners) + len(self._inbox.submits)

    def turning(self) -> bool:
        """The loop takes work: it waits for some, or its present turn is not late."""
        return self._running and self._turn_age_ns() < health.suspect_after_ns(self._announced_ns)

    def stuck(self) -> bool:
        """The present turn, or the copy under way, will not come back."""
        copying = self._copying
        if copying is not None and self._clock() - copying[0] > health.stuck_after_ns(copying[1]):
            return True
        return self._turn_age_ns() > health.stuck_after_ns(self._announced_ns)

    def _turn_age_ns(self) -> int:
        since = self._turn_since_ns
        return 0 if since is None else self._clock() - since

    def _on_copy(self, outcome: Copied | Exception) -> None:
        with self._changed:
            if isinstance(outcome, Exception):
                self._inbox.failure = outcome
            else:
                self._inbox.copied.append(outcome)
            self._changed.notify()

    def _on_fetch(self, brought: Brought) -> None:
        with self._changed:
            self._inbox.brought.append(brought)
            self._changed.notify()

    # -- the step thread -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Turns until stopped or failed; the thread that calls this is the step thread."""
        self._running = True
        try:
            while (now_ns := self._wait_for_work()) is not None:
                self._turn(now_ns)
        except Exception as e:
            log.exception("engine.step_failed", {"step": self._in_flight[0].plan.step if self._in_flight else 0})
            self._tell_everyone(f"the engine failed: {type(e).__name__}")
            self._failed(e)
        finally:
            self._running = False
            if self._copier is None or self._copier.close(COPIER_END_S):
                self._ended.set()

    def _wait_for_work(self) -> int | None:
        """The time of the next turn; None: stop. Returns at once while steps are in flight or more can be planned."""
        with self._changed:
            while not (self._stopping or self._inbox or self._in_flight or self._applied or self._can_plan):
                self._turn_since_ns = None
                self._changed.wait()
            self._announced_ns = 0
            self._turn_since_ns = now_ns = self._clock()
            return None if self._stopping else now_ns

    @property
    def _can_plan(self) -> bool:
        return bool(self._owners) and not self._blocked

    def _turn(self, now_ns: int) -> None:
        updates = Updates()
        refused: dict[int, list[Refusing]] = {}
        heard = self._take_inbox(now_ns, updates, refused)
        # Woken for nothing, it plans nothing: no journal could tell that it planned then, and not at the next copy.
        launched = (heard or not self._blocked) and self._launch_steps(now_ns)
        finished = self._applied = bool(self._in_flight)
        step = self._finish_step(updates) if finished else None
        self._view = self._scheduler.view()
        self._publish(self._close_turn(updates, refused, step))
        self._blocked = bool(self._owners) and not (launched or finished)
        if self._blocked and not (self._copies or self._moves or self._num_fetches or self._leases):
            raise AssertionError(f"{len(self._owners)} requests are live, but no step can be planned for them")

    def _take_inbox(self, now_ns: int, updates: Updates, refused: dict[int, list[Refusing]]) -> bool:
        """Whether there was anything for the scheduler."""
        with self._changed:
            inbox, self._inbox = self._inbox, _Inbox()
        if inbox.failure is not None:
            raise inbox.failure
        if inbox.copied:
            inbox.copied.sort()  # by number; a simulated turn has them so
            self._take_copied(inbox.copied, now_ns, updates)
        if inbox.brought:
            self._num_fetches -= len(inbox.brought)
            updates.add_all(self._scheduler.fetched(sorted(inbox.brought), now_ns))
        gone = set(inbox.gone)
        submits = [(session, spec) for session, spec in inbox.submits if session not in gone]
        for session, spec in submits:
            answer = self._scheduler.submit(spec, now_ns)
            if isinstance(answer, Refused):
                told = Refusing(answer.id, answer.reason, answer.message, answer.retry_after_ms)
                refused.setdefault(session, []).append(told)
            else:
                self._owners[spec.id] = _Owner(session, spec.service_class)
        num_aborted = self._take_aborts(inbox, gone, now_ns, updates)
        for each in inbox.leases:
            self._take_lease(each, now_ns)
        return bool(inbox.copied or inbox.brought or inbox.leases or submits or num_aborted)

    def _take_lease(self, lease: _Lease, now_ns: int) -> None:
        if lease.keys:
            self._leases.add(lease.number)
            lease.tell(self._scheduler.lend(lease.number, lease.keys, now_ns))
        else:
            self._leases.discard(lease.number)
            self._scheduler.unlend(lease.number, now_ns)

    def _take_aborts(self, inbox: _Inbox, gone: set[int], now_ns: int, updates: Updates) -> int:
        """How many there were."""
        owners = self._owners
        asked = [id for session, id in inbox.aborts if id in owners and owners[id].session == session]
        for id in asked:
            updates.add_all(self._scheduler.abort(id, now_ns))
        left = [id for id, owner in owners.items() if owner.session in gone]
        for id in left:
            self._scheduler.abort(id, now_ns)
            del owners[id]
        ending = list(owners) if inbox.end_all else []
        for id in ending:
            updates.message = inbox.end_all
            updates.add_all(
                Ended(e.id, Finish.ERROR, None, e.num_output, e.cached_tokens) if isinstance(e, Ended) else e
                for e in self._scheduler.abort(id, now_ns)
            )
        return len(asked) + len(left) + len(ending)

    def _take_copied(self, copied: list[Copied], now_ns: int, updates: Updates) -> None:
        for each in copied:
            op = self._moves.pop(each.number, None) or self._copies.popleft()
            assert op.number == each.number, f"copy {each.number} was reported, {op.number} was due"
            if each.bad:
                told = "kv.not_on_disk" if op.disk else "kv.bad_blocks"
                log.warning(told, {"copy": op.number, "request": op.id, "out": op.out, "blocks": len(each.bad)})
        self._expect_copy(now_ns)
        updates.add_all(self._scheduler.copied(copied, now_ns))

    def _launch_steps(self, now_ns: int) -> bool:
        launched = False
        while len(self._in_flight) < self._scheduler.limits.max_steps_in_flight:
            plan = self._scheduler.plan(now_ns)
            if plan is None:
                break
            if plan.predicted_ns > ANNOUNCE_NS:
                self._announced_ns = plan.predicted_ns
                self._announce(plan.predicted_ns)
            self._start_copies(plan.ops)  # before the launch, which may compute the whole step
            for fetch in plan.fetches:
                assert self._peers is not None, "a fetch was planned, but nobody fetches"
                self._num_fetches += 1
                self._peers.fetch(fetch, self._on_fetch)
            self._in_flight.append(_Launched(plan, self._clock()))
            self._runner.launch(plan)
            launched = True
        return launched

    def _start_copies(self, ops: list[KvOp]) -> None:
        for op in ops:
            assert self._copier is not None, "a copy was planned, but there is no host tier"
            if op.disk:
                self._moves[op.number] = op  # the store gives up what is late
            else:
                self._copies.append(op)
                if len(self._copies) == 1:
                    self._expect_copy(self._clock())
            self._copier.start(op, self._on_copy)

    def _expect_copy(self, now_ns: int) -> None:
        """The oldest copy that is not done has its time from now on."""
        self._copying = None
        if self._copies:
            limits = self._scheduler.limits
            num_bytes = len(self._copies[0].device_blocks) * limits.block_bytes
            self._copying = now_ns, int(num_bytes / limits.copy_bytes_per_s * 1e9)

    def _finish_step(self, updates: Updates) -> Step | None:
        """Collect and apply the oldest step. A runner that does not measure device time gets the time it took here.

        None: there was nothing to compute in it.
        """
        result = self._runner.collect()
        plan, launched_ns = self._in_flight.popleft()
        now_ns = self._clock()
        if plan.slices:
            result.latency_ns = result.latency_ns or now_ns - launched_ns
            result.busy_ns = result.busy_ns or now_ns - max(launched_ns, self._collected_ns)
            self._collected_ns = now_ns
        updates.add_all(self._scheduler.apply(result, now_ns))
        if not plan.slices:
            return None
        return Step(_kind(plan), plan.num_tokens, plan.predicted_ns, result.busy_ns, result.latency_ns)

    def _close_turn(self, updates: Updates, refused: dict[int, list[Refusing]], step: Step | None) -> Turn:
        owners = self._owners  # without those whose session ended in this turn
        waits = [Wait(owners[event.id].service_class, event.waited_ns) for event in updates.waits if event.id in owners]
        by_session: dict[int, list[Update]] = {}
        for update in updates.finished():
            owner = owners.get(update.id)
            if owner is None:
                continue
            by_session.setdefault(owner.session, []).append(update)
            if update.ending is not None:
                del owners[update.id]
        told = {session: tuple(all) for session, all in by_session.items()}
        return Turn(self._view, told, refused, step, waits, self._scheduler.kv_news())

    def _tell_everyone(self, message: str) -> None:
        """After a failure the scheduler's state means nothing; the streams are known here."""
        updates = Updates(message)
        updates.add_all([Ended(id, Finish.ERROR, None, 0, 0) for id in self._owners])
        self._publish(self._close_turn(updates, {}, None))


def _kind(plan: StepPlan) -> str:
    decodes = sum(1 for part in plan.slices if part.count == 1)
    return "decode" if decodes == len(plan.slices) else "mixed" if decodes else "prefill"
