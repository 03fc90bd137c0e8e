"""What is read of a config.json, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.engine.model import registry
from shoal.planner import catalogue
from shoal.planner.layouts import allowed_tp, why_not_tp
from shoal.planner.model import ARCHITECTURES, read

LLAMA = catalogue.models()["llama-3.1-8b"]["config"]
DEEPSEEK = catalogue.models()["deepseek-v3"]["config"]
QWEN = catalogue.models()["qwen2.5-7b"]["config"]


@pytest.mark.parametrize(
    ("config", "changed", "message"),
    [
        (
            LLAMA,
            {"architectures": ["GPT2LMHeadModel"]},
            r"architectures is \['GPT2LMHeadModel'\]; allowed: one of Llama",
        ),
        (LLAMA, {"num_attention_heads": None}, "num_attention_heads is None; must be a whole number"),
        (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers is 0; must be a whole number from 1"),
        (LLAMA, {"vocab_size": True}, "vocab_size is True"),
        (LLAMA, {"num_key_value_heads": 5}, "num_key_value_heads is 5; must divide num_attention_heads 32"),
        (LLAMA, {"torch_dtype": "int3"}, "torch_dtype is 'int3'; allowed: bfloat16, float16, float32"),
        (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; allowed: true, false"),
        (LLAMA, {"quantization_config": {"quant_method": "hqq"}}, "quant_method is 'hqq'; allowed: fp8, awq, gptq"),
        (LLAMA, {"quantization_config": {"quant_method": "awq", "bits": 3}}, "bits 3, group_size None; allowed"),
        (DEEPSEEK, {"kv_lora_rank": "big"}, "kv_lora_rank is 'big'"),
        (DEEPSEEK, {"num_experts_per_tok": 300}, "num_experts_per_tok is 300; at most the number of experts, 256"),
        (QWEN, {"sliding_window": 4096, "layer_types": ["full_attention"]}, "must be a list of 28 names"),
    ],
)
def test_what_is_wrong_is_named(config: dict[str, Any], changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read({**config, **changed}, "wrong")


def test_windows_as_each_family_says_them() -> None:
    assert set(read(QWEN, "q").windows) == {0}, "Qwen names a window that it does not use"
    used = read({**QWEN, "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}, "q")
    assert used.windows == (0,) * 20 + (4096,) * 8
    mixed = ["full_attention", "sliding_attention"] * 14
    assert read({**QWEN, "sliding_window": 512, "layer_types": mixed}, "q").windows == (0, 512) * 14


def test_all_that_the_engine_serves_can_be_planned() -> None:
    assert set(registry.ARCHITECTURES) <= set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("smollm2-135m", [1, 3, 9]), ("qwen2.5-7b", [1, 2, 4, 28]), ("llama-3.1-8b", [1, 2, 4, 8, 16, 32])],
)
def test_tensor_parallel_ranks_divide_the_heads(name: str, allowed: list[int]) -> None:
    model = catalogue.model(name)
    assert allowed_tp(model) == allowed
    for tp in range(1, 40):
        assert bool(why_not_tp(model, tp)) == (tp not in allowed)
    assert why_not_tp(model, 5).endswith("allowed: " + ", ".join(map(str, allowed)))


def test_names_folders_and_what_is_neither(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    assert catalogue.model(str(tmp_path)).num_layers == 32
    assert catalogue.model("Llama-3.1-8B").name == "llama-3.1-8b"
    with pytest.raises(ValueError, match=r"'llama-3.1-8' is not in the catalogue; did you mean llama-3.1-8b\? Known:"):
        catalogue.model("llama-3.1-8")
    (tmp_path / "config.json").write_text("[", encoding="utf-8")
    with pytest.raises(ValueError, match="not a readable JSON file"):
        catalogue.model(str(tmp_path))
