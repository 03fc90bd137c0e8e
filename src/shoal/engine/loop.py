"""The step loop: one thread that plans, computes and applies, turn after turn; it never waits for a gateway.

    inbox ─► submit / abort ─► plan ─► launch ─► collect ─► apply ─► one Turn to the I/O thread

What the I/O thread asks for waits in the inbox until the next turn, so an abort takes effect within one step.
An exception in here is the end of the process: every stream is told, then `failed` is called.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from shoal.core.plan import Ended, Refused, StepPlan, StepResult, View
from shoal.core.request import Finish, RequestSpec
from shoal.engine.updates import Updates
from shoal.fleet import health
from shoal.telemetry.journal import Planner
from shoal.wire.messages import Refusing, Update

ANNOUNCE_NS = 250_000_000  # a step predicted longer than this is announced before it runs

log = logging.getLogger("shoal.engine")


class Runner(Protocol):
    """Who computes steps. `collect` returns the oldest launched step and blocks until it is done."""

    def launch(self, plan: StepPlan) -> None: ...

    def collect(self) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class Step:
    """One finished step, for the metrics."""

    kind: str  # "decode": one token per request; "prefill": chunks only; "mixed"
    num_tokens: int
    predicted_ns: int
    busy_ns: int
    latency_ns: int


class _Launched(NamedTuple):
    plan: StepPlan
    at_ns: int


@dataclass(slots=True)
class Turn:
    """What one turn of the loop has to say. Keys of the maps are session keys."""

    view: View
    updates: dict[int, tuple[Update, ...]] = field(default_factory=dict)
    refused: dict[int, list[Refusing]] = field(default_factory=dict)
    step: Step | None = None


@dataclass(slots=True)
class _Inbox:
    """Filled by the I/O thread, emptied whole by the step thread; both under the loop's condition."""

    submits: list[tuple[int, RequestSpec]] = field(default_factory=list)
    aborts: list[tuple[int, str]] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)  # sessions that ended
    end_all: str = ""  # message for every stream that is left

    def __bool__(self) -> bool:
        return bool(self.submits or self.aborts or self.gone or self.end_all)


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
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._publish = publish
        self._announce = announce
        self._failed = failed
        self._clock = clock
        self._view = scheduler.view()
        self._changed = threading.Condition()
        self._inbox = _Inbox()
        self._stopping = False
        self._owners: dict[str, int] = {}  # live request -> session; step thread only
        self._in_flight: deque[_Launched] = deque()  # launched and not collected
        self._collected_ns = 0
        self._turn_since_ns: int | None = None  # None: waiting for the inbox
        self._announced_ns = 0  # predicted time of the step that the present turn announced
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

    def end_all(self, message: str) -> None:
        """Every stream that is left ends with an error that says so."""
        with self._changed:
            self._inbox.end_all = message
            self._changed.notify()

    def stop(self, limit_s: float) -> bool:
        """False: the thread did not come back from its step within the limit."""
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
        """The present turn will not come back."""
        return self._turn_age_ns() > health.stuck_after_ns(self._announced_ns)

    def _turn_age_ns(self) -> int:
        since = self._turn_since_ns
        return 0 if since is None else self._clock() - since

    # -- the step thread -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Turns until stopped or failed; the thread that calls this is the step thread."""
        self._running = True
        try:
            while self._wait_for_work():
                self._turn()
        except Exception as e:
            log.exception("engine.step_failed", {"step": self._in_flight[0].plan.step if self._in_flight else 0})
            self._tell_everyone(f"the engine failed: {type(e).__name__}")
            self._failed(e)
        finally:
            self._running = False
            self._ended.set()

    def _wait_for_work(self) -> bool:
        """False: stop. Returns at once while steps are in flight or the last turn did something."""
        with self._changed:
            while not (self._stopping or self._inbox or self._in_flight or self._owners):
                self._turn_since_ns = None
                self._changed.wait()
            self._announced_ns = 0
            self._turn_since_ns = self._clock()
            return not self._stopping

    def _turn(self) -> None:
        updates = Updates()
        refused: dict[int, list[Refusing]] = {}
        self._take_inbox(updates, refused)
        launched = self._launch_steps()
        step = self._finish_step(updates)
        self._view = self._scheduler.view()
        self._publish(self._close_turn(updates, refused, step))
        if self._owners and not launched and step is None:
            raise AssertionError(f"{len(self._owners)} requests are live, but no step can be planned for them")

    def _take_inbox(self, updates: Updates, refused: dict[int, list[Refusing]]) -> None:
        with self._changed:
            inbox, self._inbox = self._inbox, _Inbox()
        now_ns = self._clock()
        gone = set(inbox.gone)
        for session, spec in inbox.submits:
            if session in gone:
                continue
            answer = self._scheduler.submit(spec, now_ns)
            if isinstance(answer, Refused):
                refused.setdefault(session, []).append(Refusing(answer.id, answer.reason, answer.message))
            else:
                self._owners[spec.id] = session
        for session, id in inbox.aborts:
            if self._owners.get(id) == session:
                updates.add_all(self._scheduler.abort(id, now_ns))
        for id in [id for id, owner in self._owners.items() if owner in gone]:
            self._scheduler.abort(id, now_ns)
            del self._owners[id]
        if inbox.end_all:
            for id in list(self._owners):
                updates.add_all(
                    Ended(e.id, Finish.ERROR, None, e.num_output, e.cached_tokens) if isinstance(e, Ended) else e
                    for e in self._scheduler.abort(id, now_ns)
                )
            updates.message = inbox.end_all

    def _launch_steps(self) -> bool:
        launched = False
        while len(self._in_flight) < self._scheduler.limits.max_steps_in_flight:
            plan = self._scheduler.plan(self._clock())
            if plan is None:
                break
            if plan.predicted_ns > ANNOUNCE_NS:
                self._announced_ns = plan.predicted_ns
                self._announce(plan.predicted_ns)
            self._in_flight.append(_Launched(plan, self._clock()))
            self._runner.launch(plan)
            launched = True
        return launched

    def _finish_step(self, updates: Updates) -> Step | None:
        """Collect and apply the oldest step. A runner that does not measure device time gets the time it took here."""
        if not self._in_flight:
            return None
        result = self._runner.collect()
        plan, launched_ns = self._in_flight.popleft()
        now_ns = self._clock()
        result.latency_ns = result.latency_ns or now_ns - launched_ns
        result.busy_ns = result.busy_ns or now_ns - max(launched_ns, self._collected_ns)
        self._collected_ns = now_ns
        updates.add_all(self._scheduler.apply(result, now_ns))
        return Step(_kind(plan), plan.num_tokens, plan.predicted_ns, result.busy_ns, result.latency_ns)

    def _close_turn(self, updates: Updates, refused: dict[int, list[Refusing]], step: Step | None) -> Turn:
        by_session: dict[int, list[Update]] = {}
        for update in updates.finished():
            session = self._owners.get(update.id)
            if session is None:
                continue  # its session ended in this turn
            by_session.setdefault(session, []).append(update)
            if update.ending is not None:
                del self._owners[update.id]
        return Turn(self._view, {session: tuple(all) for session, all in by_session.items()}, refused, step)

    def _tell_everyone(self, message: str) -> None:
        """After a failure the scheduler's state means nothing; the streams are known here."""
        updates = Updates(message)
        updates.add_all([Ended(id, Finish.ERROR, None, 0, 0) for id in self._owners])
        self._publish(self._close_turn(updates, {}, None))


def _kind(plan: StepPlan) -> str:
    decodes = sum(1 for part in plan.slices if part.count == 1)
    return "decode" if decodes == len(plan.slices) else "mixed" if decodes else "prefill"
