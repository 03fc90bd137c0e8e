"""Attention with torch's operations, on every device: gathers, pads, and computes what it then masks.

Shape letters: T tokens of a step, P values of a row of queries, keys and values, H query heads, K key/value heads,
G = H / K, D head size, h = D / 2, S spans of a group, n queries of a span, b blocks of a table, L = b · block_tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from shoal.engine.device import Device
from shoal.engine.kvstore import KVStore
from shoal.engine.model.config import ModelConfig
from shoal.engine.model.rope import Angles, rotate
from shoal.engine.model.spans import WHOLE, Shard, Spans

MAX_QUERIES = 512  # longer spans are cut: bounds the mask, and early queries skip late keys
MIN_BLOCKS = 16  # tables up to this length share a group


class Span(NamedTuple):
    """One of the Spans, or a piece of it."""

    row: int
    start: int
    length: int
    table: np.ndarray


@dataclass(slots=True)
class _Group:
    """Spans of similar size, padded to one shape."""

    rows_Sn: Tensor | None  # rows of the step; None: all rows in order, nothing padded
    taken: Tensor  # which of the S · n are not padding
    taken_rows: Tensor  # where those go
    halves: Tensor  # KVStore.halves of the block tables
    mask_S1qL: Tensor  # 0 or -inf; q = G · n
    num_spans: int
    num_queries: int


class Rows(NamedTuple):
    """What becomes of the rows of a step before they attend."""

    where_2t: Tensor  # places in the store of the new keys and values that belong here
    cos_T1D: Tensor
    sin_T1D: Tensor
    here_t: Tensor | None  # whose keys and values these are; None: all rows'


class TorchAttention:
    """What comes before attending: norms, rotation, keys and values into the store."""

    kv_format = "block-kv-token-head"
    reads_stale_values = True

    def __init__(
        self,
        config: ModelConfig,
        device: Device,
        store: KVStore,
        norms: Sequence[tuple[Tensor | None, Tensor | None]],
        shard: Shard = WHOLE,
    ) -> None:
        self._device = device
        self._shard = shard
        self._store = store
        self._norms = norms
        self._norm_eps = config.norm_eps
        self._angles = Angles(config.rope, config.head_dim, device)
        self._num_kv_heads = config.num_kv_heads
        self._group_size = config.num_heads // config.num_kv_heads
        self._head_dim = config.head_dim

    def prepare_rows(self, spans: Spans) -> Rows:
        span_T = np.repeat(np.arange(len(spans.row_S)), spans.length_S)
        position_T = np.arange(len(span_T)) + (spans.start_S - spans.row_S)[span_T]
        here_t = None
        if self._shard.count > 1:
            here_t = np.flatnonzero(position_T % self._shard.count == self._shard.index)
        span_t, place_t = (span_T, position_T) if here_t is None else (span_T[here_t], position_T[here_t])
        block_t, offset_t = np.divmod(self._shard.here(place_t), self._store.block_tokens)
        to = self._device.tensor
        angles_PD = self._angles.table(int((spans.start_S + spans.length_S).max()))
        cos_Th, sin_Th = angles_PD.index_select(0, to(position_T)).to(self._device.dtype).chunk(2, dim=1)
        return Rows(
            where_2t=self._store.where(to(spans.table_SB[span_t, block_t].astype(np.int64)), to(offset_t)),
            cos_T1D=torch.cat((cos_Th, cos_Th), dim=1).unsqueeze(1),
            sin_T1D=torch.cat((sin_Th, sin_Th), dim=1).unsqueeze(1),
            here_t=None if here_t is None else to(here_t),
        )

    def enter(self, layer: int, qkv_TP: Tensor, rows: Rows) -> Tensor:
        """Returns the queries, [T, H, D]."""
        K, G = self._num_kv_heads, self._group_size
        q_THD, k_TKD, v_TKD = qkv_TP.view(len(qkv_TP), -1, self._head_dim).split((K * G, K, K), dim=1)
        q_norm_D, k_norm_D = self._norms[layer]
        k_TKD = self._turn(k_TKD, k_norm_D, rows)
        if rows.here_t is not None:
            k_TKD, v_TKD = k_TKD.index_select(0, rows.here_t), v_TKD.index_select(0, rows.here_t)
        self._store.write(layer, rows.where_2t, k_TKD, v_TKD)
        return self._turn(q_THD, q_norm_D, rows)

    def _turn(self, x_TxD: Tensor, norm_D: Tensor | None, rows: Rows) -> Tensor:
        if norm_D is not None:
            x_TxD = rms_norm(x_TxD, norm_D.shape, norm_D, self._norm_eps)
        return rotate(x_TxD, rows.cos_T1D, rows.sin_T1D)


class SdpaAttention(TorchAttention):
    """Gathers each span's blocks and calls torch's fused attention, query heads folded into the query length."""

    def prepare(self, spans: Spans) -> tuple[Rows, list[_Group]]:
        num_rows = int(spans.length_S.sum())
        classes: dict[tuple[int, int], list[Span]] = {}
        for span in _cut(spans):
            classes.setdefault(self._shape_class(span), []).append(span)
        groups = [self._group(members, num_rows) for _, members in sorted(classes.items())]
        return self.prepare_rows(spans), groups

    def _num_blocks(self, span: Span) -> int:
        """At least one."""
        return max(1, -(-self._shard.here(span.start + span.length) // self._store.block_tokens))

    def _shape_class(self, span: Span) -> tuple[int, int]:
        """Powers of two: at most half of a padded axis is padding."""
        return (span.length - 1).bit_length(), (max(self._num_blocks(span), MIN_BLOCKS) - 1).bit_length()

    def _group(self, spans: list[Span], num_rows: int) -> _Group:
        num_blocks = max(self._num_blocks(span) for span in spans)
        num_queries = max(span.length for span in spans)
        tables_Sb = np.empty((len(spans), num_blocks), np.int64)
        for index, span in enumerate(spans):
            used = span.table[: self._num_blocks(span)]
            tables_Sb[index, : len(used)] = used
            tables_Sb[index, len(used) :] = used[0]  # masked; its own, so that no request can spoil another's numbers
        first_S1 = np.array([[span.row] for span in spans])
        length_S1 = np.array([[span.length] for span in spans])
        start_S1 = np.array([[span.start] for span in spans])
        query_n = np.arange(num_queries)
        real_Sn = query_n < length_S1
        rows_Sn = first_S1 + np.minimum(query_n, length_S1 - 1)
        taken = np.flatnonzero(real_Sn)
        taken_rows = rows_Sn.reshape(-1)[taken]
        in_order = len(taken) == num_rows == real_Sn.size and bool((np.diff(taken_rows) == 1).all())
        to = self._device.tensor
        last_key_Sn = to(self._shard.here(start_S1 + np.minimum(query_n, length_S1 - 1) + 1) - 1)  # -1: none
        hidden_SnL = self._device.arange(num_blocks * self._store.block_tokens) > last_key_Sn.unsqueeze(-1)
        mask_SnL = self._device.zeros(hidden_SnL.shape).masked_fill_(hidden_SnL, -torch.inf)
        return _Group(
            rows_Sn=None if in_order else to(rows_Sn.reshape(-1)),
            taken=to(taken),
            taken_rows=to(taken_rows),
            halves=self._store.halves(to(tables_Sb)),
            mask_S1qL=mask_SnL.unsqueeze(1).repeat(1, 1, self._group_size, 1),
            num_spans=len(spans),
            num_queries=num_queries,
        )

    def attend(self, layer: int, qkv_TP: Tensor, prepared: tuple[Rows, list[_Group]]) -> Tensor:
        rows, groups = prepared
        q_THD = self.enter(layer, qkv_TP, rows)
        out_THD = None
        for group in groups:
            mine = q_THD if group.rows_Sn is None else q_THD.index_select(0, group.rows_Sn)
            o = self._attend_group(layer, mine, group)
            if group.rows_Sn is None:
                return o.flatten(1)
            if out_THD is None:
                out_THD = torch.empty_like(q_THD)
            out_THD.index_copy_(0, group.taken_rows, o.index_select(0, group.taken))
        assert out_THD is not None
        return out_THD.flatten(1)

    def attend_partly(self, layer: int, qkv_TP: Tensor, prepared: tuple[Rows, list[_Group]], part_TX: Tensor) -> None:
        rows, groups = prepared
        q_THD = self.enter(layer, qkv_TP, rows)
        _, H, D = q_THD.shape
        out_THD, lse_TH = part_TX[:, : H * D].unflatten(1, (H, D)), part_TX[:, H * D :]
        for group in groups:
            if group.rows_Sn is None:
                out_THD[:], lse_TH[:] = self._attend_group_partly(layer, q_THD, group)
                return
            o, sums = self._attend_group_partly(layer, q_THD.index_select(0, group.rows_Sn), group)
            out_THD.index_copy_(0, group.taken_rows, o.index_select(0, group.taken))
            lse_TH.index_copy_(0, group.taken_rows, sums.index_select(0, group.taken))

    def _attend_group_partly(self, layer: int, q_RHD: Tensor, group: _Group) -> tuple[Tensor, Tensor]:
        """In float32: R rows, and the logarithms of the sums of their weights, [R, H]."""
        S, n, K, G, D = group.num_spans, group.num_queries, self._num_kv_heads, self._group_size, self._head_dim
        k_SKLD, v_SKLD = self._store.read(layer, group.halves, S)
        q_SKqD = q_RHD.view(S, n, K, G, D).permute(0, 2, 3, 1, 4).reshape(S, K, G * n, D).float()
        scores_SKqL = (q_SKqD @ k_SKLD.float().mT).div_(D**0.5).add_(group.mask_S1qL)
        lse_SKq = scores_SKqL.logsumexp(-1)
        shift_SKq = lse_SKq.masked_fill(lse_SKq == -torch.inf, 0.0)  # of a query that sees no token here
        o_SKqD = scores_SKqL.sub_(shift_SKq.unsqueeze(-1)).exp_() @ v_SKLD.float()
        o_RHD = o_SKqD.view(S, K, G, n, D).permute(0, 3, 1, 2, 4).reshape(S * n, K * G, D)
        return o_RHD, lse_SKq.view(S, K, G, n).permute(0, 3, 1, 2).reshape(S * n, K * G)

    def _attend_group(self, layer: int, q_RHD: Tensor, group: _Group) -> Tensor:
        """R = S · n rows in and out."""
        S, n, K, G, D = group.num_spans, group.num_queries, self._num_kv_heads, self._group_size, self._head_dim
        k_SKLD, v_SKLD = self._store.read(layer, group.halves, S)
        q_SKqD = q_RHD.view(S, n, K, G, D).permute(0, 2, 3, 1, 4).reshape(S, K, G * n, D)
        o_SKqD = scaled_dot_product_attention(q_SKqD, k_SKLD, v_SKLD, attn_mask=group.mask_S1qL)
        return o_SKqD.view(S, K, G, n, D).permute(0, 3, 1, 2, 4).reshape(S * n, K * G, D)


def _cut(spans: Spans) -> list[Span]:
    pieces = []
    columns = (spans.row_S.tolist(), spans.start_S.tolist(), spans.length_S.tolist(), spans.table_SB)
    for span in map(Span, *columns):
        for done in range(0, span.length, MAX_QUERIES):
            length = min(MAX_QUERIES, span.length - done)
            pieces.append(Span(span.row + done, span.start + done, length, span.table))
    return pieces
