"""A GGUF file of the Llama family with a byte-level tokenizer -> a plain model folder that needs no converter to read.

Everything comes out of the file: numbers into config.json, the dequantised weights (bfloat16, Hugging Face's names
and row order) into model.safetensors, vocabulary and merges into tokenizer.json, the chat template into its own file.

Source of the format: the GGUF specification (ggml), and llama.cpp's rule that the rows of wq and wk are stored with
the two halves of each rotary pair interleaved; Hugging Face's Llama keeps the halves apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from shoal.fetch.home import ModelError

VERSION = 1  # of what is written; raise it when a folder written before must be made anew

GLOBAL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
CONTROL_TOKEN = 3  # tokenizer.ggml.token_type

# How text is cut before byte-pair merging: not in the file, only its name (tokenizer.ggml.pre).
PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}


def convert(
    gguf_path: Path, folder: Path, progress: Callable[[int, int], None], advised: Mapping[str, float | bool]
) -> None:
    """Writes the model folder's files into `folder`; `progress(done, total)` counts bytes of weights written.

    `advised`: sampling fields for generation_config.json, which a GGUF file does not hold.

    Raises ModelError when the reader is not installed or the file is of a kind that this cannot convert.
    """
    try:
        import gguf
    except ImportError as error:
        raise ModelError("converting a model needs the extra `convert`: pip install 'shoal[convert]'") from error
    reader = gguf.GGUFReader(gguf_path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    if metadata.get("general.architecture") != "llama" or metadata.get("tokenizer.ggml.model") != "gpt2":
        raise ModelError("only GGUF files of the Llama family with a byte-level tokenizer can be converted")
    tensor_names = {tensor.name for tensor in reader.tensors}
    config = model_config(metadata, tied="output.weight" not in tensor_names)
    _write_json(folder / "config.json", config)
    generation = ("bos_token_id", "eos_token_id", "pad_token_id")
    _write_json(
        folder / "generation_config.json", {key: config[key] for key in generation if key in config} | dict(advised)
    )
    _write_tokenizer(metadata, folder)
    _write_weights(reader, config, folder / "model.safetensors", progress)


def model_config(metadata: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """config.json as Hugging Face's LlamaForCausalLM reads it."""
    heads = metadata["llama.attention.head_count"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": metadata.get("llama.rope.dimension_count", metadata["llama.embedding_length"] // heads),
        "max_position_embeddings": metadata["llama.context_length"],
        "rope_theta": float(metadata.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        # Stored as float32: 1e-05 must not become 9.999999747378752e-06.
        "rms_norm_eps": float(str(np.float32(metadata["llama.attention.layer_norm_rms_epsilon"]))),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }
    for key, field in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if (token_id := metadata.get(f"tokenizer.ggml.{field}_token_id")) is not None:
            config[f"{key}_token_id"] = token_id
    return config


def _write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        raise ModelError(f"tokenizer kind {pre!r} is unknown; known: {', '.join(PRE_TOKENIZERS)}")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))

    special = {
        f"{name}_token": tokens[metadata[f"tokenizer.ggml.{field}_token_id"]]
        for name, field in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if f"tokenizer.ggml.{field}_token_id" in metadata
    }
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": metadata.get("tokenizer.ggml.add_bos_token", False),
            "additional_special_tokens": control,
            "clean_up_tokenization_spaces": False,
            "model_max_length": metadata["llama.context_length"],
            **special,
        },
    )
    if template := metadata.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")


def _write_weights(reader: Any, config: dict[str, Any], path: Path, progress: Callable[[int, int], None]) -> None:
    """Tensor by tensor, so that memory holds one of them. The layout is the safetensors format's: an 8-byte length,
    a JSON header of that length, the data. (The library writes bfloat16 only from torch, which is not loaded here.)"""
    import gguf

    rotary_heads = {"attn_q.weight": config["num_attention_heads"], "attn_k.weight": config["num_key_value_heads"]}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        start, end = end, end + 2 * int(np.prod(shape))
        header[hugging_face_name(tensor.name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in reader.tensors:
            weight = gguf.dequantize(tensor.data, tensor.tensor_type)
            if (num_heads := rotary_heads.get(tensor.name.split(".", 2)[-1])) is not None:
                weight = split_rotary_halves(weight, num_heads)
            out.write(to_bfloat16(weight).tobytes())
            progress(out.tell() - 8 - len(encoded), end)


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. Raises ModelError for a tensor not known."""
    if name in GLOBAL_TENSORS:
        return GLOBAL_TENSORS[name]
    block, _, rest = name.partition(".")
    layer, _, kind = rest.partition(".")
    if block != "blk" or kind not in LAYER_TENSORS:
        raise ModelError(f"the GGUF file holds a tensor that a plain Llama has not: {name}")
    return f"model.layers.{layer}.{LAYER_TENSORS[kind]}"


def split_rotary_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of one head, stored as pairs (0, D/2), (1, D/2+1), ...: back to 0 .. D-1. `weight`: [heads * D, hidden]."""
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The upper 16 bits of each float32, rounded to nearest, ties to even. Finite values only."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
