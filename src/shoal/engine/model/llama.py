"""The Llama family: tokens and positions in, hidden states and logits out. Where keys and values go, the caller knows.

Shape letters: T tokens of a step, E hidden size, H query heads, K key/value heads, D head size, F inner size of the
MLP, R rows to score, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from shoal.engine.device import Device
from shoal.engine.model.config import ModelConfig
from shoal.engine.model.linear import Linear

Attend = Callable[[int, Tensor], Tensor]  # (layer, [T, (H + 2 K) · D]) -> [T, H · D]; see Attention.attend


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

    @property
    def head_norms(self) -> list[tuple[Tensor | None, Tensor | None]]:
        """Of each layer's queries and keys."""
        return [(layer.q_norm_D, layer.k_norm_D) for layer in self._weights.layers]

    def hidden(self, tokens_T: Tensor, attend: Attend) -> Tensor:
        """[T, E]: what `logits` takes."""
        x_TE = self._weights.embedding.rows(tokens_T)
        for index, layer in enumerate(self._weights.layers):
            qkv_TP = layer.qkv.normed(x_TE, layer.attention_norm_E)
            x_TE = layer.output.add(attend(index, qkv_TP), x_TE)
            x_TE = layer.down.add(layer.gate_up.normed_silu(x_TE, layer.mlp_norm_E), x_TE)
        return x_TE

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """[R, V] in float32; overwritten by the next call."""
        return self._weights.head.scores(hidden_RE, self._weights.norm_E)
