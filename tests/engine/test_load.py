"""Weights arrive where they belong, or the tensor at fault is named; the digest tells models apart."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file, save_file

from shoal.engine.config import EngineConfig
from shoal.engine.device import choose
from shoal.engine.loop import Runner
from shoal.engine.model.linear import Linear
from shoal.engine.model.load import load_weights, model_digest, weight_files
from shoal.engine.model.registry import read_config
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.torch

EMBEDDING = "model.embed_tokens.weight"


def load(folder: Path, dtype: str = "float32"):
    device = choose(EngineConfig(dtype=dtype, device="cpu", threads=1))
    return load_weights(folder, read_config(folder), device)


def matrix(linear: Linear) -> torch.Tensor:
    return linear.rows(torch.arange(linear.num_rows))


@pytest.fixture
def model(tmp_path: Path, tiny: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def rewrite(folder: Path, change: Callable[[dict], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder: Path) -> None:
    """Two files and an index in place of one file."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def test_fused_matrices_hold_the_parts_in_order(model: Path) -> None:
    layer = load(model).layers[1]
    tensors = load_file(model / "model.safetensors")
    parts = [torch.from_numpy(tensors[f"model.layers.1.self_attn.{part}_proj.weight"]) for part in "qkv"]
    assert torch.equal(matrix(layer.qkv), torch.cat(parts))
    parts = [torch.from_numpy(tensors[f"model.layers.1.mlp.{part}_proj.weight"]) for part in ("gate", "up")]
    assert torch.equal(matrix(layer.gate_up), torch.cat(parts))


def test_a_tied_head_is_the_embedding_itself_even_if_stored_twice(model: Path) -> None:
    rewrite(model, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING] + 1}))
    weights = load(model)
    assert weights.head is weights.embedding


def test_shards_hold_the_same_model(model: Path) -> None:
    whole = load(model)
    shard(model)
    assert len(weight_files(model)) == 2
    parts = load(model)
    assert torch.equal(matrix(whole.embedding), matrix(parts.embedding))
    assert torch.equal(matrix(whole.layers[1].down), matrix(parts.layers[1].down))


def test_weights_take_the_number_format_asked_for(model: Path) -> None:
    weights = load(model, "bfloat16")
    some = (matrix(weights.embedding), weights.norm_E, matrix(weights.layers[0].qkv))
    assert {tensor.dtype for tensor in some} == {torch.bfloat16}
    assert torch.equal(weights.norm_E, load(model).norm_E.bfloat16())


def test_a_missing_tensor_is_named(model: Path) -> None:
    rewrite(model, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"lacks tensor model\.layers\.1\.mlp\.up_proj\.weight, of shape \[128, 64\]"):
        load(model)


def test_unexpected_tensors_are_named(model: Path) -> None:
    rewrite(model, lambda tensors: tensors.update({"model.layers.7.strange.weight": tensors[EMBEDDING]}))
    with pytest.raises(ValueError, match=r"unknown to config\.json: model\.layers\.7\.strange\.weight"):
        load(model)


def test_computed_values_of_old_checkpoints_are_no_surprise(model: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(model, lambda tensors: tensors.update({name: tensors[EMBEDDING][0].copy()}))
    load(model)


def test_a_tensor_of_another_shape_is_named(model: Path) -> None:
    rewrite(model, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"][:-1].copy()}))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \[63\]; config\.json asks for \[64\]"):
        load(model)


def test_broken_and_missing_files_are_named(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a readable safetensors file"):
        load(model)
    file.unlink()
    with pytest.raises(ValueError, match=r"missing weight files: \*\.safetensors"):
        load(model)


def test_a_missing_shard_is_named(model: Path) -> None:
    shard(model)
    (model / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"missing weight files: model-00002-of-00002\.safetensors"):
        load(model)


def test_an_index_cannot_point_outside_the_folder(model: Path) -> None:
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {EMBEDDING: "../../etc/passwd"}}), encoding="utf-8")
    with pytest.raises(ValueError, match="missing weight files: passwd"):
        weight_files(model)


