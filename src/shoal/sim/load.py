"""One replica under a load, simulated: what its clients would have felt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from shoal.core.kv.hashing import root_key
from shoal.core.limits import Limits
from shoal.core.plan import Ended, Event, Refused, Token
from shoal.core.request import RequestSpec
from shoal.core.scheduler import Scheduler
from shoal.core.stepcost import StepCost
from shoal.sim.agenda import Agenda
from shoal.sim.replica import Modelled, Replica
from shoal.workload.latency import Latency, Slo, Spread, attainment, spread
from shoal.workload.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Times in nanoseconds of virtual time, from each request's arrival."""

    latencies: tuple[Latency, ...]  # of answered requests, in the order of their ends
    num_requests: int
    num_refused: int
    num_steps: int
    num_preemptions: int
    recomputed_tokens: int
    duration_ns: int  # from the start to the last token

    @property
    def output_tokens_per_s(self) -> float:
        """0 where nothing was answered."""
        return sum(latency.num_tokens for latency in self.latencies) / max(self.duration_ns, 1) * 1e9

    @property
    def ttft_ns(self) -> Spread | None:
        return spread([latency.ttft_ns for latency in self.latencies])

    @property
    def tpot_ns(self) -> Spread | None:
        return spread([latency.tpot_ns for latency in self.latencies if latency.tpot_ns is not None])

    @property
    def e2e_ns(self) -> Spread | None:
        return spread([latency.e2e_ns for latency in self.latencies])

    def attainment(self, slo: Slo) -> float:
        return attainment(self.latencies, self.num_requests, slo)


def simulate(load: Trace, limits: Limits, machine: StepCost, *, seed: int = 0) -> Report:
    """Run the whole load. `machine` is how long steps take; the scheduler learns its own model from them, as live."""
    agenda = Agenda()
    scheduler = Scheduler(limits, hash_root=root_key("simulated", "none", "none", limits.block_tokens))
    clients = _Clients(load, agenda, limits.vocab_size, Random(f"{seed}/tokens"))
    clients.start(Replica(scheduler, Modelled(machine), agenda, tell=clients.hear))
    agenda.run()
    scheduler.check()
    view = scheduler.view()
    return Report(
        latencies=tuple(clients.answered),
        num_requests=len(load.rows),
        num_refused=clients.num_refused,
        num_steps=view.step,
        num_preemptions=view.preemptions,
        recomputed_tokens=view.recomputed_tokens,
        duration_ns=max((latency.last_ns for latency in clients.answered), default=0),
    )


@dataclass(slots=True)
class _Clients:
    """Send the rows of a trace, by the clock or each when an answer has come, and time what they hear."""

    load: Trace
    agenda: Agenda
    vocab_size: int
    rng: Random
    answered: list[Latency] = field(default_factory=list)
    num_refused: int = 0
    replica: Replica | None = None
    waiting: list[int] = field(default_factory=list)  # rows of a closed loop that nobody sent yet, last first
    due_ns: dict[str, int] = field(default_factory=dict)
    first_ns: dict[str, int] = field(default_factory=dict)

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
                self.first_ns.setdefault(event.id, now_ns)
            elif isinstance(event, Ended):
                latency = Latency(self.due_ns.pop(event.id), self.first_ns.pop(event.id), now_ns, event.num_output)
                self.answered.append(latency)
                self._send_next()
            elif isinstance(event, Refused):
                self.num_refused += 1
                self._send_next()

    def _send_next(self) -> None:
        if self.waiting:
            self._send(self.waiting.pop())

    def _send(self, number: int) -> None:
        assert self.replica is not None
        row, id = self.load.rows[number], f"{number:06d}.0"
        self.due_ns[id] = self.agenda.now_ns
        prompt = tuple(self.rng.choices(range(self.vocab_size), k=row.prompt_tokens))
        self.replica.submit(RequestSpec(id=id, prompt=prompt, max_tokens=row.output_tokens))
