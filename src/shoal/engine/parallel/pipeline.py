"""Pipeline parallel: the Runner of one rank whose stage has some of the layers.

    stage 0          embeds ─► its layers ─hidden states─► stage 1 ─► its layers ─► ... the last one samples
    rank 0 collects  ◄─────────────────────── result, by its socket ─────────────────────┘

Rank 0 goes on to the next plan as soon as it has sent its hidden states on; a plan has no token whose id is not known
yet (core/stages.py). What the last stage sampled, the others learn with the next plan that rank 0 tells them. Between
stages everything goes one way, and rank 0's socket is always read: nobody waits for one that waits for him.

Shape letters: T tokens of a step, E hidden size.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.core.plan import StepPlan, StepResult
from shoal.engine.batch import Batch, Row
from shoal.engine.parallel.messages import Result
from shoal.engine.parallel.runner import RankRunner, Sampled
from shoal.engine.runner import Launched


class StageRunner(RankRunner):
    """`reports`: on one rank of the last stage, rank 0 needs what it collects, and `step_ns`, what each stage computed
    for in that step. `stage_ns`: on rank 0, what each has computed for in all."""

    def __init__(self, *arguments: Any, hear: Callable[[], Result] | None = None, **settings: Any) -> None:
        """`hear`: rank 0's, waits for the next result."""
        super().__init__(*arguments, **settings)
        self._hear = hear
        self._pipe = self._comms.pp
        self._is_first = self._pipe.rank == 0
        self._is_last = self._pipe.rank == self._pipe.size - 1
        self.reports = self._is_last and self._comms.layer.rank == 0
        self.stage_ns = [0] * self._pipe.size
        self._step_ns = torch.zeros(self._pipe.size, dtype=torch.int64)
        self._due: deque[tuple[int, list[tuple[Row, int]]]] = deque()  # step, whose tokens at which positions
        self._results: Sampled = []  # that the others have not been told

    @property
    def step_ns(self) -> list[int]:
        found: list[int] = self._step_ns.tolist()
        return found

    def launch(self, plan: StepPlan) -> None:
        super().launch(plan)
        if plan.slices and not self._is_last:
            rows = self._table.rows
            self._due.append((plan.step, [(rows[p.id], p.start + p.count) for p in plan.slices if p.sample]))

    def take(self, sampled: Sampled) -> None:
        if self._is_last:
            return  # it is there
        for step, tokens in sampled:
            due, places = self._due.popleft()
            assert due == step
            self._table.store_late(step, places, tokens)

    def collect(self) -> StepResult:
        if self._hear is None or self._launched[0].start is None:
            result = super().collect()
            if self.reports:
                self._step_ns[self._pipe.rank] = result.busy_ns
                result.busy_ns = max(self.step_ns)
            return result
        launched = self._launched.popleft()
        heard = self._hear()
        result = heard.result
        assert result.step == launched.step
        result.latency_ns = time.perf_counter_ns() - launched.began_ns
        self.stage_ns = [all_ns + ns for all_ns, ns in zip(self.stage_ns, heard.stage_ns, strict=True)]
        self._results.append((result.step, result.tokens))
        self.take(self._results[-1:])
        return result

    def _untold(self) -> Sampled:
        results, self._results = self._results, []
        return results

    def _enter(self, batch: Batch, launched: Launched) -> Tensor:
        if self._is_first:
            return super()._enter(batch, launched)
        hidden_TE = self._device.empty((batch.num_tokens, self._model.config.hidden_size))
        self._pipe.receive(self._step_ns, self._pipe.rank - 1)
        self._pipe.receive(hidden_TE, self._pipe.rank - 1)
        launched.start = self._device.mark()
        return hidden_TE

    def _leave(self, plan: StepPlan, batch: Batch, hidden_TE: Tensor, launched: Launched) -> None:
        if self._is_last:
            super()._leave(plan, batch, hidden_TE, launched)
            return
        self._step_ns[self._pipe.rank] = self._device.elapsed_ns(launched.start, self._device.mark())
        self._pipe.send(self._step_ns, self._pipe.rank + 1)
        self._pipe.send(hidden_TE, self._pipe.rank + 1)
