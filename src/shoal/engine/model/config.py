"""What the model code needs of a Hugging Face config.json, checked. What is unknown and changes results is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAX_SIZE = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding. Angle of pair i at position p: p · frequency_i, frequency_i = theta^(-2i/head_dim).

    linear: all frequencies divided by `factor`. llama3: only the low ones, with a smooth passage between
    `original_context / low_freq_factor` and `original_context / high_freq_factor` (wave lengths in tokens).
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    max_context: int  # tokens; with a sliding window at most the window, so that full attention is the same thing
    tied: bool  # the output matrix is the embedding matrix
    qkv_bias: bool = False
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # each head's q and k pass through an RMS norm before the rotation


def read_json(path: Path) -> dict[str, Any]:
    """Raises ValueError naming the file if it is missing or not a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; a model folder has config.json and *.safetensors") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not a JSON object")
    return value


def common(raw: Mapping[str, Any], architecture: str, **traits: bool) -> ModelConfig:
    """The fields that all models of the Llama family share. ValueError names field, value and what is allowed."""
    _require(raw, "hidden_act", ("silu",), default="silu")
    _require(raw, "partial_rotary_factor", (1, 1.0), default=1)
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ValueError(f"config.json: quantization_config.quant_method is {method!r}; allowed: none (plain weights)")
    hidden_size, num_heads = _size(raw, "hidden_size"), _size(raw, "num_attention_heads")
    num_kv_heads = _size(raw, "num_key_value_heads", num_heads)
    head_dim = _size(raw, "head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"config.json: num_key_value_heads is {num_kv_heads}; must divide num_attention_heads {num_heads}"
        )
    if head_dim % 2:
        raise ValueError(f"config.json: head_dim is {head_dim}; must be even")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(raw, "intermediate_size"),
        num_layers=_size(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope=_rope(raw),
        max_context=_max_context(raw),
        tied=bool(raw.get("tie_word_embeddings", False)),
        **traits,
    )


def _size(raw: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = raw.get(field)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_SIZE:
        raise ValueError(f"config.json: {field} is {value!r}; must be a whole number from 1 to {_MAX_SIZE}")
    return value


def _number(raw: Mapping[str, Any], field: str, default: float | None = None) -> float:
    value = raw.get(field, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"config.json: {field} is {value!r}; must be a number above 0")
    return float(value)


def _require(raw: Mapping[str, Any], field: str, allowed: tuple[Any, ...], default: Any) -> None:
    value = raw.get(field, default)
    if value not in allowed:
        raise ValueError(f"config.json: {field} is {value!r}; allowed: {', '.join(repr(v) for v in allowed)}")


def _max_context(raw: Mapping[str, Any]) -> int:
    """A model with a sliding window is served up to the window: there its attention is plain causal attention."""
    context = _size(raw, "max_position_embeddings")
    window = raw.get("sliding_window")
    layer_types = raw.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list):
            raise ValueError(f"config.json: layer_types is {layer_types!r}; must be a list")
        slides = "sliding_attention" in layer_types
    else:
        slides = bool(raw.get("use_sliding_window", True))  # Qwen says so; Mistral's window is there or null
    return min(context, _size(raw, "sliding_window")) if window is not None and slides else context


def _rope(raw: Mapping[str, Any]) -> Rope:
    """From `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ValueError(f"config.json: rope_scaling is {scaling!r}; must be an object")
    theta = _number({**raw, **scaling}, "rope_theta", 10000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return Rope(theta=theta)
    try:
        if kind == "linear":
            return Rope(kind="linear", theta=theta, factor=_number(scaling, "factor"))
        if kind == "llama3":
            low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
            if low >= high:
                raise ValueError(f"config.json: low_freq_factor is {low:g}; must be below high_freq_factor, {high:g}")
            return Rope(
                kind="llama3",
                theta=theta,
                factor=_number(scaling, "factor"),
                low_freq_factor=low,
                high_freq_factor=high,
                original_context=_size(scaling, "original_max_position_embeddings"),
            )
    except ValueError as error:
        raise ValueError(f"{error} (rope_scaling of type {kind!r})") from None
    raise ValueError(f"config.json: rope_scaling.rope_type is {kind!r}; allowed: 'default', 'linear', 'llama3'")
