"""Attention of new tokens over paged keys and values. One backend for every device today; others join ATTENTION.

Shape letters: T tokens of a step, H query heads, K key/value heads, G = H / K, D head size, S spans of a group,
n queries of a span, b blocks of a table, L = b · block_tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from shoal.engine.device import Device
from shoal.engine.kvstore import KVStore
from shoal.engine.model.config import ModelConfig

MAX_QUERIES = 512  # longer spans are cut: bounds the mask, and early queries skip late keys
MIN_BLOCKS = 16  # tables up to this length share a group


class Spans(NamedTuple):
    """New tokens [start, start + length) of S sequences; rows [row, row + length) of the step. int32, contiguous."""

    row_S: np.ndarray
    start_S: np.ndarray
    length_S: np.ndarray
    table_SB: np.ndarray  # block ids, at least as many as start + length tokens need; beyond a row's own: 0


class Span(NamedTuple):
    """One of the Spans, or a piece of it."""

    row: int
    start: int
    length: int
    table: np.ndarray


class Attention(Protocol):
    """`prepare` once per step, `attend` once per layer with what it returned. Keys and values are written already."""

    def prepare(self, spans: Spans) -> Any: ...

    def attend(self, layer: int, q_THD: Tensor, prepared: Any) -> Tensor:
        """Returns [T, H · D]."""
        ...


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


class SdpaAttention:
    """Gathers each span's blocks and calls torch's fused attention, query heads folded into the query length."""

    def __init__(self, config: ModelConfig, device: Device, store: KVStore) -> None:
        self._device = device
        self._store = store
        self._num_kv_heads = config.num_kv_heads
        self._group_size = config.num_heads // config.num_kv_heads
        self._head_dim = config.head_dim

    def prepare(self, spans: Spans) -> list[_Group]:
        num_rows = int(spans.length_S.sum())
        groups: dict[tuple[int, int], list[Span]] = {}
        for span in _cut(spans):
            groups.setdefault(self._shape_class(span), []).append(span)
        return [self._group(members, num_rows) for _, members in sorted(groups.items())]

    def _num_blocks(self, span: Span) -> int:
        return -(-(span.start + span.length) // self._store.block_tokens)

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
        last_key_Sn = to(start_S1 + np.minimum(query_n, length_S1 - 1))
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

    def attend(self, layer: int, q_THD: Tensor, prepared: list[_Group]) -> Tensor:
        out_THD = None
        for group in prepared:
            mine = q_THD if group.rows_Sn is None else q_THD.index_select(0, group.rows_Sn)
            o = self._attend_group(layer, mine, group)
            if group.rows_Sn is None:
                return o.flatten(1)
            if out_THD is None:
                out_THD = torch.empty_like(q_THD)
            out_THD.index_copy_(0, group.taken_rows, o.index_select(0, group.taken))
        assert out_THD is not None
        return out_THD.flatten(1)

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


ATTENTION: dict[str, Callable[[ModelConfig, Device, KVStore], Attention]] = {"sdpa": SdpaAttention}
