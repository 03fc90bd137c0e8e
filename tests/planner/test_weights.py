"""Weights by part, against what model hubs publish of the same checkpoints."""

from __future__ import annotations

import pytest

from shoal.planner import catalogue, weights
from shoal.planner.model import FORMATS, read
from shoal.planner.weights import Precision

# Sum of the tensors' bytes, as each repository's model.safetensors.index.json says it (metadata.total_size).
INDEX_BYTES = {
    "llama-3.1-8b": 16_060_522_496,
    "llama-3.1-70b": 141_107_412_992,
    "llama-3.1-405b": 811_706_777_600,
    "qwen2.5-7b": 15_231_233_024,
    "qwen2.5-72b": 145_412_407_296,
    "mistral-7b-v0.1": 14_483_464_192,
    "mistral-7b": 14_496_047_104,
    "gemma-2-27b": 54_454_256_640,
}


@pytest.mark.parametrize("name", catalogue.models())
def test_parameters_are_as_many_as_the_hub_counts(name: str) -> None:
    assert weights.parameters(catalogue.model(name)) == catalogue.models()[name]["parameters"]


@pytest.mark.parametrize("name", INDEX_BYTES)
def test_bytes_are_those_of_the_checkpoints_index(name: str) -> None:
    model = catalogue.model(name)
    found = weights.parts(model, Precision(model.dtype, model.quantization))
    assert weights.total_bytes(found) == INDEX_BYTES[name]
    assert sum(part.parameters for part in found.values()) == weights.parameters(model)


def test_deepseek_v3_in_each_of_its_formats() -> None:
    """huggingface.co/api/models/deepseek-ai/DeepSeek-V3, safetensors.parameters: with the drafting module."""
    model = catalogue.model("deepseek-v3")
    counts = weights.bytes_by_dtype(weights.tensors(model, draft=True), model.quantization)
    assert counts == {"quantized": 680_571_043_840, "16 bits": 3_918_786_560, "float32": 41_555_600}
    whole = weights.parts(model, Precision("bfloat16", model.quantization), draft=True)
    assert weights.total_bytes(whole) == 680_571_043_840 + 2 * 3_918_786_560 + 4 * 41_555_600


def test_deepseek_v3_activates_37_billion_parameters() -> None:
    """Its report, section 4.2: 37 B of 671 B for each token (README_WEIGHTS.md: 36.7 B, 0.9 B of them the output)."""
    model = catalogue.model("deepseek-v3")
    active = (weights.token_flops(model) + weights.logit_flops(model)) / 2
    assert active == pytest.approx(36.7e9, rel=0.01)


def test_parts_of_a_small_model_by_hand() -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 8, "intermediate_size": 16,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
        "max_position_embeddings": 64,
    }  # fmt: skip
    found = weights.parts(read(config, "small"), Precision("float32"))
    assert {name: part.parameters for name, part in found.items()} == {
        "embedding": 100 * 8,
        "attention": 3 * (16 * 8 + 2 * 8 * 8 + 8 * 16),
        "mlp": 3 * 3 * 16 * 8,
        "experts": 0,
        "norms": 3 * 2 * 8 + 8,
        "logits": 100 * 8,
    }
    tied = weights.parts(read({**config, "tie_word_embeddings": True}, "small"), Precision("float32"))
    assert tied["logits"].num_bytes == 0
    assert tied["embedding"].num_bytes == 4 * 800


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32])
def test_ranks_split_the_matrices_and_share_kv_heads_and_norms(tp: int) -> None:
    model = catalogue.model("llama-3.1-8b")
    whole, mine = (weights.parts(model, Precision("bfloat16"), tp=ranks) for ranks in (1, tp))
    for part in ("embedding", "mlp", "logits"):
        assert mine[part].num_bytes * tp == whole[part].num_bytes
    assert mine["norms"] == whole["norms"]
    keys = 32 * 2 * 2 * 128 * 4096 * max(1, 8 // tp)  # of keys and values, 128 numbers a head
    queries = 32 * 2 * 2 * 4096 * 4096 // tp
    assert mine["attention"].num_bytes == keys + queries


def test_stages_together_are_the_model() -> None:
    model, precision = catalogue.model("qwen3-30b-a3b"), Precision("bfloat16")
    whole = weights.parts(model, precision)
    stages = [weights.parts(model, precision, layers=layers) for layers in (range(20), range(20, 48))]
    for part, total in whole.items():
        assert sum(stage[part].num_bytes for stage in stages) == total.num_bytes
    assert stages[1]["embedding"].num_bytes == stages[0]["logits"].num_bytes == 0


def test_a_step_reads_the_experts_that_its_tokens_take() -> None:
    model = catalogue.model("mixtral-8x7b")  # 2 of 8 experts
    read = weights.Read(model, Precision("bfloat16"))
    found = weights.parts(model, Precision("bfloat16"))
    router = 32 * 8 * 4096 * 2
    experts = found["experts"].num_bytes - router
    rest = weights.total_bytes(found) - found["embedding"].num_bytes - experts
    assert read.num_bytes(1) == pytest.approx(rest + experts * 2 / 8)
    assert read.num_bytes(2) == pytest.approx(rest + experts * (1 - (3 / 4) ** 2))
    assert read.num_bytes(1000) == pytest.approx(rest + experts)


@pytest.mark.parametrize(
    ("name", "bytes_each"),
    [
        ("int8", 1 + 4 / 4096),
        ("fp8", 1 + 4 / 4096),
        ("fp8-block", 1 + 4 / 128**2),
        ("int4", 0.5 + 2.5 / 128),
    ],
)
def test_a_quantized_matrix_has_its_scales(name: str, bytes_each: float) -> None:
    assert FORMATS[name].num_bytes(512, 4096) == 512 * 4096 * bytes_each


def test_embedding_and_output_stay_as_they_are_but_for_shoals_own_int8() -> None:
    model = catalogue.model("llama-3.1-8b")
    plain = 128256 * 4096 * 2
    for name in ("fp8", "int4"):
        assert weights.parts(model, Precision("bfloat16", FORMATS[name]))["logits"].num_bytes == plain
    own = weights.parts(model, Precision("bfloat16", FORMATS["int8"]))
    assert own["embedding"].num_bytes == 128256 * (4096 + 4)


def test_ranks_that_share_contexts_split_all_but_queries_keys_and_values() -> None:
    model = catalogue.model("llama-3.1-8b")
    plain, shared = (weights.parts(model, Precision("bfloat16"), tp=2, cp=cp) for cp in (1, 2))
    for part in ("embedding", "mlp", "logits"):
        assert shared[part].num_bytes * 2 == plain[part].num_bytes
    assert shared["norms"] == plain["norms"]
    output = 32 * 4096 * 4096 * 2 // 2  # of a tensor-parallel rank
    assert plain["attention"].num_bytes - shared["attention"].num_bytes == output // 2
