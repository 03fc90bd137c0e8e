"""One simulated replica: the live Scheduler, driven turn by turn as `engine/loop.py` drives it, on a virtual clock.

    woken ──delay──► turn: submits, aborts, plans ──the oldest step's time──► apply ──delay──► turn ...

What arrives while a step is computed waits for the next turn, here as there. A replica is woken by its first arrival
when it is idle, and by each apply while anything is live or in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from shoal.core.plan import Ended, Event, Refused, StepPlan, StepResult
from shoal.core.request import RequestSpec
from shoal.core.stepcost import StepCost
from shoal.sim.agenda import Agenda
from shoal.telemetry.journal import Planner


class Machine(Protocol):
    """What a replica runs on: how long things take there, and what its model says."""

    def turn_delay_ns(self) -> int:
        """From the waking of the loop to its plan. Asked once a turn."""
        ...

    def run(self, plan: StepPlan, now_ns: int, free_ns: int) -> tuple[int, StepResult]:
        """When the step is done and what it brings; the one before it is done at `free_ns`. Asked once a step."""
        ...


class Modelled:
    """A machine that takes exactly what a cost model says, and samples the same token again and again."""

    TURN_DELAY_NS, TOKEN = 300_000, 0

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost

    def turn_delay_ns(self) -> int:
        return self.TURN_DELAY_NS

    def run(self, plan: StepPlan, now_ns: int, free_ns: int) -> tuple[int, StepResult]:
        busy_ns = self._cost.predict(self._cost.features(plan.slices))
        done_ns = max(now_ns, free_ns) + busy_ns
        tokens = [self.TOKEN for part in plan.slices if part.sample]
        return done_ns, StepResult(plan.step, tokens, busy_ns=busy_ns, latency_ns=done_ns - now_ns)


class Replica:
    """`tell` gets every answer at the time it is given: refusals in the turn, events in their order."""

    def __init__(
        self,
        planner: Planner,
        machine: Machine,
        agenda: Agenda,
        *,
        tell: Callable[[Iterable[Event | Refused]], None],
    ) -> None:
        self._planner = planner
        self._machine = machine
        self._agenda = agenda
        self._tell = tell
        self._submits: list[RequestSpec] = []
        self._aborts: list[str] = []
        self._live: set[str] = set()
        self._in_flight: deque[tuple[int, StepResult]] = deque()  # (done at, result), oldest first
        self._free_ns = 0  # when the machine has done all that was launched
        self._idle = True

    def submit(self, spec: RequestSpec) -> None:
        self._submits.append(spec)
        self._wake()

    def abort(self, id: str) -> None:
        self._aborts.append(id)
        self._wake()

    def _wake(self) -> None:
        if self._idle:
            self._idle = False
            self._turn_later()

    def _turn_later(self) -> None:
        self._agenda.at(self._agenda.now_ns + self._machine.turn_delay_ns(), self._turn)

    def _turn(self) -> None:
        self._take_inbox()
        self._launch()
        if self._in_flight:
            self._agenda.at(max(self._agenda.now_ns, self._in_flight[0][0]), self._finish)
            return
        assert not self._live, f"{len(self._live)} requests are live, but no step can be planned for them"
        self._idle = True

    def _take_inbox(self) -> None:
        now_ns = self._agenda.now_ns
        submits, self._submits = self._submits, []
        aborts, self._aborts = self._aborts, []
        for spec in submits:
            answer = self._planner.submit(spec, now_ns)
            if isinstance(answer, Refused):
                self._tell([answer])
            else:
                self._live.add(spec.id)
        for id in aborts:
            self._take(self._planner.abort(id, now_ns))

    def _launch(self) -> None:
        now_ns = self._agenda.now_ns
        while len(self._in_flight) < self._planner.limits.max_steps_in_flight:
            plan = self._planner.plan(now_ns)
            if plan is None:
                return
            self._free_ns, result = self._machine.run(plan, now_ns, self._free_ns)
            self._in_flight.append((self._free_ns, result))

    def _finish(self) -> None:
        _, result = self._in_flight.popleft()
        self._take(self._planner.apply(result, self._agenda.now_ns))
        if self._in_flight or self._live or self._submits or self._aborts:
            self._turn_later()
        else:
            self._idle = True

    def _take(self, events: list[Event]) -> None:
        self._live.difference_update(event.id for event in events if isinstance(event, Ended))
        self._tell(events)
