"""The architectures that can be served: one row each. To add one, copy a row and give it a parity test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.engine.model.config import ModelConfig, common, read_json


def _llama(raw: Mapping[str, Any]) -> ModelConfig:  # SmolLM2 too
    bias = bool(raw.get("attention_bias", False))
    mlp_bias = bool(raw.get("mlp_bias", False))
    return common(raw, "LlamaForCausalLM", qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)


def _mistral(raw: Mapping[str, Any]) -> ModelConfig:
    return common(raw, "MistralForCausalLM")


def _qwen2(raw: Mapping[str, Any]) -> ModelConfig:
    return common({"use_sliding_window": False, **raw}, "Qwen2ForCausalLM", qkv_bias=True)


def _qwen3(raw: Mapping[str, Any]) -> ModelConfig:
    bias = bool(raw.get("attention_bias", False))
    raw = {"use_sliding_window": False, **raw}
    return common(raw, "Qwen3ForCausalLM", qkv_bias=bias, output_bias=bias, qk_norm=True)


ARCHITECTURES: dict[str, Callable[[Mapping[str, Any]], ModelConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}


def read_config(folder: Path) -> ModelConfig:
    """Raises ValueError that names the field, its value and what is allowed."""
    raw = read_json(folder / "config.json")
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(f"config.json: architectures is {names!r}; allowed: one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name](raw)
