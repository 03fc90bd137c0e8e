"""Pipeline parallel: the Runner of one rank whose stage has some of the layers.

    stage 0          embeds ─► its layers ─hidden states─► stage 1 ─► its layers ─► ... the last one samples
    rank 0 collects  ◄───────────────────────── result ─────────────────────────────────┘

Rank 0 goes on to the next plan as soon as it has sent its hidden states on; a plan has no token whose id is not known
yet (core/stages.py). What the last stage sampled, the others learn with the next plan that rank 0 tells them.

Shape letters: T tokens of a step, E hidden size.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from shoal.core.plan import StepPlan, StepResult
from shoal.engine.batch import Batch, Row
from shoal.engine.parallel.comm import CommError
from shoal.engine.parallel.layout import Layout
from shoal.engine.parallel.runner import RankRunner
from shoal.engine.runner import Launched

Sampled = list[tuple[int, list[int]]]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[StepResult, list[int]]).decode


def runner_of(layout: Layout) -> Callable[..., RankRunner]:
    return StageRunner if layout.pp > 1 else RankRunner


class StageRunner(RankRunner):
    """`stage_ns`: on rank 0, what each stage has computed for, so far."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._pipe = self._comms.pp
        self._is_first = self._pipe.rank == 0
        self._is_last = self._pipe.rank == self._pipe.size - 1
        self._reports = self._comms.layer.rank == 0  # of its stage, the one that speaks with rank 0
        self._due: deque[tuple[int, list[tuple[Row, int]]]] = deque()  # step, whose tokens at which positions
        self._returned: Sampled = []
        self._busy = torch.zeros(self._pipe.size, dtype=torch.int64)  # of the step, in nanoseconds by stage
        self.stage_ns = [0] * self._pipe.size

    def launch(self, plan: StepPlan) -> None:
        super().launch(plan)
        if plan.slices and not self._is_last:
            rows = self._table.rows
            self._due.append((plan.step, [(rows[p.id], p.start + p.count) for p in plan.slices if p.sample]))

    def take(self, sampled: Sampled) -> None:
        """What the last stage sampled comes to its place in the table, where it is still wanted."""
        if self._is_last:
            return
        for step, tokens in sampled:
            due, places = self._due.popleft()
            assert due == step
            self._table.store_late(step, places, tokens)

    def collect(self) -> StepResult:
        launched = self._launched[0]
        if launched.start is None or not self._reports or (not self._is_first and not self._is_last):
            return super().collect()
        if self._is_last:
            result = super().collect()
            self._send_result(result)
            return result
        self._launched.popleft()
        try:
            result, stage_ns = self._receive_result()
        except CommError as error:
            raise self._cause_of(error) from None
        assert result.step == launched.step
        result.latency_ns = time.perf_counter_ns() - launched.began_ns
        self.stage_ns = [all_ns + ns for all_ns, ns in zip(self.stage_ns, stage_ns, strict=True)]
        self._returned.append((result.step, result.tokens))
        self.take(self._returned[-1:])
        return result

    def _heard(self) -> Sampled:
        returned, self._returned = self._returned, []
        return returned

    def _enter(self, batch: Batch, launched: Launched) -> Tensor:
        if self._is_first:
            return super()._enter(batch, launched)
        hidden_TE = self._device.empty((batch.num_tokens, self._model.config.hidden_size))
        self._pipe.receive(self._busy, self._pipe.rank - 1)
        self._pipe.receive(hidden_TE, self._pipe.rank - 1)
        launched.start = self._device.mark()
        return hidden_TE

    def _leave(self, plan: StepPlan, batch: Batch, hidden_TE: Tensor, launched: Launched) -> None:
        if self._is_last:
            super()._leave(plan, batch, hidden_TE, launched)
            return
        self._busy[self._pipe.rank] = self._device.elapsed_ns(launched.start, self._device.mark())
        self._pipe.send(self._busy, self._pipe.rank + 1)
        self._pipe.send(hidden_TE, self._pipe.rank + 1)

    def _send_result(self, result: StepResult) -> None:
        self._busy[self._pipe.rank] = result.busy_ns
        stage_ns: list[int] = self._busy.tolist()
        result.busy_ns = max(stage_ns)
        data = torch.frombuffer(bytearray(_encode((result, stage_ns))), dtype=torch.uint8)
        self._pipe.send(torch.tensor([len(data)]), 0)
        self._pipe.send(data, 0)

    def _receive_result(self) -> tuple[StepResult, list[int]]:
        last = self._pipe.size - 1
        num_bytes = int(self._pipe.receive(torch.empty(1, dtype=torch.int64), last))
        data = self._pipe.receive(torch.empty(num_bytes, dtype=torch.uint8), last)
        return _decode(data.numpy().data)
