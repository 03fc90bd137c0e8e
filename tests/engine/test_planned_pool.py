"""The planner and the engine agree, to the block, on what a memory holds (PLN-01, PLN-02)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from shoal.engine.model.registry import read_config
from shoal.planner import catalogue, kv
from shoal.planner.memory import Batch, RankMemory, pool_bytes, rank_memory
from shoal.planner.model import Model
from shoal.planner.weights import Precision
from tests.support.tiny_model import make_tiny_model

if TYPE_CHECKING:
    from shoal.engine.runner import Runner

pytestmark = pytest.mark.torch

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def random_settings(chance: Random) -> dict[str, Any]:
    """Grouped, multi-query and plain attention; head sizes that are not hidden / heads."""
    kv_heads = chance.choice((1, 2, 3, 4))
    return {
        "architecture": chance.choice(FAMILIES),
        "num_heads": kv_heads * chance.choice((1, 2, 3)),
        "num_kv_heads": kv_heads,
        "head_dim": chance.choice((8, 16, 32, 48)),
        "hidden_size": chance.choice((48, 64, 96)),
        "num_layers": chance.choice((1, 2, 3, 5)),
        "tied": chance.choice((True, False)),
        "max_position": 4096,
    }


def planned(folder: Path, memory_bytes: int, block_tokens: int) -> tuple[Model, RankMemory]:
    model = catalogue.model(str(folder))
    batch = Batch(max_tokens=64, max_seqs=4, block_tokens=block_tokens)
    return model, rank_memory(model, Precision("float32"), "float32", batch, memory_bytes, utilization=0.95)


def test_pln_01_block_counts_of_200_random_models_are_equal(tmp_path: Path) -> None:
    import torch

    from shoal.engine.config import EngineConfig
    from shoal.engine.device import choose
    from shoal.engine.kvstore import KVStore, block_bytes

    chance = Random(1)
    device = choose(EngineConfig(dtype="float32", device="cpu", threads=1))
    for number in range(200):
        folder = tmp_path / str(number)
        settings = random_settings(chance)
        fields = {
            "architectures": [{"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
                               "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[settings["architecture"]]],
            "vocab_size": 64, "hidden_size": settings["hidden_size"], "intermediate_size": 32,
            "num_hidden_layers": settings["num_layers"], "num_attention_heads": settings["num_heads"],
            "num_key_value_heads": settings["num_kv_heads"], "head_dim": settings["head_dim"],
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        }  # fmt: skip
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        block_tokens = chance.choice((8, 16, 32))
        _, memory = planned(folder, chance.randrange(2 << 20, 16 << 20), block_tokens)
        read = read_config(folder)
        num_blocks = memory.pool // block_bytes(read, torch.float32, block_tokens)
        store = KVStore(read, device, num_blocks, block_tokens)
        assert num_blocks * block_tokens == memory.pool_tokens
        assert store.bytes_NBX.numel() == kv.num_bytes(memory.groups, memory.pool_tokens, block_tokens=block_tokens)


@pytest.mark.parametrize("number", range(50))
def test_pln_02_the_planned_context_starts_and_one_block_more_does_not(
    number: int, tmp_path: Path, new_runner: Callable[..., Runner]
) -> None:
    chance = Random(number)
    folder = make_tiny_model(tmp_path / "model", seed=number, **random_settings(chance))
    block_tokens = chance.choice((8, 16, 32))
    model, memory = planned(folder, chance.randrange(3 << 20, 8 << 20), block_tokens)
    longest = memory.max_context(model.max_context - block_tokens)
    pool = memory.pool if longest == memory.pool_tokens else memory.sequence_bytes(longest)
    longest = longest // block_tokens * block_tokens
    settings = {"kv_cache_bytes": pool, "block_size": block_tokens}
    assert new_runner(folder, max_model_len=longest, **settings).max_model_len == longest
    with pytest.raises(ValueError, match=f"the KV pool holds {longest} tokens"):
        new_runner(folder, max_model_len=longest + block_tokens, **settings)


def test_a_gpus_pool_is_sized_by_the_planners_function() -> None:
    from shoal.engine import device

    assert device.pool_bytes is pool_bytes
