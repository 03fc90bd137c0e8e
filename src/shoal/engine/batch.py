"""A StepPlan becomes tensors. Keeps, for each live request, one row: its tokens, block table and sampling settings.

Token ids live on the device. A sampled id is stored there at its position as soon as it exists, so the next step reads
it whether or not the host has seen it (`Slice.from_step`), and penalties and prompt scores read the same table.

Shape letters: T tokens of the step, R requests that sample in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from shoal.core.plan import Admit, StepPlan
from shoal.core.request import Sampling
from shoal.engine.device import Device
from shoal.engine.model.attention import Spans
from shoal.engine.sample import History, SamplingBatch

_SETTINGS = {  # fields of Sampling that are columns of the table
    "temperature": np.float32,
    "top_p": np.float32,
    "top_k": np.int64,
    "min_p": np.float32,
    "repetition_penalty": np.float32,
    "presence_penalty": np.float32,
    "frequency_penalty": np.float32,
}
_NOTHING = np.empty(0, np.int64)


@dataclass(slots=True)
class Row:
    """What the host knows of one request."""

    index: int  # in the tables
    num_prompt: int
    sampling: Sampling
    min_tokens: int
    bias: tuple[np.ndarray, np.ndarray]  # token ids, values
    stop_ids: np.ndarray
    num_blocks: int = 0
    sampled_step: int = -1  # the last step that sampled for it


@dataclass(slots=True)
class Batch:
    tokens_T: Tensor
    positions_T: Tensor
    block_T: Tensor  # where each token's key and value go: block,
    offset_T: Tensor  # and place in the block
    fresh_blocks: Tensor  # entered a table in this step
    spans: Spans  # one per slice
    sampled: list[int] = field(default_factory=list)  # indices of the slices that sample
    last_row_R: Tensor | None = None  # their last rows of T
    sampling: SamplingBatch | None = None


class RequestTable:
    def __init__(self, device: Device, block_tokens: int, vocab_size: int) -> None:
        self.rows: dict[str, Row] = {}
        self._device = device
        self._block_tokens = block_tokens
        self._vocab_size = vocab_size
        self._free: list[int] = []
        self._columns = {name: np.zeros(0, kind) for name, kind in _SETTINGS.items()}
        self._columns |= {name: np.zeros(0, np.int64) for name in ("seed", "choice", "num_prompt")}
        self._blocks = np.zeros((0, 1), np.int32)  # [row, block of the table]; 0 beyond a table's end
        self._tokens = device.zeros((0, 1), torch.int64)  # [row, position]

    def build(self, plan: StepPlan) -> Batch:
        """Applies leaves, admits and new blocks, in this order; then the step's tensors."""
        for request in plan.leaves:
            self._leave(request)
        fresh: list[int] = []
        for admit in plan.admits:
            self._admit(admit)
            fresh += admit.blocks[-(-admit.computed // self._block_tokens) :]
        for piece in plan.slices:
            self._append_blocks(self.rows[piece.id], piece.blocks)
            fresh += piece.blocks
        return self._batch(plan, np.array(fresh, np.int64))

    def store_sampled(self, plan: StepPlan, batch: Batch, tokens_R: Tensor) -> None:
        """Puts sampled ids at their positions, where the next step finds them."""
        assert batch.sampling is not None
        rows = [self.rows[plan.slices[index].id] for index in batch.sampled]
        for row in rows:
            row.sampled_step = plan.step
        where = (self._device.tensor(_indices(rows)), self._device.tensor(batch.sampling.position_R))
        self._tokens.index_put_(where, tokens_R)

    def tokens(self, request: str, start: int, end: int) -> Tensor:
        return self._tokens[self.rows[request].index, start:end]

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _leave(self, request: str) -> None:
        row = self.rows.pop(request)
        self._blocks[row.index, : row.num_blocks] = 0
        self._free.append(row.index)

    def _admit(self, admit: Admit) -> None:
        assert admit.id not in self.rows, f"{admit.id} is admitted twice"
        if not self._free:
            self._add_rows()
        sampling = admit.sampling
        # An id outside the vocabulary cannot be sampled: banning or favouring it changes nothing.
        bias = [(token, value) for token, value in sampling.logit_bias if 0 <= token < self._vocab_size]
        stop_ids = [token for token in admit.stop_token_ids if 0 <= token < self._vocab_size]
        row = Row(
            index=self._free.pop(),
            num_prompt=admit.num_prompt,
            sampling=sampling,
            min_tokens=admit.min_tokens,
            bias=(np.array([t for t, _ in bias], np.int64), np.array([v for _, v in bias], np.float32)),
            stop_ids=np.array(stop_ids, np.int64),
        )
        self.rows[admit.id] = row
        for name in _SETTINGS:
            self._columns[name][row.index] = getattr(sampling, name)
        self._columns["seed"][row.index] = np.uint64(sampling.seed & (1 << 64) - 1).astype(np.int64)
        self._columns["choice"][row.index] = admit.choice
        self._columns["num_prompt"][row.index] = admit.num_prompt
        self._append_blocks(row, admit.blocks)
        self._widen_tokens(len(admit.tokens))
        self._tokens[row.index, : len(admit.tokens)] = self._device.tensor(np.array(admit.tokens, np.int64))

    def _append_blocks(self, row: Row, blocks: Sequence[int]) -> None:
        if not blocks:
            return
        end = row.num_blocks + len(blocks)
        if end > self._blocks.shape[1]:
            wider = np.zeros((len(self._blocks), 2 * end), np.int32)
            wider[:, : self._blocks.shape[1]] = self._blocks
            self._blocks = wider
        self._blocks[row.index, row.num_blocks : end] = blocks
        row.num_blocks = end
        self._widen_tokens(end * self._block_tokens + 1)  # and the token sampled after the last block's last

    def _widen_tokens(self, width: int) -> None:
        if width > self._tokens.shape[1]:
            wider = self._device.zeros((len(self._tokens), 2 * width), torch.int64)
            wider[:, : self._tokens.shape[1]] = self._tokens
            self._tokens = wider

    def _add_rows(self) -> None:
        old, new = len(self._blocks), max(16, 2 * len(self._blocks))
        self._free = list(range(new - 1, old - 1, -1))
        self._columns = {name: np.resize(column, new) for name, column in self._columns.items()}
        self._blocks = np.concatenate((self._blocks, np.zeros((new - old, self._blocks.shape[1]), np.int32)))
        more = self._device.zeros((new - old, self._tokens.shape[1]), torch.int64)
        self._tokens = torch.cat((self._tokens, more))

    # -- the step's tensors --------------------------------------------------------------------------------------------

    def _batch(self, plan: StepPlan, fresh: np.ndarray) -> Batch:
        rows = [self.rows[piece.id] for piece in plan.slices]
        self._check(plan, rows)
        index = _indices(rows)
        start = np.array([piece.start for piece in plan.slices], np.int64)
        count = np.array([piece.count for piece in plan.slices], np.int64)
        first = np.cumsum(count) - count  # first row of each slice
        num_blocks = -(-int((start + count).max(initial=0)) // self._block_tokens)  # most that a slice needs
        table_SB = self._blocks[:, :num_blocks][index]
        row_T = np.repeat(index, count)
        position_T = np.arange(count.sum()) - np.repeat(first - start, count)
        to = self._device.tensor
        batch = Batch(
            tokens_T=self._tokens[to(row_T), to(position_T)],
            positions_T=to(position_T),
            block_T=to(self._blocks[row_T, position_T // self._block_tokens].astype(np.int64)),
            offset_T=to(position_T % self._block_tokens),
            fresh_blocks=to(fresh),
            spans=Spans(first.astype(np.int32), start.astype(np.int32), count.astype(np.int32), table_SB),
        )
        batch.sampled = [i for i, piece in enumerate(plan.slices) if piece.sample]
        if batch.sampled:
            batch.last_row_R = to((first + count - 1)[batch.sampled])
            batch.sampling = self._sampling([rows[i] for i in batch.sampled], (start + count)[batch.sampled])
        return batch

    def _check(self, plan: StepPlan, rows: list[Row]) -> None:
        for piece, row in zip(plan.slices, rows, strict=True):
            assert piece.start + piece.count <= row.num_blocks * self._block_tokens, f"{piece.id} lacks blocks"
            assert piece.from_step in (-1, row.sampled_step), (
                f"{piece.id} did not sample last in step {piece.from_step}"
            )

    def _sampling(self, rows: list[Row], position_R: np.ndarray) -> SamplingBatch:
        index = _indices(rows)
        column = {name: values[index] for name, values in self._columns.items()}
        bias_rows = [np.full(len(row.bias[0]), i) for i, row in enumerate(rows)]
        too_short = [i for i, row in enumerate(rows) if position_R[i] - row.num_prompt < row.min_tokens]
        return SamplingBatch(
            temperature_R=column["temperature"],
            top_p_R=column["top_p"],
            top_k_R=column["top_k"],
            min_p_R=column["min_p"],
            repetition_R=column["repetition_penalty"],
            presence_R=column["presence_penalty"],
            frequency_R=column["frequency_penalty"],
            seed_R=column["seed"],
            choice_R=column["choice"],
            position_R=position_R,
            bias=(
                np.concatenate(bias_rows),
                np.concatenate([row.bias[0] for row in rows]),
                np.concatenate([row.bias[1] for row in rows]),
            ),
            banned=(
                np.concatenate([_NOTHING, *(np.full(len(rows[i].stop_ids), i) for i in too_short)]),
                np.concatenate([_NOTHING, *(rows[i].stop_ids for i in too_short)]),
            ),
            history=self._history(index, column, position_R),
        )

    def _history(self, index: np.ndarray, column: dict[str, np.ndarray], length_R: np.ndarray) -> History | None:
        penalised = column["repetition_penalty"] != 1
        penalised |= (column["presence_penalty"] != 0) | (column["frequency_penalty"] != 0)
        if not penalised.any():
            return None
        rows_P = np.flatnonzero(penalised)
        longest = int(length_R[rows_P].max())
        tokens_PL = self._tokens.index_select(0, self._device.tensor(index[rows_P]))[:, :longest]
        return History(rows_P, tokens_PL, length_R[rows_P], column["num_prompt"][rows_P])


def _indices(rows: Sequence[Row]) -> np.ndarray:
    return np.array([row.index for row in rows], np.int64)
