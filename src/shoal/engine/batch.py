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
_INTEGERS = ("top_k", "seed", "choice")
_NO_IDS, _NO_VALUES = np.empty(0, np.int64), np.empty(0, np.float32)


@dataclass(slots=True, eq=False)
class Row:
    """What the host knows of one request."""

    id: str
    index: int  # in the tables
    num_prompt: int
    sampling: Sampling
    min_tokens: int
    bias: tuple[np.ndarray, np.ndarray]  # token ids, values
    stop_ids: np.ndarray
    steered: bool  # there is a bias, or stop tokens wait for min_tokens
    penalised: bool
    num_blocks: int = 0
    sampled_step: int = -1  # the last step that sampled for it


@dataclass(slots=True)
class Batch:
    num_tokens: int  # T
    tokens_T: Tensor
    spans: Spans  # one per slice
    sampled: list[Row]  # those that sample, in the order of slices
    last_rows_R: list[int]  # of T
    places_R: list[int]  # of the sampled ids in the table of tokens
    sampling: SamplingBatch | None  # where any samples


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
        self._hold_tokens(device.zeros((0, 1), torch.int64))
        self._sampled: list[Row] = []  # in the last step; mostly the same ones as in the next
        self._settings = self._settings_of([])

    def take_in(self, plan: StepPlan) -> list[int]:
        """Applies leaves, admits and new blocks, in this order. Returns the blocks that hold nothing of their owner;
        the others have what a prefix hit or a copy from the host tier brought."""
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
        return fresh

    def store_sampled(self, step: int, batch: Batch, tokens_R: Tensor) -> None:
        """Puts sampled ids at their positions, where the next step finds them."""
        for row in batch.sampled:
            row.sampled_step = step
        if self._cells is None:
            self._tokens.view(-1).index_copy_(0, self._device.tensor(np.array(batch.places_R, np.int64)), tokens_R)
            return
        for place, token in zip(batch.places_R, tokens_R.tolist(), strict=True):
            self._cells[place] = token

    def store_late(self, step: int, places: Sequence[tuple[Row, int]], tokens: Sequence[int]) -> None:
        """The same with ids that come from elsewhere after the step: rows and positions. A row that has left meanwhile
        has no use for them."""
        for (row, position), token in zip(places, tokens, strict=True):
            if self.rows.get(row.id) is row:
                self._tokens[row.index, position] = token
                row.sampled_step = step

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
            id=admit.id,
            index=self._free.pop(),
            num_prompt=admit.num_prompt,
            sampling=sampling,
            min_tokens=admit.min_tokens,
            bias=(np.array([t for t, _ in bias], np.int64), np.array([v for _, v in bias], np.float32)),
            stop_ids=np.array(stop_ids, np.int64),
            steered=bool(bias or (stop_ids and admit.min_tokens)),
            penalised=(sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1, 0, 0),
        )
        self.rows[admit.id] = row
        self._floats[:, row.index] = [getattr(sampling, name) for name in _FLOATS]
        seed = (sampling.seed + (1 << 63)) % (1 << 64) - (1 << 63)  # its low 64 bits, as a signed number
        self._integers[:, row.index] = (sampling.top_k, seed, admit.choice)
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

    def _hold_tokens(self, tokens: Tensor) -> None:
        self._tokens = tokens  # [row, position]
        self._cells = self._device.cells(tokens)

    def _widen_tokens(self, width: int) -> None:
        if width > self._tokens.shape[1]:
            wider = self._device.zeros((len(self._tokens), 2 * width), torch.int64)
            wider[:, : self._tokens.shape[1]] = self._tokens
            self._hold_tokens(wider)

    def _add_rows(self) -> None:
        old, new = len(self._blocks), max(16, 2 * len(self._blocks))
        self._free = list(range(new - 1, old - 1, -1))
        self._floats = np.pad(self._floats, ((0, 0), (0, new - old)))
        self._integers = np.pad(self._integers, ((0, 0), (0, new - old)))
        self._blocks = np.concatenate((self._blocks, np.zeros((new - old, self._blocks.shape[1]), np.int32)))
        more = self._device.zeros((new - old, self._tokens.shape[1]), torch.int64)
        self._hold_tokens(torch.cat((self._tokens, more)))

    # -- the step's tensors --------------------------------------------------------------------------------------------

    def build(self, plan: StepPlan) -> Batch:
        """The tensors of a plan that was taken in and has slices.

        In plain Python where it can be: after a model's weights went through the caches, each kind of array
        operation costs as much as this loop over the slices of a step."""
        width, size = self._tokens.shape[1], self._block_tokens
        indices: list[int] = []
        firsts: list[int] = []  # of T
        starts: list[int] = []
        counts: list[int] = []
        places: list[int] = []  # of all tokens of the step in the table of tokens
        sampled: list[Row] = []
        last_rows: list[int] = []
        ends: list[int] = []  # of those that sample
        sampled_places: list[int] = []
        num_blocks = 0  # most that a slice needs
        for id, start, count, _, from_step, sample in plan.slices:
            row, end = self.rows[id], start + count
            assert end <= row.num_blocks * size, f"{id} lacks blocks"
            assert from_step in (-1, row.sampled_step), f"{id} did not sample last in step {from_step}"
            indices.append(row.index)
            firsts.append(len(places))
            starts.append(start)
            counts.append(count)
            places += range(row.index * width + start, row.index * width + end)
            num_blocks = max(num_blocks, -(-end // size))
            if sample:
                sampled.append(row)
                last_rows.append(len(places) - 1)
                ends.append(end)
                sampled_places.append(row.index * width + end)
        first_S, start_S, count_S = np.array((firsts, starts, counts), np.int32)
        return Batch(
            num_tokens=len(places),
            tokens_T=self._tokens_at(places),
            spans=Spans(first_S, start_S, count_S, self._blocks[:, :num_blocks].take(np.array(indices, np.int64), 0)),
            sampled=sampled,
            last_rows_R=last_rows,
            places_R=sampled_places,
            sampling=self._sampling(sampled, np.array(ends, np.int64)) if sampled else None,
        )

    def _tokens_at(self, places_T: list[int]) -> Tensor:
        cells = self._cells
        if cells is None:
            return self._tokens.view(-1).index_select(0, self._device.tensor(np.array(places_T, np.int64)))
        return torch.from_numpy(np.array([cells[place] for place in places_T], np.int64))

    def _sampling(self, rows: list[Row], position_R: np.ndarray) -> SamplingBatch:
        if rows != self._sampled:
            self._sampled, self._settings = rows, self._settings_of(rows)
        batch = self._settings
        batch.position_R = position_R
        batch.bias, batch.banned = self._steering(rows, position_R)
        batch.history = self._history(rows, position_R)
        return batch

    def _settings_of(self, rows: list[Row]) -> SamplingBatch:
        """What stays the same from step to step."""
        index_R = np.array([row.index for row in rows], np.int64)
        temperature, top_p, min_p, repetition, presence, frequency = self._floats.take(index_R, 1)
        top_k, seed, choice = self._integers.take(index_R, 1)
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
            position_R=_NO_IDS,
            bias=(_NO_IDS, _NO_IDS, _NO_VALUES),
            banned=(_NO_IDS, _NO_IDS),
            history=None,
        )

    @staticmethod
    def _steering(
        rows: list[Row], position_R: np.ndarray
    ) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """`bias` and `banned` of a SamplingBatch."""
        steered = [place for place, row in enumerate(rows) if row.steered]
        if not steered:
            return (_NO_IDS, _NO_IDS, _NO_VALUES), (_NO_IDS, _NO_IDS)
        where_bias, ids_bias, values = [_NO_IDS], [_NO_IDS], [_NO_VALUES]
        where_banned, ids_banned = [_NO_IDS], [_NO_IDS]
        for place in steered:
            row = rows[place]
            where_bias.append(np.full(len(row.bias[0]), place))
            ids_bias.append(row.bias[0])
            values.append(row.bias[1])
            if position_R[place] - row.num_prompt < row.min_tokens:
                where_banned.append(np.full(len(row.stop_ids), place))
                ids_banned.append(row.stop_ids)
        bias = (np.concatenate(where_bias), np.concatenate(ids_bias), np.concatenate(values))
        return bias, (np.concatenate(where_banned), np.concatenate(ids_banned))

    def _history(self, rows: list[Row], length_R: np.ndarray) -> History | None:
        places = [place for place, row in enumerate(rows) if row.penalised]
        if not places:
            return None
        rows_P = np.array(places, np.int64)
        length_P = length_R[rows_P]
        index_P = np.array([rows[place].index for place in places], np.int64)
        num_prompt_P = np.array([rows[place].num_prompt for place in places], np.int64)
        tokens_PL = self._tokens.index_select(0, self._device.tensor(index_P))[:, : int(length_P.max())]
        return History(rows_P, tokens_PL, length_P, num_prompt_P)
