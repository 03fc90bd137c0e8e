"""What of a Hugging Face config.json decides memory and time. What is unknown and would change them is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_SIZE = (1 << 31) - 1
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
KV_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): a token's KV is one vector for all heads."""

    q_rank: int  # 0: queries are projected from the hidden state at once
    kv_rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    count: int
    per_token: int
    inner: int
    shared_inner: int = 0  # of the shared experts together; 0: there are none
    first: int = 0  # layers before this one have a dense MLP
    router_bias: bool = False  # float32, one per expert


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How matrices are stored. A scale belongs to `block` = (rows, columns) of them; 0: all of that axis."""

    name: str
    bits: int
    block: tuple[int, int]
    scale_bytes: float  # per block, a zero point included
    everywhere: bool = False  # embedding and output matrix too

    def num_bytes(self, rows: int, columns: int) -> float:
        blocks = math.prod(-(-size // (unit or size)) for size, unit in zip((rows, columns), self.block, strict=True))
        return rows * columns * self.bits / 8 + blocks * self.scale_bytes


FORMATS: dict[str, Quantization] = {
    # shoal's own: engine/model/quantize.py
    "int8": Quantization(name="int8", bits=8, block=(1, 0), scale_bytes=4, everywhere=True),
    # a float32 scale per output, as compressed-tensors and vLLM keep it
    "fp8": Quantization(name="fp8", bits=8, block=(1, 0), scale_bytes=4),
    # DeepSeek-V3: README_WEIGHTS.md
    "fp8-block": Quantization(name="fp8-block", bits=8, block=(128, 128), scale_bytes=4),
    # AWQ and GPTQ with groups of 128: a float16 scale and a zero point of 4 bits
    "int4": Quantization(name="int4", bits=4, block=(1, 128), scale_bytes=2.5),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One decoder. Sizes as config.json gives them; `head_dim` is read, and derived only where the file lacks it."""

    name: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    tied: bool
    windows: tuple[int, ...]  # of each layer, in tokens; 0: it attends to everything
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms_per_layer: int = 2
    latent: Latent | None = None
    experts: Experts | None = None
    draft_layers: int = 0  # modules that predict further tokens: in the checkpoint, loaded only to draft with them
    dtype: str = "bfloat16"
    quantization: Quantization | None = None  # of the checkpoint

    def sparse(self, layer: int) -> bool:
        """Whether the layer's MLP is experts."""
        return self.experts is not None and layer >= self.experts.first


