"""Attention on a CPU by our own kernel, which reads keys and values where they lie: kernels/attention.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.engine.device import Device
from shoal.engine.kernels.library import Attention, Kernels, Layer, Step, address
from shoal.engine.kvstore import KVStore
from shoal.engine.model.config import ModelConfig
from shoal.engine.model.rope import Angles
from shoal.engine.model.spans import WHOLE, Shard, Spans

_LANES = 16  # queries of one head that a task takes at once, as attention.h has it
_MAX_HEAD_DIM = 256


class Prepared(NamedTuple):
    step: Step
    keep: tuple[object, ...]  # the memory that it points to


class PagedAttention:
    """A row's result is bit-equal whatever shares its step and however its prompt was cut."""

    kv_format = "block-head-cells"
    reads_stale_values = False

    def __init__(
        self,
        config: ModelConfig,
        device: Device,
        store: KVStore,
        norms: Sequence[tuple[Tensor | None, Tensor | None]],
        shard: Shard = WHOLE,
    ) -> None:
        assert device.kernels is not None and not unsupported(config, device)
        self._device = device
        self._kernels = device.kernels
        self._angles = Angles(config.rope, config.head_dim, device)
        self.width = config.num_heads * config.head_dim
        self.shape = Attention(
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            store.block_tokens,
            _math(device),
            device.kernels.threads,
            config.norm_eps,
            *shard,
        )
        self._kept = store, norms  # what the layers point to
        self.layers = [
            Layer(None, store.layer(index).data_ptr(), *(None if norm is None else norm.data_ptr() for norm in pair))
            for index, pair in enumerate(norms)
        ]

    def prepare(self, spans: Spans) -> Prepared:
        shape = self.shape
        num_spans, num_blocks = spans.table_SB.shape
        num_rows = spans.row_S.item(-1) + spans.length_S.item(-1)
        most_tiles = num_rows * (shape.num_heads // shape.num_kv_heads) // _LANES + num_spans
        tasks = np.empty((most_tiles * shape.num_kv_heads + 8 * shape.num_threads, 7), np.int32)
        writes = np.empty((most_tiles, 3), np.int32)
        angles_PD = self._angles.table(num_blocks * shape.block_tokens * shape.num_shards)
        step = Step(
            *map(address, spans),
            num_spans,
            num_blocks,
            angles_PD.data_ptr(),
            address(tasks),
            address(writes),
        )
        self._kernels.plan_attention(ctypes.byref(shape), ctypes.byref(step))
        results = np.empty((step.num_slots, _LANES * (2 + shape.head_size)), np.float32)
        done = np.zeros(step.num_slots, np.int32)
        step.results, step.done = address(results), address(done)
        return Prepared(step, (spans, tasks, writes, angles_PD, results, done))

    def attend(self, layer: int, qkv_TP: Tensor, prepared: Prepared) -> Tensor:
        out_TxHD = self._device.buffer(len(qkv_TP), self.width, qkv_TP.dtype)
        self._attend(layer, qkv_TP, prepared, out_TxHD, part=False)
        return out_TxHD

    def attend_partly(self, layer: int, qkv_TP: Tensor, prepared: Prepared, part_TX: Tensor) -> None:
        self._attend(layer, qkv_TP, prepared, part_TX, part=True)

    def _attend(self, layer: int, qkv_TP: Tensor, prepared: Prepared, out: Tensor, *, part: bool) -> None:
        assert qkv_TP.is_contiguous() and out.is_contiguous()
        call = self.layers[layer]
        call.qkv, call.out, call.part = qkv_TP.data_ptr(), out.data_ptr(), part
        self._kernels.attend(ctypes.byref(self.shape), ctypes.byref(prepared.step), ctypes.byref(call))


def unsupported(config: ModelConfig, device: Device) -> str:
    """Why this model cannot have it on this device; empty: it can."""
    if device.dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {str(device.dtype).removeprefix('torch.')}"
    if config.head_dim % 16 or config.head_dim > _MAX_HEAD_DIM:
        return f"head_dim {config.head_dim}"
    return ""


def _math(device: Device) -> int:
    assert device.kernels is not None
    if device.dtype == torch.float32:
        return Kernels.FLOAT32
    return Kernels.BFLOAT16_UNIT if device.kernels.has_attention_unit else Kernels.BFLOAT16
