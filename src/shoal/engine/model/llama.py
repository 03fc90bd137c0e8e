"""The Llama family: what its weights are, and what is before and behind its layers (layers.py).

Shape letters: T tokens of a step, E hidden size, H query heads, K key/value heads, D head size, F inner size of the
MLP, R rows to score, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from shoal.engine.model.config import ModelConfig
from shoal.engine.model.linear import Adding, Linear, Vocabulary


@dataclass(slots=True, kw_only=True)
class Layer:
    """Weights of one layer, as load.py makes them. Head norms are None where the family has none."""

    attention_norm_E: Tensor
    qkv: Linear  # outputs: all query heads, all key heads, all value heads
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    output: Adding
    mlp_norm_E: Tensor
    gate_up: Linear
    down: Adding


@dataclass(slots=True, kw_only=True)
class Weights:
    embedding: Vocabulary  # for its rows; the same as `head` where the model ties them
    layers: list[Layer]
    norm_E: Tensor
    head: Vocabulary


class Llama:
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights

    @property
    def head_norms(self) -> list[tuple[Tensor | None, Tensor | None]]:
        """Of each layer's queries and keys."""
        return [(layer.q_norm_D, layer.k_norm_D) for layer in self.weights.layers]

    def embed(self, tokens_T: Tensor) -> Tensor:
        """[T, E], newly made."""
        return self.weights.embedding.rows(tokens_T)

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """[R, V] in float32; overwritten by the next call."""
        return self.weights.head.scores(hidden_RE, self.weights.norm_E)
