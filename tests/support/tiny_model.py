"""A real model folder in miniature: random float32 weights, a byte-level tokenizer, a chat template.

Made with numpy alone, so that tests of whole processes need no torch in the test process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END, TURN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # ids 0, 1, 2; TURN_END ends a sequence
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "e r", "a n", "o n", "Ġ a", "l l", "r e"]
NUM_TOKENS = 3 + 256 + len(MERGES)
VOCAB_SIZE = 288  # padded, as real checkpoints are

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_NAMES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_NAMES["qwen3"] = "Qwen3ForCausalLM"


def make_tiny_model(
    folder: Path,
    architecture: str = "llama",
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    hidden_size: int = 64,
    num_layers: int = 2,
    tied: bool = True,
    max_position: int = 512,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write the folder unless it is there already. `config` adds or overrides keys of config.json."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "architectures": [_NAMES[architecture]],
        "model_type": architecture,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        **config,
    }
    save_file(_weights(settings, architecture, seed), folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", _tokenizer_settings())
    _write(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
    _write(folder / "config.json", settings)  # last: its presence says that the folder is complete
    return folder


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def _weights(settings: dict[str, Any], architecture: str, seed: int) -> dict[str, np.ndarray]:
    """Variances chosen so that layers outweigh the embedding they add to: greedy output then wanders, not repeats."""
    rng = np.random.default_rng(seed)
    hidden, inner, dim = settings["hidden_size"], settings["intermediate_size"], settings["head_dim"]
    heads, kv_heads = settings["num_attention_heads"] * dim, settings["num_key_value_heads"] * dim

    def matrix(rows: int, cols: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((rows, cols)) * gain / np.sqrt(cols)).astype(np.float32)

    def near_one(size: int) -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)

    def vocabulary() -> np.ndarray:
        table = matrix(settings["vocab_size"], hidden, gain=4.0)
        table[NUM_TOKENS:] = 0  # ids that the tokenizer does not know: unlikely, as in real checkpoints
        return table

    def bias(name: str, rows: int, *, of: bool) -> None:
        if of:
            weights[f"{name}.bias"] = (0.3 * rng.standard_normal(rows)).astype(np.float32)

    attention_bias, mlp_bias = bool(settings.get("attention_bias")), bool(settings.get("mlp_bias"))
    weights = {"model.embed_tokens.weight": vocabulary()}
    for layer in range(settings["num_hidden_layers"]):
        at, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            weights[f"{at}.{name}_proj.weight"] = matrix(rows, hidden, gain=1.5)
            bias(f"{at}.{name}_proj", rows, of=attention_bias or architecture == "qwen2")
        if architecture == "qwen3":
            weights[f"{at}.q_norm.weight"] = near_one(dim)
            weights[f"{at}.k_norm.weight"] = near_one(dim)
        weights[f"{at}.o_proj.weight"] = matrix(hidden, heads, gain=3.0)
        bias(f"{at}.o_proj", hidden, of=attention_bias)
        weights[f"{mlp}.gate_proj.weight"] = matrix(inner, hidden, gain=1.5)
        weights[f"{mlp}.up_proj.weight"] = matrix(inner, hidden, gain=1.5)
        weights[f"{mlp}.down_proj.weight"] = matrix(hidden, inner, gain=3.0)
        for name, rows in (("gate", inner), ("up", inner), ("down", hidden)):
            bias(f"{mlp}.{name}_proj", rows, of=mlp_bias)
        weights[f"model.layers.{layer}.input_layernorm.weight"] = near_one(hidden)
        weights[f"model.layers.{layer}.post_attention_layernorm.weight"] = near_one(hidden)
    weights["model.norm.weight"] = near_one(hidden)
    if not settings["tie_word_embeddings"]:
        weights["lm_head.weight"] = vocabulary()
    return weights


def _tokenizer() -> Tokenizer:
    pieces = [END, TURN, TURN_END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [merge.replace(" ", "") for merge in MERGES]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[tuple(merge.split(" ")) for merge in MERGES],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in (END, TURN, TURN_END)])
    return tokenizer


def _tokenizer_settings() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": TURN,
        "eos_token": TURN_END,
        "pad_token": END,
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
