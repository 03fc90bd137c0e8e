"""The second proof: given the recorded arrivals, step times and tokens, the simulator makes the same events by itself.

From a journal come only the inputs of a world: when something arrived, how long the loop took from being woken to its
plan, how long from there to the apply of each step, and what the model said to each slice of a request. When to submit,
plan and apply, and what to plan, the simulated replica decides. The outcome is compared call by call: every submit,
abort, plan and apply in the same order with equal answers, every apply at the same nanosecond.

It is exact under these conditions, which the live loop keeps:
  - one thread makes all calls, in turns: inputs, plans until there is none or enough are in flight, one apply;
  - an arrival is known by the time of its submit or abort, which is at most its turn's first plan, and later than the
    plan of the turn before (the clock has moved in between);
  - the scheduler does not look at differences between `now_ns` within one turn.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from shoal.core.plan import Logprobs, Slice, StepPlan, StepResult
from shoal.sim.agenda import NEVER_NS, Agenda
from shoal.sim.replay import Divergence, Lines, recorder
from shoal.sim.replica import Replica
from shoal.telemetry import journal
from shoal.telemetry.journal import Aborted, Applied, Call, Header, Planned, Submitted


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
    recorded = [call for call in map(_comparable, run.calls) if call is not None]
    simulated = _simulate(run)
    for number, (live, again) in enumerate(zip(recorded, simulated, strict=False), start=1):
        if live != again:
            raise Divergence(f"call {number}", live, again)
    if len(recorded) != len(simulated):
        raise Divergence("number of calls", len(recorded), len(simulated))
    return len(recorded)


def _comparable(call: Call) -> Call | None:
    """Times between wake-up and plan are not simulated one by one; a plan of nothing is no event."""
    if isinstance(call, Planned) and call.plan is None:
        return None
    return call if isinstance(call, Applied) else msgspec.structs.replace(call, now_ns=0)


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
    if run.calls:
        agenda.run(until_ns=run.calls[-1].now_ns)
    calls = (journal.decode(line) for line in lines.lines[1:])
    return [each for each in map(_comparable, calls) if each is not None]  # type: ignore[arg-type]


class Recorded:
    """A Machine that takes the recorded times and says the recorded tokens; where the recording ends, it stops."""

    def __init__(self, calls: list[Call]) -> None:
        self._delays = deque[int]()
        self._steps: dict[int, tuple[int, int, int]] = {}  # step -> (turn to apply, busy_ns, latency_ns)
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
        live: set[str] = set()
        launched: dict[int, tuple[StepPlan, int]] = {}  # step -> plan, time of its turn
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
                continue
            if isinstance(call, Submitted) and call.refused is None:
                live.add(call.spec.id)
            if isinstance(call, Aborted | Applied):
                live.difference_update(event[1] for event in call.events if event[0] == "ended")
            if isinstance(call, Applied):
                if call.result.step not in launched:
                    raise Divergence(f"step {call.result.step}", "returned", "never planned")
                plan, since_ns = launched.pop(call.result.step)
                self._hear(plan, call.result, call.now_ns - since_ns)
                woken_ns = call.now_ns if live or launched else None
            elif woken_ns is None:
                woken_ns = call.now_ns
            turn_ns = None

    def _hear(self, plan: StepPlan, result: StepResult, took_ns: int) -> None:
        self._steps[plan.step] = (took_ns, result.busy_ns, result.latency_ns)
        tokens = iter(result.tokens)
        for part in plan.slices:
            token = next(tokens) if part.sample else None
            logprobs = result.logprobs.get(part.id) if part.sample else None
            said = Said(part.count, token, logprobs, result.prompt_logprobs.get(part.id))
            self._said[part.id, part.start].append(said)
