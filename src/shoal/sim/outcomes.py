"""What became of the requests of a load. Who runs one, the simulator or an engine, tells it here in the same way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from shoal.core.plan import StepPlan, View
from shoal.core.request import Finish, Refusal
from shoal.workload.latency import Latency, Slo, Spread, attainment, spread
from shoal.workload.trace import Row


@dataclass(slots=True)
class Outcome:
    """One request. Times in nanoseconds from the start of the load."""

    row: Row
    due_ns: int
    served_ns: int  # end of its last slice so far; before the first one, when it was due
    wait_ns: int = 0  # longest time without a slice: in the line, parked, or passed over
    tokens: list[int] = field(default_factory=list)
    first_ns: int = 0  # of the first token
    last_ns: int = 0
    finish: Finish | None = None  # None: it was refused, or did not end in time
    refusal: Refusal | None = None

    @property
    def answered(self) -> bool:
        return self.finish in (Finish.STOP, Finish.LENGTH)

    @property
    def latency(self) -> Latency:
        """Only of one that was answered."""
        return Latency(self.due_ns, self.first_ns, self.last_ns, len(self.tokens))


@dataclass(frozen=True, slots=True)
class Figures:
    """Over some requests. Latencies are of the answered ones, in the order of their ends; attainment is of all."""

    outcomes: tuple[Outcome, ...]  # in the order of sending

    @property
    def latencies(self) -> tuple[Latency, ...]:
        answered = [(outcome.last_ns, place) for place, outcome in enumerate(self.outcomes) if outcome.answered]
        return tuple([self.outcomes[place].latency for _, place in sorted(answered)])

    @property
    def num_requests(self) -> int:
        return len(self.outcomes)

    @property
    def refusals(self) -> Counter[Refusal]:
        return Counter(outcome.refusal for outcome in self.outcomes if outcome.refusal is not None)

    @property
    def num_refused(self) -> int:
        return self.refusals.total()

    @property
    def ttft_ns(self) -> Spread | None:
        return spread([latency.ttft_ns for latency in self.latencies])

    @property
    def tpot_ns(self) -> Spread | None:
        return spread([latency.tpot_ns for latency in self.latencies if latency.tpot_ns is not None])

    @property
    def e2e_ns(self) -> Spread | None:
        return spread([latency.e2e_ns for latency in self.latencies])

    @property
    def worst_wait_ns(self) -> int:
        """Longest time that an accepted request was without a slice."""
        return max([outcome.wait_ns for outcome in self.outcomes if outcome.refusal is None], default=0)

    def attainment(self, slo: Slo) -> float:
        return attainment(self.latencies, self.num_requests, slo)


@dataclass(frozen=True, slots=True)
class Report(Figures):
    """Over a whole load."""

    steps_ns: tuple[int, ...]  # of each step with slices, from its plan to its result
    view: View  # of the scheduler in the end

    @property
    def duration_ns(self) -> int:
        """From the start to the last token of an answer."""
        return max([latency.last_ns for latency in self.latencies], default=0)

    @property
    def output_tokens_per_s(self) -> float:
        """0 where nothing was answered."""
        return sum(latency.num_tokens for latency in self.latencies) / max(self.duration_ns, 1) * 1e9

    @property
    def num_steps(self) -> int:
        return self.view.step

    @property
    def num_preemptions(self) -> int:
        return self.view.preemptions

    @property
    def recomputed_tokens(self) -> int:
        return self.view.recomputed_tokens

    def step_met_ns(self) -> float:
        """Average time of the step that is under way when somebody arrives: a long one is met more often."""
        return sum([step * step for step in self.steps_ns]) / max(1, sum(self.steps_ns))

    def by_class(self) -> dict[str, Figures]:
        names = sorted({outcome.row.service_class for outcome in self.outcomes})
        return {name: self._of(name) for name in names}

    def _of(self, name: str) -> Figures:
        return Figures(tuple([each for each in self.outcomes if each.row.service_class == name]))


class Ledger:
    """Collects what is told while a load runs. Times in nanoseconds from its start."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Outcome] = {}  # by request, in the order of sending
        self.num_open = 0  # sent and not ended
        self._steps_ns: list[int] = []

    def sent(self, id: str, row: Row, due_ns: int) -> None:
        self.outcomes[id] = Outcome(row, due_ns, served_ns=due_ns)
        self.num_open += 1

    def refused(self, id: str, reason: Refusal) -> None:
        self.outcomes[id].refusal = reason
        self.num_open -= 1

    def step(self, plan: StepPlan, planned_ns: int, done_ns: int) -> None:
        """A step was computed, and its requests were served."""
        for part in plan.slices:
            outcome = self.outcomes[part.id]
            outcome.wait_ns = max(outcome.wait_ns, planned_ns - outcome.served_ns)
            outcome.served_ns = done_ns
        if plan.slices:
            self._steps_ns.append(done_ns - planned_ns)

    def tokens(self, id: str, tokens: Collection[int], now_ns: int) -> None:
        outcome = self.outcomes[id]
        if tokens and not outcome.tokens:
            outcome.first_ns = now_ns
        outcome.tokens += tokens
        outcome.last_ns = now_ns

    def ended(self, id: str, finish: Finish) -> None:
        self.outcomes[id].finish = finish
        self.num_open -= 1

    def report(self, view: View, now_ns: int) -> Report:
        """Who is still open has waited until now."""
        for outcome in self.outcomes.values():
            if outcome.finish is None and outcome.refusal is None:
                outcome.wait_ns = max(outcome.wait_ns, now_ns - outcome.served_ns)
        return Report(tuple(self.outcomes.values()), tuple(self._steps_ns), view)
