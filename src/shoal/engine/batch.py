"""A StepPlan becomes tensors. Keeps, for each live request, one row: its tokens, block table and sampling settings.

Token ids live on the device. A sampled id is stored there at its position as soon as it exists, so the next step reads
it whether or not the host has seen it (`Slice.from_step`), and penalties and prompt scores read the same table.

Shape letters: T tokens of the step, R requests that sample in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.core.plan import Admit, StepPlan
from shoal.core.request import Sampling
from shoal.engine.device import Device
from shoal.engine.model.spans import Spans
from shoal.engine.sample import History, SamplingBatch

# Columns of the table: attributes of Sampling, then the table's own. Their order is that of the matrices' first axis.
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_INTEGERS = ("top_k", "seed", "choice", "num_prompt")
_NO_IDS, _NO_VALUES = np.empty(0, np.int64), np.empty(0, np.float32)


@dataclass(slots=True)
class Row:
    """What the host knows of one request."""

    index: int  # in the tables
    num_prompt: int
    sampling: Sampling
    min_tokens: int
    bias: tuple[np.ndarray, np.ndarray]  # token ids, values
    stop_ids: np.ndarray
    steered: bool  # some logits have to be changed: there is a bias, or stop tokens wait for min_tokens
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
    sampled: list[int]  # indices of the slices that sample
    last_row_R: Tensor | None = None  # their last rows of T
    sampling: SamplingBatch | None = None
    place_R: Tensor | None = None  # of the sampled ids in the table of tokens


class RequestTable:
    def __init__(self, device: Device, block_tokens: int, vocab_size: int) -> None:
        self.rows: dict[str, Row] = {}
        self._device = device
        self._block_tokens = block_tokens
        self._vocab_size = vocab_size
        self._free: list[int] = []
        self._floats = np.zeros((len(_FLOATS), 0), np.float32)
        self._integers = np.zeros((len(_INTEGERS), 0), np.int64)
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
            if piece.blocks:
                self._append_blocks(self.rows[piece.id], piece.blocks)
                fresh += piece.blocks
        return self._batch(plan, np.array(fresh, np.int64))

    def store_sampled(self, plan: StepPlan, batch: Batch, tokens_R: Tensor) -> None:
        """Puts sampled ids at their positions, where the next step finds them."""
        assert batch.place_R is not None
        for index in batch.sampled:
            self.rows[plan.slices[index].id].sampled_step = plan.step
        self._tokens.view(-1).index_copy_(0, batch.place_R, tokens_R)

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
            steered=bool(bias or (stop_ids and admit.min_tokens)),
        )
        self.rows[admit.id] = row
        self._floats[:, row.index] = [getattr(sampling, name) for name in _FLOATS]
        seed = (sampling.seed + (1 << 63)) % (1 << 64) - (1 << 63)  # its low 64 bits, as a signed number
        self._integers[:, row.index] = (sampling.top_k, seed, admit.choice, admit.num_prompt)
        self._append_blocks(row, admit.blocks)
        self._widen_tokens(len(admit.tokens))
        self._tokens[row.index, : len(admit.tokens)] = self._device.tensor(np.array(admit.tokens, np.int64))

    def _append_blocks(self, row: Row, blocks: Sequence[int]) -> None:
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
        self._floats = np.pad(self._floats, ((0, 0), (0, new - old)))
        self._integers = np.pad(self._integers, ((0, 0), (0, new - old)))
        self._blocks = np.concatenate((self._blocks, np.zeros((new - old, self._blocks.shape[1]), np.int32)))
        more = self._device.zeros((new - old, self._tokens.shape[1]), torch.int64)
        self._tokens = torch.cat((self._tokens, more))

    # -- the step's tensors --------------------------------------------------------------------------------------------

    def _batch(self, plan: StepPlan, fresh: np.ndarray) -> Batch:
        rows = [self.rows[piece.id] for piece in plan.slices]
        self._check(plan, rows)
        index = np.array([row.index for row in rows], np.int64)
        start = np.array([piece.start for piece in plan.slices], np.int64)
        count = np.array([piece.count for piece in plan.slices], np.int64)
        end, after = start + count, np.cumsum(count)  # of each slice: in its request, and among the rows of the step
        first = after - count
        row_T = np.repeat(index, count)
        position_T = np.arange(len(row_T)) + np.repeat(start - first, count)
        block_T, offset_T = np.divmod(position_T, self._block_tokens)
        num_blocks = -(-int(end.max(initial=0)) // self._block_tokens)  # most that a slice needs
        to, width = self._device.tensor, self._tokens.shape[1]
        batch = Batch(
            tokens_T=self._tokens.view(-1).index_select(0, to(row_T * width + position_T)),
            positions_T=to(position_T),
            block_T=to(self._blocks[row_T, block_T].astype(np.int64)),
            offset_T=to(offset_T),
            fresh_blocks=to(fresh),
            spans=Spans(
                first.astype(np.int32),
                start.astype(np.int32),
                count.astype(np.int32),
                self._blocks[:, :num_blocks].take(index, 0),
            ),
            sampled=[i for i, piece in enumerate(plan.slices) if piece.sample],
        )
        if batch.sampled:
            where = np.array(batch.sampled, np.int64)
            index_R, position_R = index[where], end[where]
            batch.last_row_R = to(after[where] - 1)
            batch.place_R = to(index_R * width + position_R)
            batch.sampling = self._sampling([rows[i] for i in batch.sampled], index_R, position_R)
        return batch

    def _check(self, plan: StepPlan, rows: list[Row]) -> None:
        size = self._block_tokens
        for piece, row in zip(plan.slices, rows, strict=True):
            id, start, count, _, from_step, _ = piece
            assert start + count <= row.num_blocks * size, f"{id} lacks blocks"
            assert from_step in (-1, row.sampled_step), f"{id} did not sample last in step {from_step}"

    def _sampling(self, rows: list[Row], index_R: np.ndarray, position_R: np.ndarray) -> SamplingBatch:
        temperature, top_p, min_p, repetition, presence, frequency = self._floats.take(index_R, 1)
        top_k, seed, choice, num_prompt = self._integers.take(index_R, 1)
        bias, banned = self._steering(rows, position_R)
        penalised = (repetition != 1) | (presence != 0) | (frequency != 0)
        return SamplingBatch(
            temperature_R=temperature,
            top_p_R=top_p,
            top_k_R=top_k,
            min_p_R=min_p,
            repetition_R=repetition,
            presence_R=presence,
            frequency_R=frequency,
            seed_R=seed,
            choice_R=choice,
            position_R=position_R,
            bias=bias,
            banned=banned,
            history=self._history(penalised, index_R, position_R, num_prompt) if penalised.any() else None,
        )

    @staticmethod
    def _steering(
        rows: list[Row], position_R: np.ndarray
    ) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """`bias` and `banned` of a SamplingBatch."""
        where_bias, ids_bias, values = [_NO_IDS], [_NO_IDS], [_NO_VALUES]
        where_banned, ids_banned = [_NO_IDS], [_NO_IDS]
        for place, row in enumerate(rows):
            if not row.steered:
                continue
            where_bias.append(np.full(len(row.bias[0]), place))
            ids_bias.append(row.bias[0])
            values.append(row.bias[1])
            if position_R[place] - row.num_prompt < row.min_tokens:
                where_banned.append(np.full(len(row.stop_ids), place))
                ids_banned.append(row.stop_ids)
        bias = (np.concatenate(where_bias), np.concatenate(ids_bias), np.concatenate(values))
        return bias, (np.concatenate(where_banned), np.concatenate(ids_banned))

    def _history(
        self, penalised_R: np.ndarray, index_R: np.ndarray, length_R: np.ndarray, num_prompt_R: np.ndarray
    ) -> History:
        rows_P = np.flatnonzero(penalised_R)
        longest = int(length_R[rows_P].max())
        tokens_PL = self._tokens.index_select(0, self._device.tensor(index_R[rows_P]))[:, :longest]
        return History(rows_P, tokens_PL, length_R[rows_P], num_prompt_R[rows_P])
