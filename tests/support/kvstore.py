"""A KV store whose bytes are known."""

from __future__ import annotations

import torch

from shoal.engine.config import EngineConfig
from shoal.engine.device import choose
from shoal.engine.kvstore import KVStore
from shoal.engine.model.config import ModelConfig, Rope


def random_store(dtype: str) -> KVStore:
    """Of 3 layers and 12 blocks, full of random bytes."""
    config = ModelConfig(
        architecture="",
        vocab_size=1,
        hidden_size=1,
        intermediate_size=1,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        norm_eps=1e-5,
        rope=Rope(theta=5000.0),
        max_context=4096,
        tied=True,
    )
    store = KVStore(config, choose(EngineConfig(dtype=dtype, threads=1)), 12, 16)
    store.bytes_NBX.random_(0, 256, generator=torch.Generator().manual_seed(1))
    return store
