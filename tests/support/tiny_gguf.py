"""A GGUF file of the Llama family in miniature, and a wheel around it, as the default model comes in one."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from shoal.fetch.wheel import WheelFile
from tests.support.tiny_model import MERGES

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, FFN, NUM_LAYERS = 4, 2, 16, 64, 128, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = "{% for message in messages %}\n{{ message.content }}\r\n{% endfor %}é"
MEMBER = "tiny_gguf_model/tiny.gguf"


def tokens() -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = [chr(byte) for byte in printable] + [chr(0x100 + n) for n in range(256 - len(printable))]
    return SPECIAL + alphabet + [merge.replace(" ", "") for merge in MERGES]


def weights() -> dict[str, np.ndarray]:
    """float32, by Hugging Face's names and in its row order."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (len(tokens()), HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm": (HIDDEN,),
            f"{prefix}.self_attn.q_proj": (NUM_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj": (HIDDEN, NUM_HEADS * HEAD_DIM),
            f"{prefix}.post_attention_layernorm": (HIDDEN,),
            f"{prefix}.mlp.gate_proj": (FFN, HIDDEN),
            f"{prefix}.mlp.up_proj": (FFN, HIDDEN),
            f"{prefix}.mlp.down_proj": (HIDDEN, FFN),
        }
    return {f"{name}.weight": rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """How llama.cpp stores wq and wk: in each head, row r of the first half is followed by row r of the second."""
    heads = []
    for head in np.split(weight, num_heads):
        half = len(head) // 2
        rows = [row for pair in zip(head[:half], head[half:], strict=True) for row in pair]
        heads.append(np.stack(rows))
    return np.concatenate(heads)


def make_gguf(path: Path, *, architecture: str = "llama", pre: str = "smollm", extra_tensor: str = "") -> Path:
    """Projections in Q8_0, embedding and norms in float32."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(NUM_LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_vocab_size(len(tokens()))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens()) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, weight in weights().items():
        _add_tensor(writer, name, weight)
    if extra_tensor:
        writer.add_tensor(extra_tensor, np.zeros(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensor(writer: Any, name: str, weight: np.ndarray) -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, NUM_LAYERS)
    stored = names.get_name(name, try_suffixes=(".weight",))
    if "q_proj" in name or "k_proj" in name:
        weight = interleave(weight, NUM_HEADS if "q_proj" in name else NUM_KV_HEADS)
    if weight.ndim == 2 and "embed" not in name:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(stored, gguf.quantize(weight, kind), raw_dtype=kind)
    else:
        writer.add_tensor(stored, weight)


def make_wheel(folder: Path, gguf_file: Path) -> WheelFile:
    """A wheel in `folder` for pip's --find-links, and its pinned description."""
    info = "tiny_gguf_model-1.0.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / "tiny_gguf_model-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.write(gguf_file, MEMBER)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    content = gguf_file.read_bytes()
    return WheelFile("tiny-gguf-model==1.0", MEMBER, len(content), hashlib.sha256(content).hexdigest())
