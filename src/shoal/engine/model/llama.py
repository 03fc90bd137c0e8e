"""The Llama family: tokens and positions in, hidden states and logits out. Where keys and values go, the caller knows.

Shape letters: T tokens of a step, E hidden size, H query heads, K key/value heads, D head size, F inner size of the
MLP, R rows to score, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from shoal.engine.device import Device
from shoal.engine.model.config import ModelConfig, Rope
from shoal.engine.model.linear import Linear

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, q_THD, k_TKD, v_TKD) -> [T, H · D]


@dataclass(slots=True, kw_only=True)
class Layer:
    """Weights of one layer, as load.py makes them. Head norms are None where the family has none."""

    attention_norm_E: Tensor
    qkv: Linear  # outputs: all query heads, all key heads, all value heads
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    output: Linear
    mlp_norm_E: Tensor
    gate_up: Linear
    down: Linear


@dataclass(slots=True, kw_only=True)
class Weights:
    embedding: Linear  # for its rows; the same as `head` where the model ties them
    layers: list[Layer]
    norm_E: Tensor
    head: Linear


class Llama:
    def __init__(self, config: ModelConfig, weights: Weights, device: Device) -> None:
        self.config = config
        self._weights = weights
        self._frequency_D = device.tensor(_frequencies(config.rope, config.head_dim))

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """[T, E]: what `logits` takes."""
        x_TE = self._weights.embedding.rows(tokens_T)
        angle_T1D = (positions_T.unsqueeze(1) * self._frequency_D).unsqueeze(1)  # float32, as large positions need
        cos_T1D, sin_T1D = angle_T1D.cos().to(x_TE.dtype), angle_T1D.sin().to(x_TE.dtype)
        for index, layer in enumerate(self._weights.layers):
            q_THD, k_TKD, v_TKD = self._qkv(layer, x_TE, cos_T1D, sin_T1D)
            x_TE = layer.output.add(attend(index, q_THD, k_TKD, v_TKD), x_TE)
            x_TE = layer.down.add(layer.gate_up.normed_silu(x_TE, layer.mlp_norm_E), x_TE)
        return x_TE

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """[R, V] in float32; overwritten by the next call."""
        return self._weights.head.scores(hidden_RE, self._weights.norm_E)

    def _qkv(self, layer: Layer, x_TE: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        qkv = layer.qkv.normed(x_TE, layer.attention_norm_E).view(len(x_TE), -1, config.head_dim)
        q_THD, k_TKD, v_TKD = qkv.split(heads, dim=1)
        if layer.q_norm_D is not None and layer.k_norm_D is not None:
            q_THD = rms_norm(q_THD, layer.q_norm_D.shape, layer.q_norm_D, config.norm_eps)
            k_TKD = rms_norm(k_TKD, layer.k_norm_D.shape, layer.k_norm_D, config.norm_eps)
        return _rotate(q_THD, cos_T1D, sin_T1D), _rotate(k_TKD, cos_T1D, sin_T1D), v_TKD


def _rotate(x_TxD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Pair i is (i, i + D/2), as checkpoints in the Hugging Face layout store it."""
    low, high = x_TxD.chunk(2, dim=-1)
    return x_TxD * cos_T1D + torch.cat((-high, low), dim=-1) * sin_T1D


def _frequencies(rope: Rope, head_dim: int) -> Tensor:
    """[D] in float32, each frequency twice: once per half of a pair. The formulas are in config.Rope."""
    frequency = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        frequency = frequency / rope.factor
    elif rope.kind == "llama3":
        turns = rope.original_context * frequency / (2 * math.pi)  # full turns within the original context
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0, 1)  # 1: high frequency, unchanged; 0: low frequency, divided
        frequency = keep * frequency + (1 - keep) * frequency / rope.factor
    return torch.cat((frequency, frequency))
