"""One replica under a load, simulated: what its clients would have felt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from shoal.core.kv.hashing import root_key
from shoal.core.limits import Limits
from shoal.core.plan import Ended, Event, Refused, StepPlan, StepResult, Token
from shoal.core.request import RequestSpec
from shoal.core.scheduler import Scheduler
from shoal.core.stepcost import StepCost
from shoal.sim.agenda import Agenda
from shoal.sim.outcomes import Ledger, Report
from shoal.sim.replica import Modelled, Replica
from shoal.workload.trace import Row, Trace


def simulate(load: Trace, limits: Limits, machine: StepCost, *, seed: int = 0) -> Report:
    """Run the whole load. `machine` is how long steps take; the scheduler knows it from the start, as after an engine's
    warm-up, and goes on learning from the steps, as live. Copies are as fast as the limits say, and a step goes through
    as many stages."""
    agenda, ledger = Agenda(), Ledger()
    scheduler = Scheduler(
        limits,
        hash_root=root_key("simulated", "none", "none", limits.block_tokens),
        cost=StepCost(machine.coefficients),
    )
    clients = _Clients(load, agenda, ledger, limits.vocab_size, Random(f"{seed}/tokens"))
    watched = Watched(machine, ledger, limits)
    clients.start(Replica(scheduler, watched, agenda, tell=clients.hear))
    agenda.run()
    scheduler.check()
    return ledger.report(scheduler.view(), agenda.now_ns)


def spec(id: str, row: Row, vocab_size: int, rng: Random) -> RequestSpec:
    """A request of a row's lengths, class and tenant, with a prompt of random tokens."""
    prompt = tuple(rng.choices(range(vocab_size), k=row.prompt_tokens))
    return RequestSpec(
        id=id, prompt=prompt, max_tokens=row.output_tokens, service_class=row.service_class, tenant=row.tenant
    )


class Watched(Modelled):
    """The modelled machine, which also tells the ledger of its steps."""

    def __init__(self, cost: StepCost, ledger: Ledger, limits: Limits) -> None:
        super().__init__(cost, copy_bytes_per_s=limits.copy_bytes_per_s, num_stages=limits.num_stages)
        self._ledger = ledger

    def run(self, plan: StepPlan, now_ns: int, free_ns: int) -> tuple[int, StepResult]:
        done_ns, result = super().run(plan, now_ns, free_ns)
        self._ledger.step(plan, now_ns, done_ns)
        return done_ns, result


@dataclass(slots=True)
class _Clients:
    """Send the rows of a trace, by the clock or each when an answer has come, and time what they hear."""

    load: Trace
    agenda: Agenda
    ledger: Ledger
    vocab_size: int
    rng: Random
    replica: Replica | None = None
    waiting: list[int] = field(default_factory=list)  # rows of a closed loop that nobody sent yet, last first

    def start(self, replica: Replica) -> None:
        self.replica = replica
        if self.load.concurrency is None:
            for number, row in enumerate(self.load.rows):
                self.agenda.at(row.due_ns, partial(self._send, number))
        else:
            self.waiting = list(range(len(self.load.rows)))[::-1]
            for _ in range(self.load.concurrency):
                self._send_next()

    def hear(self, events: Iterable[Event | Refused]) -> None:
        now_ns = self.agenda.now_ns
        for event in events:
            if isinstance(event, Token):
                self.ledger.tokens(event.id, [event.token], now_ns)
            elif isinstance(event, Ended):
                self.ledger.ended(event.id, event.reason)
                self._send_next()
            elif isinstance(event, Refused):
                self.ledger.refused(event.id, event.reason)
                self._send_next()

    def _send_next(self) -> None:
        if self.waiting:
            self._send(self.waiting.pop())

    def _send(self, number: int) -> None:
        assert self.replica is not None
        row, id = self.load.rows[number], f"{number:06d}.0"
        self.ledger.sent(id, row, self.agenda.now_ns)
        self.replica.submit(spec(id, row, self.vocab_size, self.rng))
