"""The second proof: given the recorded arrivals, step times and tokens, the simulator makes the same events by itself.

From a journal come only the inputs of a world: when something arrived, how long the loop took from being woken to its
plan, how long from there to the apply of each step and to the end of each copy and fetch, what fetches brought and what
the model said to each slice of a request. When to submit, plan and apply, what to plan, copy and fetch, the simulated
replica decides. The outcome is compared call by call: all of them in the same order, at the same nanosecond and with
equal answers.

It is exact under these conditions, which the live loop keeps:
  - one thread makes all calls, in turns: inputs, plans until there is none or enough are in flight, one apply;
  - one time is told to all calls of a turn up to its plans, later than that of the turn before; what arrived, the
    end of a copy or fetch included, is known by then;
  - after a turn in which nothing could be planned, although requests are live, nothing is before there is something to
    tell the scheduler.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from shoal.core.plan import Brought, Copied, Fetch, KvOp, Logprobs, Slice, StepPlan, StepResult
from shoal.sim.agenda import NEVER_NS, Agenda
from shoal.sim.replay import Divergence, Lines, recorder
from shoal.sim.replica import Replica
from shoal.telemetry import journal
from shoal.telemetry.journal import (
    Aborted,
    Applied,
    Call,
    CopiesDone,
    FetchesDone,
    Header,
    LeaseOver,
    Lent,
    Planned,
    Submitted,
)


class Said(NamedTuple):
    """What the model said to one slice."""

    num_tokens: int  # of the slice
    token: int | None
    logprobs: Logprobs | None
    prompt_logprobs: list[Logprobs] | None


@dataclass(slots=True)
class Run:
    """One run of a journal: from a header to the next."""

    header: Header
    calls: list[Call] = field(default_factory=list)


def agree(path: Path) -> int:
    """How many calls were simulated, all as recorded. Divergence; ValueError for a file that is no journal."""
    runs: list[Run] = []
    for _, record in journal.read(path):
        if isinstance(record, Header):
            runs.append(Run(record))
        else:
            runs[-1].calls.append(record)
    return sum(_agree(run) for run in runs)


def _agree(run: Run) -> int:
    while run.calls and not isinstance(run.calls[-1], Planned | Applied):
        run.calls.pop()  # the recording ends within a turn: nothing was planned with what came in
    recorded = _told(run.calls)
    simulated = _simulate(run)
    for number, (live, again) in enumerate(zip(recorded, simulated, strict=False), start=1):
        if live != again:
            raise Divergence(f"call {number}", live, again)
    if len(recorded) != len(simulated):
        raise Divergence("number of calls", len(recorded), len(simulated))
    return len(recorded)


def _told(calls: Iterable[Call]) -> list[Call]:
    """A plan of nothing is no event."""
    return [call for call in calls if not (isinstance(call, Planned) and call.plan is None)]


def _simulate(run: Run) -> list[Call]:
    lines, agenda = Lines(), Agenda()
    replica = Replica(
        recorder(run.header, lines),
        Recorded(run.calls),
        agenda,
        tell=lambda events: None,
    )
    for call in run.calls:
        if isinstance(call, Submitted):
            agenda.at(call.now_ns, partial(replica.submit, call.spec))
        elif isinstance(call, Aborted):
            agenda.at(call.now_ns, partial(replica.abort, call.id))
        elif isinstance(call, Lent):
            agenda.at(call.now_ns, partial(replica.lend, call.lease, call.keys))
        elif isinstance(call, LeaseOver):
            agenda.at(call.now_ns, partial(replica.unlend, call.lease))
    if run.calls:
        agenda.run(until_ns=run.calls[-1].now_ns)
    return _told(journal.decode(line) for line in lines.lines[1:])  # type: ignore[misc]


class Recorded:
    """A Machine that takes the recorded times and says the recorded tokens; where the recording ends, it stops."""

    def __init__(self, calls: list[Call]) -> None:
        self._delays = deque[int]()
        self._steps: dict[int, tuple[int, int, int]] = {}  # step -> (turn to apply, busy_ns, latency_ns)
        self._copies: dict[int, tuple[int, Copied]] = {}  # number -> (from turn to turn, what was told)
        self._fetches: dict[int, tuple[int, Brought]] = {}  # number -> (from turn to turn, what it brought)
        self._said: defaultdict[tuple[str, int], deque[Said]] = defaultdict(deque)  # by (request, slice's start)
        self._read(calls)

    def turn_delay_ns(self) -> int:
        return self._delays.popleft() if self._delays else NEVER_NS

    def run(self, plan: StepPlan, now_ns: int, free_ns: int) -> tuple[int, StepResult]:
        if plan.step not in self._steps:
            return NEVER_NS, StepResult(plan.step, [])
        took_ns, busy_ns, latency_ns = self._steps[plan.step]
        result = StepResult(plan.step, [], busy_ns=busy_ns, latency_ns=latency_ns)
        for part in plan.slices:
            self._say(part, result)
        return now_ns + took_ns, result

    def copy(self, op: KvOp, num_bytes: int, now_ns: int, free_ns: int) -> tuple[int, Copied]:
        if op.number not in self._copies:
            return NEVER_NS, Copied(op.number, 0)
        took_ns, copied = self._copies[op.number]
        return now_ns + took_ns, copied

    def fetch(self, fetch: Fetch, num_bytes: int, now_ns: int) -> tuple[int, Brought]:
        if fetch.number not in self._fetches:
            return NEVER_NS, Brought(fetch.number, 0, 0)
        took_ns, brought = self._fetches[fetch.number]
        return now_ns + took_ns, brought

    def _say(self, part: Slice, result: StepResult) -> None:
        """A request that was preempted computes the same positions again, with other last bits perhaps: in turn."""
        said = self._said[part.id, part.start]
        if not said or (said[0].num_tokens, said[0].token is not None) != (part.count, part.sample):
            raise Divergence(f"step {result.step}", said[0] if said else "no such slice", part)
        heard = said.popleft()
        if heard.token is not None:
            result.tokens.append(heard.token)
        if heard.logprobs is not None:
            result.logprobs[part.id] = heard.logprobs
        if heard.prompt_logprobs is not None:
            result.prompt_logprobs[part.id] = heard.prompt_logprobs

    def _read(self, calls: list[Call]) -> None:
        launched: dict[int, tuple[StepPlan, int]] = {}  # step -> plan, time of its turn
        copying: dict[int, int] = {}  # number of a copy -> time of the turn that started it
        fetching: dict[int, int] = {}  # the same of fetches
        woken_ns: int | None = None  # None: idle
        turn_ns: int | None = None  # time of the turn's first plan; None: none yet
        for call in calls:
            if isinstance(call, Planned):
                if turn_ns is None and woken_ns is not None:
                    turn_ns = call.now_ns
                    self._delays.append(turn_ns - woken_ns)
                    woken_ns = None
                if call.plan is not None:
                    if turn_ns is None:
                        raise Divergence(f"step {call.plan.step}", "planned", "nothing had arrived")
                    launched[call.plan.step] = (call.plan, turn_ns)
                    copying.update((op.number, turn_ns) for op in call.plan.ops)
                    fetching.update((fetch.number, turn_ns) for fetch in call.plan.fetches)
                continue
            if isinstance(call, CopiesDone):
                self._hear_copies(call, copying)
            if isinstance(call, FetchesDone):
                self._hear_fetches(call, fetching)
            if isinstance(call, Applied):
                if call.result.step not in launched:
                    raise Divergence(f"step {call.result.step}", "returned", "never planned")
                plan, since_ns = launched.pop(call.result.step)
                self._hear(plan, call.result, call.now_ns - since_ns)
                woken_ns = call.now_ns
            elif woken_ns is None:
                woken_ns = call.now_ns
            turn_ns = None

    def _hear_copies(self, call: CopiesDone, copying: dict[int, int]) -> None:
        for copied in call.done:
            if copied.number not in copying:
                raise Divergence(f"copy {copied.number}", "done", "never started")
            self._copies[copied.number] = (call.now_ns - copying.pop(copied.number), copied)

    def _hear_fetches(self, call: FetchesDone, fetching: dict[int, int]) -> None:
        for brought in call.done:
            if brought.number not in fetching:
                raise Divergence(f"fetch {brought.number}", "done", "never started")
            self._fetches[brought.number] = (call.now_ns - fetching.pop(brought.number), brought)

    def _hear(self, plan: StepPlan, result: StepResult, took_ns: int) -> None:
        self._steps[plan.step] = (took_ns, result.busy_ns, result.latency_ns)
        tokens = iter(result.tokens)
        for part in plan.slices:
            token = next(tokens) if part.sample else None
            logprobs = result.logprobs.get(part.id) if part.sample else None
            said = Said(part.count, token, logprobs, result.prompt_logprobs.get(part.id))
            self._said[part.id, part.start].append(said)