def read(raw: Mapping[str, Any], name: str) -> Model:
    """Raises ValueError that names the field, its value and what is allowed."""
    names = raw.get("architectures")
    architecture = names[0] if isinstance(names, list) and len(names) == 1 else names
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ValueError(f"config.json: architectures is {names!r}; allowed: one of {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[architecture](raw, name)


def _common(
    raw: Mapping[str, Any], name: str, *, tied: bool = False, window_default: bool = True, **traits: Any
) -> Model:
    num_heads = _size(raw, "num_attention_heads")
    num_kv_heads = _size(raw, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"config.json: num_key_value_heads is {num_kv_heads}; must divide num_attention_heads {num_heads}"
        )
    hidden_size = _size(raw, "hidden_size")
    return Model(
        name=name,
        architecture=raw["architectures"][0],
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(raw, "intermediate_size"),
        num_layers=_size(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_size(raw, "head_dim", hidden_size // num_heads),
        max_context=_size(raw, "max_position_embeddings"),
        tied=_flag(raw, "tie_word_embeddings", tied),
        windows=_windows(raw, window_default),
        dtype=_dtype(raw),
        quantization=_quantization(raw),
        **traits,
    )


def _windows(raw: Mapping[str, Any], used: bool) -> tuple[int, ...]:
    """`used`: whether a window that is named counts where nothing more is said."""
    num_layers = _size(raw, "num_hidden_layers")
    window = raw.get("sliding_window")
    if window is None:
        return (0,) * num_layers
    size = _size(raw, "sliding_window")
    types = raw.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != num_layers:
            raise ValueError(f"config.json: layer_types is {types!r}; must be a list of {num_layers} names")
        return tuple(size if kind == "sliding_attention" else 0 for kind in types)
    if not _flag(raw, "use_sliding_window", used):
        return (0,) * num_layers
    first = raw.get("max_window_layers", 0)  # Qwen: layers from here on have the window
    return tuple(size if layer >= (first or 0) else 0 for layer in range(num_layers))


def _llama(raw: Mapping[str, Any], name: str) -> Model:  # SmolLM2 too
    bias = _flag(raw, "attention_bias", False)
    mlp_bias = _flag(raw, "mlp_bias", False)
    return _common({**raw, "sliding_window": None}, name, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)


def _mistral(raw: Mapping[str, Any], name: str) -> Model:
    return _common(raw, name)


def _qwen2(raw: Mapping[str, Any], name: str) -> Model:
    return _common(raw, name, window_default=False, qkv_bias=True)


def _qwen3(raw: Mapping[str, Any], name: str, **traits: Any) -> Model:
    bias = _flag(raw, "attention_bias", False)
    return _common(raw, name, window_default=False, qkv_bias=bias, output_bias=bias, qk_norm=True, **traits)


def _gemma2(raw: Mapping[str, Any], name: str) -> Model:
    """Four norms a layer; every other layer has the window, from the first on."""
    num_layers = _size(raw, "num_hidden_layers")
    alternating = ["sliding_attention", "full_attention"] * num_layers
    raw = {"layer_types": alternating[:num_layers], **raw}
    return _common(raw, name, tied=True, norms_per_layer=4, qkv_bias=_flag(raw, "attention_bias", False))


def _mixtral(raw: Mapping[str, Any], name: str) -> Model:
    count, inner = _size(raw, "num_local_experts"), _size(raw, "intermediate_size")
    return _common(raw, name, experts=_experts(raw, count=count, inner=inner))


def _qwen3_moe(raw: Mapping[str, Any], name: str) -> Model:
    if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
        found = raw.get("mlp_only_layers") or raw.get("decoder_sparse_step")
        raise ValueError(f"config.json: mlp_only_layers, decoder_sparse_step are {found!r}; allowed: [] and 1")
    experts = _experts(raw, count=_size(raw, "num_experts"), inner=_size(raw, "moe_intermediate_size"))
    return _qwen3(raw, name, experts=experts)


def _deepseek(raw: Mapping[str, Any], name: str, *, router_bias: bool) -> Model:
    if raw.get("moe_layer_freq", 1) != 1:
        raise ValueError(f"config.json: moe_layer_freq is {raw['moe_layer_freq']!r}; allowed: 1")
    latent = Latent(
        q_rank=_size(raw, "q_lora_rank") if raw.get("q_lora_rank") is not None else 0,
        kv_rank=_size(raw, "kv_lora_rank"),
        rope_dim=_size(raw, "qk_rope_head_dim"),
        nope_dim=_size(raw, "qk_nope_head_dim"),
        v_dim=_size(raw, "v_head_dim"),
    )
    inner = _size(raw, "moe_intermediate_size")
    experts = _experts(
        raw,
        count=_size(raw, "n_routed_experts"),
        inner=inner,
        shared_inner=(raw.get("n_shared_experts") or 0) * inner,
        first=raw.get("first_k_dense_replace", 0),
        router_bias=router_bias,
    )
    draft = raw.get("num_nextn_predict_layers") or 0
    return _common({"head_dim": latent.nope_dim, **raw}, name, latent=latent, experts=experts, draft_layers=draft)


def _experts(raw: Mapping[str, Any], *, count: int, inner: int, **more: Any) -> Experts:
    per_token = _size(raw, "num_experts_per_tok")
    if per_token > count:
        raise ValueError(f"config.json: num_experts_per_tok is {per_token}; at most the number of experts, {count}")
    return Experts(count=count, per_token=per_token, inner=inner, **more)


ARCHITECTURES: dict[str, Callable[[Mapping[str, Any], str], Model]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Gemma2ForCausalLM": _gemma2,
    "MixtralForCausalLM": _mixtral,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "DeepseekV2ForCausalLM": lambda raw, name: _deepseek(raw, name, router_bias=False),
    "DeepseekV3ForCausalLM": lambda raw, name: _deepseek(raw, name, router_bias=True),
}


# -- fields ------------------------------------------------------------------------------------------------------------


def _size(raw: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = raw.get(field)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SIZE:
        raise ValueError(f"config.json: {field} is {value!r}; must be a whole number from 1 to {MAX_SIZE}")
    return value


def _flag(raw: Mapping[str, Any], field: str, default: bool) -> bool:
    value = raw.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {field} is {value!r}; allowed: true, false")
    return value


def _dtype(raw: Mapping[str, Any]) -> str:
    value = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
    if value not in DTYPE_BYTES:
        raise ValueError(f"config.json: torch_dtype is {value!r}; allowed: {', '.join(DTYPE_BYTES)}")
    return str(value)


def _quantization(raw: Mapping[str, Any]) -> Quantization | None:
    given = raw.get("quantization_config")
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    if method == "fp8":
        block = given.get("weight_block_size")
        if block is None:
            return FORMATS["fp8"]
        if not isinstance(block, list) or len(block) != 2 or not all(isinstance(b, int) and b > 0 for b in block):
            raise ValueError(f"config.json: quantization_config.weight_block_size is {block!r}; must be two sizes")
        return Quantization(name="fp8-block", bits=8, block=(block[0], block[1]), scale_bytes=4)
    if method in ("awq", "gptq"):
        bits, group = given.get("bits"), given.get("group_size")
        if bits not in (4, 8) or not isinstance(group, int):
            raise ValueError(
                f"config.json: quantization_config has bits {bits!r}, group_size {group!r}; allowed: 4 or 8, a number"
            )
        return Quantization(name=method, bits=bits, block=(1, max(0, group)), scale_bytes=2 + bits / 8)
    allowed = "fp8, awq, gptq, or none"
    raise ValueError(f"config.json: quantization_config.quant_method is {method!r}; allowed: {allowed}")
