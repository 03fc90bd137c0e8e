"""Rotary position embedding: the angles by which pairs of a query's or key's values are turned. See config.Rope."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shoal.engine.device import Device
from shoal.engine.model.config import Rope

_FIRST_POSITIONS = 2048


class Angles:
    """Cosines and sines of all angles, position by position, as far as positions have been asked for.

    Shape letters: P positions, D head size.
    """

    def __init__(self, rope: Rope, head_dim: int, device: Device) -> None:
        self._frequency = device.tensor(frequencies(rope, head_dim))
        self._device = device
        self._table_PD = device.zeros((0, head_dim), torch.float32)

    def table(self, num_positions: int) -> Tensor:
        """[P, D] in float32, contiguous, P >= num_positions: of each position D / 2 cosines, then D / 2 sines."""
        old = len(self._table_PD)
        if num_positions > old:
            new = max(_FIRST_POSITIONS, 2 * old, num_positions)
            angle = self._device.arange(new)[old:].unsqueeze(1) * self._frequency  # float32, as large positions need
            self._table_PD = torch.cat((self._table_PD, torch.cat((angle.cos(), angle.sin()), dim=1)))
        return self._table_PD


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """[D / 2] in float32, of the pairs (i, i + D / 2)."""
    frequency = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return frequency / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_context * frequency / (2 * math.pi)  # full turns within the original context
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0, 1)  # 1: high frequency, unchanged; 0: low frequency, divided
        return keep * frequency + (1 - keep) * frequency / rope.factor
    return frequency


def rotate(x_TxD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Pair i is (i, i + D / 2), as checkpoints in the Hugging Face layout store it. cos and sin: each angle twice."""
    low, high = x_TxD.chunk(2, dim=-1)
    return x_TxD * cos_T1D + torch.cat((-high, low), dim=-1) * sin_T1D
