"""One rank's memory, and the article's rule of thumb."""

from __future__ import annotations

import dataclasses

import pytest

from shoal.planner import catalogue, layouts, weights
from shoal.planner.memory import Batch, activation_bytes, pinned_bytes, pool_bytes, rank_memory
from shoal.planner.weights import Precision

BF16 = Precision("bfloat16")


def test_a_70b_model_in_16_bits_needs_about_140_gb_for_weights_alone() -> None:
    model = catalogue.model("llama-3.1-70b")
    assert weights.total_bytes(weights.parts(model, Precision("float16"))) == pytest.approx(140e9, rel=0.01)


def test_a_pool_is_what_utilization_leaves() -> None:
    assert pool_bytes(1000, 0.9, 500, 100) == 300
    assert pool_bytes(1000, 0.5, 500, 100) == -100


def test_one_rank_by_hand() -> None:
    model = catalogue.model("llama-3.1-8b")
    found = rank_memory(model, BF16, "bfloat16", Batch(), 80 << 30, tp=4)
    assert found.weights == weights.total_bytes(weights.parts(model, BF16, tp=4))
    assert found.pool == int((80 << 30) * 0.9) - found.weights - found.activations
    block = 16 * 131_072 // 4
    assert found.pool_tokens == found.pool // block * 16
    assert found.sequence_bytes(17) == 2 * block
    assert found.num_sequences(17) == found.pool // (2 * block)
    assert found.max_context(1 << 40) == found.pool_tokens
    assert found.max_context(100) == 100


def test_context_parallel_ranks_share_a_sequence() -> None:
    model = catalogue.model("llama-3.1-8b")
    one, two = (rank_memory(model, BF16, "bfloat16", Batch(), 40 << 30, cp=cp) for cp in (1, 2))
    block = 16 * 131_072
    assert two.pool_tokens == two.pool // block * 32 > 2 * one.pool_tokens
    assert two.max_context(1 << 40) == two.pool_tokens
    assert two.sequence_bytes(64) == one.sequence_bytes(32) == 2 * block


def test_of_several_stages_the_one_with_the_least_room_counts() -> None:
    model = catalogue.model("llama-3.1-8b")
    stages = layouts.stages(model, 4)
    found = rank_memory(model, BF16, "bfloat16", Batch(), 24 << 30, stages=stages)
    each = [rank_memory(model, BF16, "bfloat16", Batch(), 24 << 30, stages=(one,)) for one in stages]
    assert found.pool_tokens == min(one.pool_tokens for one in each)


def test_activations_of_a_step_by_hand() -> None:
    """Llama-3.1-8B: 2,048 tokens of hidden state, attention's in- and output, four times the MLP's width."""
    model = catalogue.model("llama-3.1-8b")
    state = 4096 + (32 + 2 * 8) * 128 + 32 * 128
    assert activation_bytes(model, 2, Batch(max_tokens=2048, max_seqs=64)) == 2048 * (state + 4 * 14336) * 2
    many = activation_bytes(model, 2, Batch(max_tokens=512, max_seqs=512))
    assert many == 512 * (state * 2 + 2 * 4096 * 2 + 128256 * (4 + 2)), "then the logits are larger"


def test_more_tokens_more_rows_and_fewer_ranks_take_more() -> None:
    for name in catalogue.models():
        model = catalogue.model(name)
        batch = Batch(max_tokens=1024, max_seqs=64)
        one = activation_bytes(model, 2, batch)
        assert activation_bytes(model, 2, dataclasses.replace(batch, max_tokens=2048)) > one
        assert activation_bytes(model, 2, batch, tp=layouts.allowed_tp(model)[1]) < one


def test_pinned_memory_comes_in_powers_of_two() -> None:
    assert [pinned_bytes(size) for size in (0, 1, 4096, 4097, 5 << 30)] == [0, 1, 4096, 8192, 8 << 30]
