"""Swap or recompute: how long a preempted request goes without its next token, when told to do either, and by choice.

One episode: victims (class batch) fill the replica and decode; then urgent requests come that need what they hold. What
counts is the time from a victim's leaving the batch until it samples its next token: its blocks are free, the urgent
request was served, and its KV is back or computed again.

    alone    one victim, and blocks are short: the urgent one waits until they are free
    backlog  three victims, and slots are short: each leaves for one of three urgent requests, while the KV of those
             that left before is still being copied
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from random import Random
from statistics import fmean
from typing import Any, Literal, NamedTuple

from engine import GREEDY, SESSION, Engine
from live import copier
from shoal.core.kv.hashing import root_key
from shoal.core.limits import Limits
from shoal.core.plan import Copied, Event, KvOp, Refused, StepPlan, StepResult, Token
from shoal.core.request import RequestSpec
from shoal.core.scheduler import Scheduler
from shoal.core.stepcost import StepCost
from shoal.engine.loop import StepLoop, Turn
from shoal.sim.agenda import Agenda
from shoal.sim.replica import Modelled, Replica

Mode = Literal["swap", "recompute", "auto"]
MODES: tuple[Mode, ...] = ("swap", "recompute", "auto")

# A model of 1.5 billion parameters on two cores: with its 28 KB a token both answers are right somewhere in the grid.
MACHINE = (1.2e8, 2.1e6, 350.0, 5e5, 2e3)  # of core.stepcost
BLOCK_TOKENS, BLOCK_BYTES = 16, 16 * 28 * 1024
UNEVEN = 0.05  # steps and copies take longer or shorter by so much (sigma of a log-normal factor)
NUM_PRIMING = 6  # episodes with swaps, from which the scheduler learns the rate of copies; it starts from its default

URGENT_PROMPT, URGENT_TOKENS = 96, 2
STARTED_TOKENS = 4  # a victim has so many when the urgent requests come


class Cell(NamedTuple):
    mb_per_s: int  # of copies
    num_tokens: int  # of a victim
    backlog: bool

    @property
    def num_victims(self) -> int:
        return 3 if self.backlog else 1

    @property
    def victim_output(self) -> int:
        """With a backlog the first victim goes on while the others compute their prompts."""
        return 300 if self.backlog else 80

    def limits(self, base: Limits) -> Limits:
        """Where there is one victim, an urgent request finds too few blocks; where there are more, no slot."""
        victim = -(-(self.num_tokens + self.victim_output) // base.block_tokens)
        spare = 3 * -(-(URGENT_PROMPT + URGENT_TOKENS) // base.block_tokens) + 16
        return replace(
            base,
            num_blocks=self.num_victims * victim + (spare if self.backlog else 0),
            max_num_seqs=self.num_victims if self.backlog else 2,
            prefix_caching=False,  # a victim finds nothing of its own again
        )


GRID = [Cell(rate, length, backlog) for backlog in (False, True) for rate in (5, 10, 20, 35, 70, 1000)
        for length in (64, 250, 1000, 4000)]  # fmt: skip
LIVE_GRID = [Cell(rate, length, False) for rate in (20, 1000) for length in (250, 1000)]


class Told(Scheduler):
    """Knows when each request left the batch."""

    def __init__(self, limits: Limits, *, hash_root: bytes, cost: StepCost | None = None) -> None:
        super().__init__(limits, hash_root=hash_root, cost=cost)
        self.left_ns: dict[str, int] = {}

    def plan(self, now_ns: int) -> StepPlan | None:
        plan = super().plan(now_ns)
        for id in plan.leaves if plan is not None else ():
            self.left_ns.setdefault(id, now_ns)
        return plan


class Episode:
    """What is sent when, and what it took. For a simulated replica and an engine alike."""

    def __init__(self, cell: Cell, number: int, left_ns: dict[str, int]) -> None:
        self.victims = [
            _spec(f"{number}.victim{n}", "batch", cell.num_tokens - STARTED_TOKENS, cell.victim_output)
            for n in range(cell.num_victims)
        ]
        self._urgent = [
            _spec(f"{number}.urgent{n}", "interactive", URGENT_PROMPT, URGENT_TOKENS) for n in range(cell.num_victims)
        ]
        self._left_ns = left_ns
        self._back_ns: dict[str, int] = {}
        self._num_tokens: Counter[str] = Counter()
        self._called = False

    def heard(self, id: str, now_ns: int) -> list[RequestSpec]:
        """A token came. Returns what is to be sent now."""
        self._num_tokens[id] += 1
        if id in self._left_ns:
            self._back_ns.setdefault(id, now_ns)
        if self._called or min(self._num_tokens[victim.id] for victim in self.victims) < STARTED_TOKENS:
            return []
        self._called = True
        return self._urgent

    @property
    def done(self) -> bool:
        """The urgent requests have their tokens, and whoever made way for them is back."""
        served = all(self._num_tokens[urgent.id] >= URGENT_TOKENS for urgent in self._urgent)
        return served and self._left() <= self._back_ns.keys()

    def seconds(self) -> float:
        """Mean over the victims that left."""
        left = self._left()
        assert left, "nobody was preempted"
        return fmean(self._back_ns[id] - self._left_ns[id] for id in left) / 1e9

    def _left(self) -> set[str]:
        """Those that were preempted: one that has all its tokens left for good."""
        gone = {victim.id for victim in self.victims if victim.id in self._left_ns}
        return {id for id in gone if id in self._back_ns or self._num_tokens[id] < self.victims[0].max_tokens}


def _spec(id: str, service_class: str, num_prompt: int, num_output: int) -> RequestSpec:
    return RequestSpec(
        id=id,
        prompt=tuple([7 * position % 1000 for position in range(num_prompt)]),
        max_tokens=num_output,
        service_class=service_class,
        sampling=GREEDY,
    )


# -- simulated ---------------------------------------------------------------------------------------------------------


class Uneven(Modelled):
    """Steps and copies take about what the model says."""

    def __init__(self, seed: int, copy_bytes_per_s: float) -> None:
        super().__init__(StepCost(MACHINE), copy_bytes_per_s=copy_bytes_per_s)
        self._step_chance, self._copy_chance = Random(f"{seed}/steps"), Random(f"{seed}/copies")

    def run(self, plan: StepPlan, now_ns: int, free_ns: int) -> tuple[int, StepResult]:
        _, result = super().run(plan, now_ns, free_ns)
        busy_ns = int(result.busy_ns * self._step_chance.lognormvariate(0, UNEVEN))
        done_ns = max(now_ns, free_ns) + busy_ns
        return done_ns, replace(result, busy_ns=busy_ns, latency_ns=done_ns - now_ns)

    def copy(self, op: KvOp, num_bytes: int, now_ns: int, free_ns: int) -> tuple[int, Copied]:
        _, copied = super().copy(op, num_bytes, now_ns, free_ns)
        busy_ns = int(copied.busy_ns * self._copy_chance.lognormvariate(0, UNEVEN))
        return max(now_ns, free_ns) + busy_ns, copied._replace(busy_ns=busy_ns)


def simulated(cell: Cell, mode: Mode, seed: int) -> float:
    """Seconds. The scheduler has learned the rate from the copies of earlier episodes, the same ones in each mode."""
    limits = cell.limits(
        Limits(
            num_blocks=1,
            max_model_len=1 << 15,
            vocab_size=1000,
            block_tokens=BLOCK_TOKENS,
            num_host_blocks=4 * (cell.num_tokens // BLOCK_TOKENS + 32),
            block_bytes=BLOCK_BYTES,
            preemption="swap",
        )
    )
    stage = _Stage(limits, Uneven(seed, cell.mb_per_s * 1_000_000))
    for number in range(NUM_PRIMING):
        stage.run(cell, number)
    object.__setattr__(limits, "preemption", mode)  # only here does a scheduler change its mind while it runs
    return stage.run(cell, NUM_PRIMING).seconds()


class _Stage:
    def __init__(self, limits: Limits, machine: Uneven) -> None:
        self._agenda = Agenda()
        root = root_key("simulated", "none", "none", limits.block_tokens)
        self._scheduler = Told(limits, hash_root=root, cost=StepCost(MACHINE))
        self._replica = Replica(self._scheduler, machine, self._agenda, tell=self._hear)
        self._episode: Episode | None = None

    def run(self, cell: Cell, number: int) -> Episode:
        self._episode = episode = Episode(cell, number, self._scheduler.left_ns)
        for victim in episode.victims:
            self._replica.submit(victim)
        self._agenda.run()
        assert episode.done, f"{cell}: the urgent requests came too late, or never"
        return episode

    def _hear(self, events: Iterable[Event | Refused]) -> None:
        episode = self._episode
        assert episode is not None
        for event in events:
            assert not isinstance(event, Refused), event
            if not isinstance(event, Token) or episode.done:
                continue
            for urgent in episode.heard(event.id, self._agenda.now_ns):
                self._replica.submit(urgent)
            if episode.done:
                for victim in episode.victims:
                    self._replica.abort(victim.id)


# -- in an engine ------------------------------------------------------------------------------------------------------


def live(engine: Engine, cell: Cell, mode: Mode) -> float:
    """Seconds. The scheduler knows the rate as an engine does, which measures it at its start."""
    rate = cell.mb_per_s * 1_000_000
    limits = replace(
        cell.limits(engine.limits), preemption=mode, copy_bytes_per_s=min(rate, engine.limits.copy_bytes_per_s)
    )
    return _LiveStage(engine, limits, rate, cell).run()


class _LiveStage:
    def __init__(self, engine: Engine, limits: Limits, copy_bytes_per_s: int, cell: Cell) -> None:
        engine.runner.forget_all()
        self._scheduler = Told(limits, hash_root=engine.runner.hash_root, cost=StepCost(engine.cost))
        self._episode = Episode(cell, 0, self._scheduler.left_ns)
        self._error: BaseException | None = None
        self._loop = StepLoop(
            self._scheduler,
            engine.runner,
            publish=self._on_turn,
            announce=lambda predicted_ns: None,
            failed=self._on_failure,
            copier=copier(engine, copy_bytes_per_s),
        )

    def run(self) -> float:
        self._loop.submit(SESSION, self._episode.victims)
        self._loop.run()
        if self._error is not None:
            raise self._error
        return self._episode.seconds()

    def _on_turn(self, turn: Turn) -> None:
        assert not turn.refused, turn.refused
        for update in turn.updates.get(SESSION, ()):
            for _ in update.tokens:
                if urgent := self._episode.heard(update.id, time.monotonic_ns()):
                    self._loop.submit(SESSION, urgent)
        if self._episode.done:
            self._loop.stop(0)

    def _on_failure(self, error: BaseException) -> None:
        self._error = error


def rows_of(found: dict[Cell, dict[Mode, float]]) -> list[tuple[Any, ...]]:
    """A row per cell: what both took, which was sooner, what the choice took, and by how much it was later."""
    rows = []
    for cell, seconds in found.items():
        better = "swap" if seconds["swap"] <= seconds["recompute"] else "recompute"
        rows.append((*cell, seconds["swap"], seconds["recompute"], better, seconds["auto"], loss(seconds)))
    return rows


def loss(seconds: dict[Mode, float]) -> float:
    """Of the choice, by the better of both: 1 is as good."""
    return seconds["auto"] / min(seconds["swap"], seconds["recompute"])
