"""Bytes of keys and values, and the largest context that a memory holds."""

from __future__ import annotations

import pytest

from shoal.planner import catalogue, kv
from shoal.planner.kv import Group
from shoal.planner.model import Model, read

# In bfloat16, over all layers: 2 · layers · KV heads · head size · 2; DeepSeek-V3: 61 · (512 + 64) · 2. Llama: Meta's
# 128 KiB a token (huggingface.co/blog/llama31: 16 GB for 128 k tokens of the 8B, 40 GB of the 70B, 63 GB of the 405B).
TOKEN_BYTES = {
    "llama-3.1-8b": 131_072,
    "llama-3.1-70b": 327_680,
    "llama-3.1-405b": 516_096,
    "qwen2.5-72b": 327_680,
    "mistral-7b": 131_072,
    "gemma-2-27b": 376_832,
    "deepseek-v3": 70_272,
}
SWA = (Group(18, 2 * 8 * 64 * 2), Group(18, 2 * 8 * 64 * 2, window=128))


@pytest.mark.parametrize("name", TOKEN_BYTES)
def test_bytes_of_a_token(name: str) -> None:
    assert kv.token_bytes(kv.groups(catalogue.model(name), "bfloat16")) == TOKEN_BYTES[name]


def config(**fields: object) -> Model:
    base = {"architectures": ["LlamaForCausalLM"], "vocab_size": 1, "intermediate_size": 1}
    return read({**base, "max_position_embeddings": 4096, **fields}, "case")


@pytest.mark.parametrize(
    ("layers", "heads", "kv_heads", "hidden", "head_dim", "kv_dtype", "wanted"),
    [
        (32, 32, 8, 4096, None, "bfloat16", 131_072),
        (36, 32, 8, 2560, 128, "bfloat16", 147_456),
        (2, 4, 4, 64, None, "float32", 1024),
    ],
)
def test_pln_01_kv_heads_count_and_the_head_size_is_read(
    layers: int, heads: int, kv_heads: int, hidden: int, head_dim: int | None, kv_dtype: str, wanted: int
) -> None:
    model = config(
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        hidden_size=hidden,
        head_dim=head_dim,
    )
    assert kv.token_bytes(kv.groups(model, kv_dtype)) == wanted


def test_pln_01_scales_of_quantized_keys_and_values_count() -> None:
    model = config(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096)
    found = kv.groups(model, "fp8", block_tokens=16, scale_bytes=4)
    assert kv.token_bytes(found, 16) == 65_664


@pytest.mark.parametrize("tp", [1, 8])
def test_pln_02_each_rank_keeps_the_whole_latent_vector(tp: int) -> None:
    assert kv.token_bytes(kv.groups(catalogue.model("deepseek-v3"), "bfloat16", tp=tp)) == 70_272


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (32, 1)])
def test_kv_heads_are_split_and_then_replicated(tp: int, heads: int) -> None:
    found = kv.groups(catalogue.model("llama-3.1-8b"), "bfloat16", tp=tp)
    assert kv.token_bytes(found) == 2 * 32 * heads * 128 * 2


@pytest.mark.parametrize(
    ("tokens", "allocator", "wanted"),
    [
        (8192, "windows", 306_708_480),
        (8192, "pages", 603_979_776),
        (100, "windows", 7_372_800),
        (100, "pages", 7_372_800),
    ],
)
def test_pln_02_windows_are_kept_as_the_allocator_keeps_them(tokens: int, allocator: str, wanted: int) -> None:
    assert kv.num_bytes(SWA, tokens, allocator=allocator) == wanted


@pytest.mark.parametrize("allocator", kv.ALLOCATORS)
@pytest.mark.parametrize("found", [SWA, kv.groups(catalogue.model("gemma-2-27b"), "bfloat16")], ids=["swa", "gemma"])
def test_pln_02_capacity_inverts_the_bytes(found: tuple[Group, ...], allocator: str) -> None:
    for tokens in range(1, 4097):
        taken = kv.num_bytes(found, tokens, allocator=allocator)
        assert kv.capacity(found, taken, allocator=allocator) == tokens
        assert kv.capacity(found, taken - 1, allocator=allocator) == tokens - 1


def test_capacity_in_whole_blocks() -> None:
    found = kv.groups(catalogue.model("llama-3.1-8b"), "bfloat16", block_tokens=16)
    block = kv.num_bytes(found, 1, block_tokens=16)
    assert block == 16 * 131_072
    assert kv.capacity(found, 10 * block + block - 1, block_tokens=16) == 160
    assert kv.capacity(found, block - 1, block_tokens=16) == 0


def test_where_all_layers_have_windows_of_their_own_any_context_fits() -> None:
    found = kv.groups(catalogue.model("mistral-7b-v0.1"), "bfloat16")
    assert found == (Group(32, 4096, 4096),)
    assert kv.capacity(found, 4096 * 131_072, allocator="windows", most=1_000_000) == 1_000_000
    assert kv.capacity(found, 4096 * 131_072, allocator="pages", most=1_000_000) == 4096


def test_every_other_layer_of_gemma_2_has_the_window() -> None:
    model = catalogue.model("gemma-2-27b")
    assert model.windows == (4096, 0) * 23
