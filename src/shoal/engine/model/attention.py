"""Attention of new tokens over paged keys and values: what the model asks for, and who computes it.

Shape letters: T tokens of a step, P = (H + 2 K) · D, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from shoal.engine.device import Device
from shoal.engine.kvstore import KVStore
from shoal.engine.model.config import ModelConfig
from shoal.engine.model.fixed import FixedAttention
from shoal.engine.model.paged import PagedAttention, unsupported
from shoal.engine.model.sdpa import SdpaAttention
from shoal.engine.model.spans import WHOLE, Shard, Spans

Norms = Sequence[tuple[Tensor | None, Tensor | None]]  # of each layer: weights for queries and keys, [D] each

log = logging.getLogger("shoal.engine")


class Attention(Protocol):
    """`prepare` once per step, `attend` once per layer with what it returned.

    Norms and rotates queries and keys, writes keys and values to the store, attends.
    """

    kv_format: str  # how keys and values lie in a block; part of the prefix keys' root
    reads_stale_values: bool  # with weight 0, where no token was written yet: fresh blocks have to be cleared

    def prepare(self, spans: Spans) -> Any: ...

    def attend(self, layer: int, qkv_TP: Tensor, prepared: Any) -> Tensor:
        """Returns [T, H · D], which the next layer's call may overwrite. Rows: query, key, then value heads."""
        ...


class PartialAttention(Attention, Protocol):
    """Of a shard of the context, as `make_attention` was told."""

    def attend_partly(self, layer: int, qkv_TP: Tensor, prepared: Any, part_TX: Tensor) -> None:
        """As `attend`, over the tokens that are here. `part_TX`, float32, contiguous, X = H · D + H, gets the results
        and behind them the logarithms of the sums of their weights; where no token is here, zeros and minus infinity.
        """
        ...


ATTENTION: dict[str, Callable[[ModelConfig, Device, KVStore, Norms, Shard], Attention]] = {
    "fixed": FixedAttention,
    "paged": PagedAttention,
    "sdpa": SdpaAttention,
}


def make_attention(
    config: ModelConfig, device: Device, store: KVStore, norms: Norms, shard: Shard = WHOLE
) -> Attention:
    """The device's, or torch's where that one cannot serve this model. Of a shard it is a PartialAttention."""
    name = device.attention
    if name == "paged" and (reason := unsupported(config, device)):
        name = "fixed" if device.batch_invariant else "sdpa"
        log.warning("attention.unsupported", {"reason": reason, "instead": name})
    assert shard.count == 1 or not device.batch_invariant
    return ATTENTION[name](config, device, store, norms, shard)
