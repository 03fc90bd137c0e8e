"""config.json is read as its authors meant it, or refused with the field, its value and what is allowed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from shoal.engine.model.config import Rope
from shoal.engine.model.registry import ARCHITECTURES, read_config

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1000,
}


def write(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**BASE, **changes}), encoding="utf-8")
    return folder


def test_missing_fields_take_the_values_transformers_gives_them(tmp_path: Path) -> None:
    config = read_config(write(tmp_path))
    assert (config.num_kv_heads, config.head_dim, config.max_context) == (4, 16, 1000)
    assert config.rope == Rope(theta=10000.0)
    assert not (config.tied or config.qkv_bias or config.output_bias or config.mlp_bias or config.qk_norm)


def test_what_sets_the_families_apart(tmp_path: Path) -> None:
    traits = {}
    for name in ARCHITECTURES:
        config = read_config(write(tmp_path, architectures=[name], attention_bias=True))
        traits[name] = (config.qkv_bias, config.output_bias, config.qk_norm)
    assert traits == {
        "LlamaForCausalLM": (True, True, False),
        "MistralForCausalLM": (False, False, False),
        "Qwen2ForCausalLM": (True, False, False),
        "Qwen3ForCausalLM": (True, True, True),
    }


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 300}, 300),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, 1000),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 300, "use_sliding_window": False}, 1000),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 300}, 1000),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 300, "use_sliding_window": True}, 300),
        ({"architectures": ["Qwen3ForCausalLM"], "sliding_window": 300, "layer_types": ["full_attention"] * 2}, 1000),
        ({"architectures": ["Qwen3ForCausalLM"], "sliding_window": 300, "layer_types": ["sliding_attention"] * 2}, 300),
    ],
)
def test_a_sliding_window_caps_the_context(tmp_path: Path, changes: dict[str, Any], context: int) -> None:
    assert read_config(write(tmp_path, **changes)).max_context == context


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_theta": 5e5}, Rope(theta=5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, Rope(theta=7.0)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, Rope(kind="linear", factor=2.0)),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            Rope(kind="llama3", theta=5e5, factor=8, low_freq_factor=1, high_freq_factor=4, original_context=8192),
        ),
    ],
)
def test_both_spellings_of_rope(tmp_path: Path, changes: dict[str, Any], rope: Rope) -> None:
    assert read_config(write(tmp_path, **changes)).rope == rope


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ("architectures", "GPT2LMHeadModel", "LlamaForCausalLM")),
        ({"architectures": []}, ("architectures", "[]", "Qwen3ForCausalLM")),
        ({"architectures": None}, ("architectures", "None")),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantization_config.quant_method", "gptq", "none")),
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu", "silu")),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, ("rope_type", "yarn", "'linear', 'llama3'")),
        ({"rope_scaling": {"rope_type": "linear"}}, ("linear", "factor")),
        ({"rope_scaling": "linear"}, ("rope_scaling", "linear")),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
        ({"num_key_value_heads": 3}, ("num_key_value_heads", "3", "4")),
        ({"head_dim": 15}, ("head_dim", "15", "even")),
        ({"hidden_size": "64"}, ("hidden_size", "'64'", "whole number")),
        ({"vocab_size": 0}, ("vocab_size", "0")),
        ({"num_hidden_layers": True}, ("num_hidden_layers", "True")),
        ({"vocab_size": 10**12}, ("vocab_size", str(10**12), "whole number from 1 to")),
        ({"max_position_embeddings": 10**30}, ("max_position_embeddings", "whole number from 1 to")),
        ({"rms_norm_eps": [1]}, ("rms_norm_eps", "[1]", "number above 0")),
        ({"rms_norm_eps": math.inf}, ("rms_norm_eps", "inf")),
        ({"rope_theta": None}, ("rope_theta", "None")),
        ({"rope_theta": -1}, ("rope_theta", "-1")),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ("factor is 0", "linear")),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                    "original_max_position_embeddings": 64,
                }
            },
            ("low_freq_factor is 4", "high_freq_factor"),
        ),
        ({"sliding_window": 8, "layer_types": 7}, ("layer_types", "7", "list")),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as refusal:
        read_config(write(tmp_path, **changes))
    assert all(word in str(refusal.value) for word in words), refusal.value


@pytest.mark.parametrize("content", [None, "{", "[]", b"\xff\xfe", "[" * 100_000, '{"vocab_size": ' + "9" * 5000 + "}"])
def test_a_broken_config_names_the_file(tmp_path: Path, content: str | bytes | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_config(tmp_path)
