"""A real engine in the bench's own process: model, runner, scheduler and step loop; no sockets, no text.

It is built as an engine process builds it (`shoal.engine.main:build`), on the thread that runs the steps.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from shoal import models
from shoal.core.classes import DEFAULT_CLASSES, ServiceClass
from shoal.core.limits import Limits
from shoal.core.plan import Slice, StepPlan, StepResult
from shoal.core.request import Finish, RequestSpec, Sampling
from shoal.core.scheduler import Scheduler
from shoal.core.stepcost import StepCost
from shoal.engine import main
from shoal.engine.config import EngineConfig
from shoal.engine.loop import StepLoop, Turn
from shoal.engine.process import calm_collector
from shoal.workload.trace import Row, Trace

SESSION = 1
GREEDY = Sampling(temperature=0)


def equal_classes() -> dict[str, ServiceClass]:
    """The names of the default ones, with no difference between them and nothing promised."""
    return {name: ServiceClass(rank=0, max_wait_s=1e6, max_queue=1 << 20) for name in DEFAULT_CLASSES}


class Step(NamedTuple):
    slices: list[Slice]
    busy_ns: int


@dataclass(slots=True)
class Run:
    """What came of one load."""

    seconds: float = 0.0  # from the first submit to the last ending
    num_tokens: int = 0  # sampled
    steps: list[Step] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


class Engine:
    """The default model, or one in a folder, loaded and warmed up; `options` are fields of EngineConfig. For one
    thread. Where it has several ranks, `close` it."""

    def __init__(self, folder: Path | None = None, **options: Any) -> None:
        self.folder = folder or models.pull(models.DEFAULT)
        parts = main.build(self.folder, EngineConfig(**options), models.DEFAULT)
        assert isinstance(parts.scheduler, Scheduler)  # no journal was asked for
        self.runner: Any = parts.runner
        self.limits = parts.scheduler.limits
        self.cost = parts.scheduler.cost.coefficients  # of the warm-up
        self.close = parts.closing
        calm_collector()

    def scheduler(self, limits: Limits) -> Scheduler:
        """A new one, which knows of costs what the warm-up told; the runner forgets what another one left."""
        self.runner.forget_all()
        return Scheduler(limits, hash_root=self.runner.hash_root, cost=StepCost(self.cost))

    def serve(
        self, load: Trace, *, seed: int, on_turn: Callable[[Turn], None] = lambda turn: None, **limits: Any
    ) -> Run:
        """The whole closed load through the engine's step loop: random prompts, greedy, every answer at full length."""
        assert load.concurrency is not None
        limits = {"prefix_caching": False, "classes": equal_classes()} | limits
        return _Caller(self, load, dataclasses.replace(self.limits, **limits), seed, on_turn).run()


class _Caller:
    """Sends a request whenever fewer than `concurrency` are open, from the step thread, so that no turn misses it."""

    def __init__(self, engine: Engine, load: Trace, limits: Limits, seed: int, on_turn: Callable[[Turn], None]) -> None:
        self._chance = Random(f"{seed}/tokens")
        self._vocab_size = engine.runner.vocab_size
        self._specs = [self._spec(number, row) for number, row in enumerate(load.rows)][::-1]
        self._tell = on_turn
        self._num_first = load.concurrency or 0
        self._num_open = 0
        self._result = Run()
        self._error: BaseException | None = None
        self._loop = StepLoop(
            engine.scheduler(limits),
            Watched(engine.runner, self._result.steps.append),
            publish=self._on_turn,
            announce=lambda predicted_ns: None,
            failed=self._on_failure,
        )

    def run(self) -> Run:
        began = time.perf_counter()
        self._send(self._num_first)
        self._loop.run()
        self._result.seconds = time.perf_counter() - began
        if self._error is not None:
            raise self._error
        return self._result

    def _spec(self, number: int, row: Row) -> RequestSpec:
        prompt = tuple(self._chance.choices(range(self._vocab_size), k=row.prompt_tokens))
        return RequestSpec(id=f"{number:06d}.0", prompt=prompt, max_tokens=row.output_tokens, sampling=GREEDY)

    def _send(self, count: int) -> None:
        specs = [self._specs.pop() for _ in range(min(count, len(self._specs)))]
        self._num_open += len(specs)
        if specs:
            self._loop.submit(SESSION, specs)

    def _on_turn(self, turn: Turn) -> None:
        self._tell(turn)
        assert not turn.refused, turn.refused
        num_ended = 0
        for update in turn.updates.get(SESSION, ()):
            self._result.num_tokens += len(update.tokens)
            if update.ending is not None:
                assert update.ending.reason is Finish.LENGTH, update.ending
                num_ended += 1
        self._num_open -= num_ended
        self._send(num_ended)
        if not self._num_open:
            self._loop.stop(0)

    def _on_failure(self, error: BaseException) -> None:
        self._error = error


class Watched:
    """A runner that tells of each step that returned."""

    def __init__(self, runner: Any, tell: Callable[[Step], None]) -> None:
        self._runner = runner
        self._tell = tell
        self._plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        self._runner.launch(plan)

    def collect(self) -> StepResult:
        result = self._runner.collect()
        self._tell(Step(self._plans.pop(0).slices, result.busy_ns))
        return result
