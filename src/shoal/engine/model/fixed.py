"""Attention with torch's operations for `batch_invariant`, where our kernels cannot be had.

Shape letters as in sdpa.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from shoal.engine.model.sdpa import Rows, Span, TorchAttention
from shoal.engine.model.spans import Spans


@dataclass(slots=True)
class _Tile:
    """So many positions of one sequence, from a multiple of their number on; some of them are rows of the step."""

    rows: slice  # of the step
    slots: slice  # theirs in the tile
    halves: Tensor  # KVStore.halves of the blocks up to the tile's end
    mask_11qL: Tensor  # q = G · positions


class FixedAttention(TorchAttention):
    """SdpaAttention for `batch_invariant`: a query's position alone decides the shape of the call that it is part of.

    Of several queries in a call each gets the numbers that it would get alone: its place in the tile is its position's.
    """

    POSITIONS = 16

    def prepare(self, spans: Spans) -> tuple[Rows, list[_Tile]]:
        columns = (spans.row_S.tolist(), spans.start_S.tolist(), spans.length_S.tolist(), spans.table_SB)
        tiles = []
        for span in map(Span, *columns):
            for first in range(span.start // self.POSITIONS * self.POSITIONS, span.start + span.length, self.POSITIONS):
                tiles.append(self._tile(span, first))
        return self.prepare_rows(spans), tiles

    def _tile(self, span: Span, first: int) -> _Tile:
        end = first + self.POSITIONS
        start, stop = max(span.start, first), min(span.start + span.length, end)
        size = self._store.block_tokens
        table_1b = np.full((1, -(-end // size)), span.table[0], np.int64)  # masked ones are its own, so nobody else's
        used = -(-(span.start + span.length) // size)
        table_1b[0, :used] = span.table[: min(used, table_1b.shape[1])]
        key_L = self._device.arange(table_1b.size * size)
        hidden_nL = key_L > self._device.arange(self.POSITIONS).unsqueeze(1) + first
        mask_nL = self._device.zeros(hidden_nL.shape).masked_fill_(hidden_nL, -torch.inf)
        return _Tile(
            rows=slice(start - span.start + span.row, stop - span.start + span.row),
            slots=slice(start - first, stop - first),
            halves=self._store.halves(self._device.tensor(table_1b)),
            mask_11qL=mask_nL.repeat(self._group_size, 1)[None, None],
        )

    def attend(self, layer: int, qkv_TP: Tensor, prepared: tuple[Rows, list[_Tile]]) -> Tensor:
        rows, tiles = prepared
        q_THD = self.enter(layer, qkv_TP, rows)
        n, K, G, D = self.POSITIONS, self._num_kv_heads, self._group_size, self._head_dim
        out_THD = torch.empty_like(q_THD)
        for tile in tiles:
            q_nHD = q_THD.new_zeros(n, K * G, D)
            q_nHD[tile.slots] = q_THD[tile.rows]
            k_1KLD, v_1KLD = self._store.read(layer, tile.halves, 1)
            q_1KqD = q_nHD.view(n, K, G, D).permute(1, 2, 0, 3).reshape(1, K, G * n, D)
            o_1KqD = scaled_dot_product_attention(q_1KqD, k_1KLD, v_1KLD, attn_mask=tile.mask_11qL)
            o_nHD = o_1KqD.view(K, G, n, D).permute(2, 0, 1, 3).reshape(n, K * G, D)
            out_THD[tile.rows] = o_nHD[tile.slots]
        return out_THD.flatten(1)