def test_the_digest_is_stable_and_tells_models_apart(model: Path, tmp_path: Path) -> None:
    digests = {model_digest(model)}
    moved = Path(shutil.copytree(model, tmp_path / "elsewhere"))
    assert model_digest(moved) in digests
    other_weights = make_tiny_model(tmp_path / "other", seed=1)
    other_rope = make_tiny_model(tmp_path / "rope", rope_theta=20000.0)
    digests |= {model_digest(other_weights), model_digest(other_rope)}
    raw = bytearray((moved / "model.safetensors").read_bytes())
    raw[-100] ^= 1
    (moved / "model.safetensors").write_bytes(raw)
    digests.add(model_digest(moved))
    assert len(digests) == 4
    assert all(len(digest) == 32 for digest in digests)


def test_without_a_wish_the_window_is_no_longer_than_the_pool(tiny: Path, new_runner: Callable[..., Runner]) -> None:
    assert new_runner(tiny, kv_cache_bytes=10 * 8192).max_model_len == 10 * 16  # 8 KiB a block of 16 tokens
    assert new_runner(tiny, kv_cache_bytes=10 * 8192, max_model_len=160).max_model_len == 160
    with pytest.raises(ValueError, match="max_model_len is 161; the KV pool holds 160 tokens"):
        new_runner(tiny, kv_cache_bytes=10 * 8192, max_model_len=161)


def test_the_runner_says_what_it_serves(tiny: Path, new_runner: Callable[..., Runner]) -> None:
    runner = new_runner(tiny, block_size=32)
    assert (runner.vocab_size, runner.max_model_len, runner.block_tokens) == (288, 512, 32)
    assert runner.num_blocks == (8 << 20) // (2 * 2 * 32 * 2 * 16 * 4)  # layers, k and v, tokens, kv heads, head, bytes
    assert runner.model_digest == model_digest(tiny)
    assert runner.hash_root != new_runner(tiny).hash_root, "the block size is part of the root"
    assert runner.hash_root != new_runner(tiny, block_size=32, dtype="bfloat16").hash_root


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": 513}, ("max_model_len", "513", "512")),
        ({"kv_cache_bytes": 1000}, ("kv_cache_bytes", "1000")),
        ({"device": "tpu"}, ("engine.device", "tpu", "cuda:N")),
        ({"device": "cuda:99"}, ("engine.device", "cuda:99")),
    ],
)
def test_settings_that_cannot_be_met_are_named(
    tiny: Path, new_runner: Callable[..., Runner], settings: dict, words: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError) as refusal:
        new_runner(tiny, **settings)
    assert all(word in str(refusal.value) for word in words), refusal.value


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "intermediate_size", "head_dim"])
@pytest.mark.parametrize("size", [1 << 31, (1 << 31) - 1])
def test_sizes_that_only_config_json_knows_take_no_memory(model: Path, field: str, size: int) -> None:
    """The larger one is refused as such; for the other, 8 GB and more would be asked for."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {field: size}))
    with pytest.raises(
        ValueError, match=rf"{field} is {size}" if size >= 1 << 31 else rf"asks for \[.*{size}|must be even"
    ):
        load(model)


def _with_header(folder: Path, change: Callable[[dict], object]) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header)
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[end:])


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.update(again=header[EMBEDDING]),  # two tensors in one place
        lambda header: header[EMBEDDING].update(dtype="FOO"),
        lambda header: header[EMBEDDING].update(dtype="F64"),
        lambda header: header[EMBEDDING].update(data_offsets=[-1, 5]),
        lambda header: header[EMBEDDING].update(data_offsets=[0, 1 << 62]),
        lambda header: header[EMBEDDING].update(shape=[1 << 62, 4]),
        lambda header: header[EMBEDDING].update(shape=[0, 4], data_offsets=[0, 0]),
    ],
)
def test_a_safetensors_header_that_lies_is_refused(model: Path, change: Callable[[dict], object]) -> None:
    _with_header(model, change)
    with pytest.raises(ValueError, match=r"not a readable safetensors file|has shape"):
        load(model)


@pytest.mark.parametrize("length", [0, 1 << 40, (1 << 64) - 1])
def test_a_safetensors_header_of_an_absurd_length_is_refused_unread(model: Path, length: int) -> None:
    (model / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        load(model)
