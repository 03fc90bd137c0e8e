"""The converted folder holds what the GGUF file says, in the form that Hugging Face's Llama reads."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from shoal import models
from shoal.fetch.convert import convert, split_rotary_halves, to_bfloat16
from shoal.gateway.text.template import ChatTemplate
from shoal.gateway.text.tokenizer import Tokenizer
from tests.support import tiny_gguf
from tests.support.default_model import default_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("convert")
    (root / "model").mkdir()
    convert(tiny_gguf.make_gguf(root / "tiny.gguf"), root / "model", lambda done, total: None, {"top_p": 0.9})
    return root / "model"


def read_bfloat16(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor as float32, by the file format's own rules."""
    content = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        raw = np.frombuffer(content[8 + length + start : 8 + length + end], dtype=np.uint16)
        tensors[name] = (raw.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])
    return tensors


def test_config_states_the_files_numbers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "top_p": 0.9}


def test_weights_come_back_under_the_other_names_and_in_the_other_row_order(folder: Path) -> None:
    expected = tiny_gguf.weights()
    tensors = read_bfloat16(folder)
    assert set(tensors) == set(expected)
    for name, weight in expected.items():
        # 8-bit blocks keep 1/254 of a block's largest value, bfloat16 1/256 of each.
        assert np.abs(tensors[name] - weight).max() < 0.04, name


@pytest.mark.torch
def test_the_library_reads_the_weights_file_alike(folder: Path) -> None:
    from safetensors.torch import load_file

    loaded = load_file(folder / "model.safetensors")
    for name, expected in read_bfloat16(folder).items():
        assert str(loaded[name].dtype) == "torch.bfloat16"
        np.testing.assert_array_equal(loaded[name].float().numpy(), expected)


def test_bfloat16_rounds_to_nearest_and_ties_to_even() -> None:
    bits = np.array([0x3F80_0000, 0x3F80_7FFF, 0x3F80_8000, 0x3F80_8001, 0x3F81_8000, 0xBF81_8000], dtype=np.uint32)
    assert [hex(value) for value in to_bfloat16(bits.view(np.float32))] == [
        "0x3f80",
        "0x3f80",
        "0x3f80",
        "0x3f81",
        "0x3f82",
        "0xbf82",
    ]


def test_rotary_rows_are_put_back_in_halves() -> None:
    weight = np.arange(2 * 8 * 3, dtype=np.float32).reshape(16, 3)
    np.testing.assert_array_equal(split_rotary_halves(tiny_gguf.interleave(weight, 2), 2), weight)


def test_chat_template_is_the_files_to_the_byte(folder: Path) -> None:
    assert (folder / "chat_template.jinja").read_bytes().decode() == tiny_gguf.CHAT_TEMPLATE


def test_tokenizer_cuts_digits_apart_and_keeps_special_tokens_whole(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    pieces = [tokenizer.token_text(token_id) for token_id in tokenizer.encode("<|im_start|>then 123<|im_end|>")]
    assert pieces == ["<|im_start|>", "t", "he", "n", " ", "1", "2", "3", "<|im_end|>"]
    assert tokenizer.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"architecture": "gemma"}, "only GGUF files of the Llama family"),
        ({"pre": "tekken"}, "tokenizer kind 'tekken' is unknown"),
        ({"extra_tensor": "blk.0.attn_q.bias"}, "a tensor that a plain Llama has not: blk.0.attn_q.bias"),
    ],
)
def test_what_it_cannot_convert_is_refused(tmp_path: Path, options: dict[str, str], reason: str) -> None:
    file = tiny_gguf.make_gguf(tmp_path / "other.gguf", **options)
    with pytest.raises(models.ModelError, match=reason):
        convert(file, tmp_path, lambda done, total: None, {})


def test_without_the_extra_it_says_which_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(models.ModelError, match=r"pip install 'shoal\[convert\]'"):
        convert(tmp_path / "any.gguf", tmp_path, lambda done, total: None, {})


def test_the_default_model_is_smollm2_135m_instruct() -> None:
    folder = default_model()
    config = json.loads((folder / "config.json").read_text())
    shape = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "vocab_size")
    assert [config[key] for key in shape] == [30, 9, 3, 64, 576, 49152]
    assert (config["max_position_embeddings"], config["rope_theta"], config["rms_norm_eps"]) == (8192, 100000.0, 1e-05)
    assert config["tie_word_embeddings"] is True

    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (49152, (tokenizer.token_id("<|im_end|>"),))
    assert [tokenizer.token_id(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [0, 1, 2]
    assert sum(map(tokenizer.is_special, range(tokenizer.vocab_size))) == 17
    assert ChatTemplate.load(folder).render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.torch
def test_the_default_model_knows_what_language_looks_like() -> None:
    """A wrong row order or scale keeps the shapes and ruins the predictions. Perplexity tells: 19 on this text, 96
    with the rows of wq and wk left as the file has them."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = default_model()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = (
        "The quick brown fox jumps over the lazy dog. It was the best of times, it was the worst of times. "
        "Water boils at one hundred degrees, and the capital of France is Paris."
    )
    token_ids = torch.tensor([Tokenizer.load(folder).encode(text)])
    with torch.inference_mode():
        loss = model(token_ids, labels=token_ids).loss
    assert loss.exp() < 30
