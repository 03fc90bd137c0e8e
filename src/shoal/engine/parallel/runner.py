"""The Runner of one rank among several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from shoal.core.plan import StepPlan
from shoal.engine.batch import Batch
from shoal.engine.model.attention import Attention
from shoal.engine.model.spans import Shard
from shoal.engine.parallel.comm import CommError, Comms
from shoal.engine.parallel.context import ContextAttention
from shoal.engine.parallel.messages import Clear, Step
from shoal.engine.runner import Runner

Tell = Callable[[Step | Clear], None]
Sampled = list[tuple[int, list[int]]]  # by step, in the order of its slices


class RankRunner(Runner):
    """Every rank computes each step; rank 0's tells the others of it. All prove that it is the same."""

    def __init__(
        self,
        *arguments: Any,
        comms: Comms,
        tell: Tell | None = None,
        cause_of: Callable[[CommError], Exception] = lambda error: error,
        **settings: Any,
    ) -> None:
        """`tell` and `cause_of` are rank 0's; the latter is called where a step failed by others, and knows why."""
        self._comms = comms  # first: the parts of a runner are made with it
        super().__init__(*arguments, **settings)
        self._tell = tell
        self._cause_of = cause_of
        self._num_steps = 0

    @property
    def moved_bytes(self) -> int:
        """What this rank gave to others, so far."""
        return self._comms.moved_bytes

    def launch(self, plan: StepPlan) -> None:
        if self._tell is not None:
            self._num_steps += 1
            self._tell(Step(self._num_steps, replace(plan, ops=[], fetches=[]), self._untold()))
        try:
            super().launch(plan)
        except CommError as error:
            raise self._cause_of(error) from None

    def take(self, sampled: Sampled) -> None:
        """What a Step says beside its plan; before that is launched."""
        assert not sampled

    def _untold(self) -> Sampled:
        """What the next Step is to say beside its plan."""
        return []

    def clear(self, blocks: list[int]) -> None:
        if self._tell is not None:
            self._tell(Clear(blocks))
        super().clear(blocks)

    def _make_attention(self, shard: Shard) -> Attention:
        own = super()._make_attention(shard)
        if shard.count == 1:
            return own
        return ContextAttention(own, self._comms.cp, config=self._model.config, device=self._device)  # type: ignore[arg-type]

    def _build(self, plan: StepPlan) -> Batch:
        batch = super()._build(plan)
        self._comms.begin(_digest(batch))
        return batch


def _digest(batch: Batch) -> int:
    """64 bits: positions, blocks and places of a step's tokens, and on a CPU the tokens, sampled ones included."""
    digest = xxhash.xxh3_64()
    for array in batch.spans:
        digest.update(array.data)
    digest.update(np.array(batch.places_R, np.int64).data)
    if not batch.tokens_T.is_cuda:
        digest.update(batch.tokens_T.numpy().data)
    return digest.intdigest()
