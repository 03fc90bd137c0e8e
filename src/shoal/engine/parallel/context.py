"""Context parallel: each rank keeps and attends to its share of every context; the parts become one result.

A block spans as many tokens as all ranks keep of it, in turn: the scheduler's block ids, tables and prefix hits are
those of one rank alone. Each rank's part of a row is a mean of values weighted by a softmax over what is there, and the
logarithm of the sum of its weights; by these the parts are weighed (Milakov and Gimelshein, arXiv:1805.02867, as in
Helix, arXiv:2507.07120).

Shape letters: c ranks, T tokens of a step, P values of a row of queries, keys and values, H query heads, D head size,
X = H · D + H.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.engine.device import Device
from shoal.engine.model.attention import PartialAttention
from shoal.engine.model.config import ModelConfig
from shoal.engine.model.spans import Spans
from shoal.engine.parallel.comm import Comm


class ContextAttention:
    """An Attention whose context is spread over ranks, each of which calls it with the same rows."""

    def __init__(self, own: PartialAttention, comm: Comm, *, config: ModelConfig, device: Device) -> None:
        """`config`: of the heads that are here."""
        self.kv_format = f"{own.kv_format}, shared by {comm.size}"
        self.reads_stale_values = own.reads_stale_values
        self.prepare: Callable[[Spans], Any] = own.prepare
        self._own = own
        self._comm = comm
        self._num_heads = config.num_heads
        self._widths = [config.num_heads * (config.head_dim + 1)] * comm.size
        self._buffer = device.buffer

    def attend(self, layer: int, qkv_TP: Tensor, prepared: Any) -> Tensor:
        num_rows = len(qkv_TP)
        part_TX = self._buffer(num_rows, self._widths[0], torch.float32)
        self._own.attend_partly(layer, qkv_TP, prepared, part_TX)
        parts = self._comm.all_gather(part_TX, self._widths, self._buffer(num_rows, sum(self._widths), torch.float32))
        return merge(parts.view(num_rows, len(self._widths), -1), self._num_heads).to(qkv_TP.dtype)


def merge(parts_TcX: Tensor, num_heads: int) -> Tensor:
    """[T, H · D]: the result over all parts, each laid out as PartialAttention says."""
    out_TcHD = parts_TcX[..., :-num_heads].unflatten(2, (num_heads, -1))
    weight_TcH = parts_TcX[..., -num_heads:].softmax(1)  # finite: one of the parts has seen the row's own token
    return (out_TcHD * weight_TcH.unsqueeze(-1)).sum(1).flatten(1)
