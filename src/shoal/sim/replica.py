"""One simulated replica: the live Scheduler, driven turn by turn as `engine/loop.py` drives it, on a virtual clock.

    woken ──delay──► turn: inbox, plans ──the oldest step's time──► apply ──delay──► turn ...

What arrives while a step is computed waits for the next turn, here as there. A replica is woken by the first arrival
when it is idle, also by a copy, fetch or lease that is over, and by each apply. It is idle, too, while requests are
live and nothing can be planned for them before that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from shoal.core.plan import Brought, Copied, Ended, Event, Fetch, KvOp, Refused, StepPlan, StepResult
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

    def copy(self, op: KvOp, num_bytes: int, now_ns: int, free_ns: int) -> tuple[int, Copied]:
        """When the copy is done; the one before it is done at `free_ns`. Asked once a copy, before its plan's step."""
        ...

    def fetch(self, fetch: Fetch, num_bytes: int, now_ns: int) -> tuple[int, Brought]:
        """When the fetch is done, and what it brings. Asked once a fetch, before its plan's step."""
        ...


class Modelled:
    """A machine that takes exactly what a cost model says, and samples the same token again and again. `num_stages`: of
    a pipeline in which each stage takes as long as that for a step."""

    TURN_DELAY_NS, TOKEN = 300_000, 0
    DISK_BYTES_PER_S = 200e6
    FETCH_LATENCY_NS = 5_000_000

    def __init__(
        self,
        cost: StepCost,
        *,
        copy_bytes_per_s: float = 2e9,
        fetch_bytes_per_s: float = 1e9,
        num_stages: int = 1,
    ) -> None:
        self._cost = cost
        self._num_stages = num_stages
        self._copy_bytes_per_s = copy_bytes_per_s
        self._fetch_bytes_per_s = fetch_bytes_per_s

    def turn_delay_ns(self) -> int:
        return self.TURN_DELAY_NS

    def run(self, plan: StepPlan, now_ns: int, free_ns: int) -> tuple[int, StepResult]:
        if not plan.slices:
            return max(now_ns, free_ns), StepResult(plan.step, [])
        busy_ns = self._cost.predict(self._cost.features(plan.slices))
        done_ns = max(now_ns + self._num_stages * busy_ns, free_ns + busy_ns)
        tokens = [self.TOKEN for part in plan.slices if part.sample]
        return done_ns, StepResult(plan.step, tokens, busy_ns=busy_ns, latency_ns=done_ns - now_ns)

    def copy(self, op: KvOp, num_bytes: int, now_ns: int, free_ns: int) -> tuple[int, Copied]:
        busy_ns = int(num_bytes / (self.DISK_BYTES_PER_S if op.disk else self._copy_bytes_per_s) * 1e9)
        return max(now_ns, free_ns) + busy_ns, Copied(op.number, busy_ns)

    def fetch(self, fetch: Fetch, num_bytes: int, now_ns: int) -> tuple[int, Brought]:
        block_ns = num_bytes / len(fetch.blocks) / self._fetch_bytes_per_s * 1e9
        busy_ns = min(fetch.limit_ns, self.FETCH_LATENCY_NS + int(len(fetch.blocks) * block_ns))
        num_good = min(len(fetch.blocks), int((busy_ns - self.FETCH_LATENCY_NS + 1) / block_ns))
        return now_ns + busy_ns, Brought(fetch.number, num_good, busy_ns)


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
        self._copied: list[Copied] = []
        self._brought: list[Brought] = []
        self._submits: list[RequestSpec] = []
        self._aborts: list[str] = []
        self._leases: list[tuple[int, tuple[bytes, ...] | None]] = []  # None: over
        self._live: set[str] = set()
        self._in_flight: deque[tuple[int, StepResult]] = deque()  # (done at, result), oldest first
        self._free_ns = 0  # when the machine has done all steps that were launched
        self._copies_free_ns = 0  # and all copies
        self._num_moving = 0  # copies, fetches and leases
        self._idle = True

    def submit(self, spec: RequestSpec) -> None:
        self._submits.append(spec)
        self._wake()

    def abort(self, id: str) -> None:
        self._aborts.append(id)
        self._wake()

    def lend(self, lease: int, keys: tuple[bytes, ...]) -> None:
        self._leases.append((lease, keys))
        self._wake()

    def unlend(self, lease: int) -> None:
        self._leases.append((lease, None))
        self._wake()

    def _copy_done(self, copied: Copied) -> None:
        self._copied.append(copied)
        self._wake()

    def _fetch_done(self, brought: Brought) -> None:
        self._brought.append(brought)
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
        assert self._num_moving or not self._live, f"{len(self._live)} requests are live, but no step can be planned"
        self._idle = True

    def _take_inbox(self) -> None:
        now_ns = self._agenda.now_ns
        copied, self._copied = self._copied, []
        submits, self._submits = self._submits, []
        aborts, self._aborts = self._aborts, []
        brought, self._brought = self._brought, []
        leases, self._leases = self._leases, []
        if copied:
            copied.sort()
            self._num_moving -= len(copied)
            self._take(self._planner.copied(copied, now_ns))
        if brought:
            self._num_moving -= len(brought)
            self._take(self._planner.fetched(sorted(brought), now_ns))
        for spec in submits:
            answer = self._planner.submit(spec, now_ns)
            if isinstance(answer, Refused):
                self._tell([answer])
            else:
                self._live.add(spec.id)
        for id in aborts:
            self._take(self._planner.abort(id, now_ns))
        for lease, keys in leases:
            self._num_moving += 1 if keys is not None else -1
            if keys is not None:
                self._planner.lend(lease, keys, now_ns)
            else:
                self._planner.unlend(lease, now_ns)

    def _launch(self) -> None:
        now_ns = self._agenda.now_ns
        while len(self._in_flight) < self._planner.limits.max_steps_in_flight:
            plan = self._planner.plan(now_ns)
            if plan is None:
                return
            for op in plan.ops:
                self._start_copy(op)
            for fetch in plan.fetches:
                self._start_fetch(fetch)
            self._free_ns, result = self._machine.run(plan, now_ns, self._free_ns)
            self._in_flight.append((self._free_ns, result))

    def _start_copy(self, op: KvOp) -> None:
        now_ns = self._agenda.now_ns
        num_bytes = len(op.host_blocks) * self._planner.limits.block_bytes
        free_ns = now_ns if op.disk else self._copies_free_ns  # moves with the disk keep nobody waiting
        done_ns, copied = self._machine.copy(op, num_bytes, now_ns, free_ns)
        if not op.disk:
            self._copies_free_ns = done_ns
        self._num_moving += 1
        self._agenda.at(done_ns, partial(self._copy_done, copied))

    def _start_fetch(self, fetch: Fetch) -> None:
        now_ns = self._agenda.now_ns
        done_ns, brought = self._machine.fetch(fetch, len(fetch.blocks) * self._planner.limits.block_bytes, now_ns)
        self._num_moving += 1
        self._agenda.at(done_ns, partial(self._fetch_done, brought))

    def _finish(self) -> None:
        _, result = self._in_flight.popleft()
        self._take(self._planner.apply(result, self._agenda.now_ns))
        self._turn_later()

    def _take(self, events: list[Event]) -> None:
        self._live.difference_update(event.id for event in events if isinstance(event, Ended))
        self._tell(events)
