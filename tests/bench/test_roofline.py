"""The floor's arithmetic, worked out by hand for a model small enough for that."""

from __future__ import annotations

import pytest

from engine import Step
from rates import Pass
from roofline import Machine, Work, floor, work
from shoal.core.plan import Slice
from shoal.engine.model.config import ModelConfig, Rope

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=100,
    hidden_size=8,
    intermediate_size=16,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    norm_eps=1e-5,
    rope=Rope(),
    max_context=64,
    tied=True,
)
# qkv (8 + 4 + 4) · 8, output 8 · 8, gate and up 32 · 8, down 8 · 16: 128 + 64 + 256 + 128 = 576 numbers a layer
LAYERS, HEAD = 3 * 576, 800


def test_a_decode_reads_all_weights_and_its_own_context() -> None:
    """It attends to 10 positions, itself included; a token's key and value have 2 · 2 · 2 numbers a layer."""
    least = work(Step([Slice("a", 9, 1, (), -1, True)], 1), MODEL)
    assert least.flops == 2 * LAYERS + 2 * HEAD + 4 * 8 * 3 * 10
    assert least.bytes == 2 * (LAYERS + HEAD) + 2 * (3 * 2 * 2 * 2) * 10


def test_a_chunk_that_samples_nothing_leaves_the_output_matrix_alone() -> None:
    """Tokens 4, 5, 6 attend to 5 + 6 + 7 positions, and 7 positions are held."""
    least = work(Step([Slice("a", 4, 3, (), -1, False)], 1), MODEL)
    assert least.flops == 3 * 2 * LAYERS + 4 * 8 * 3 * 18
    assert least.bytes == 2 * LAYERS + 2 * 24 * 7


def test_each_step_waits_for_the_slower_of_arithmetic_and_memory() -> None:
    """At 1,000 FLOP/s and 100 bytes/s the steps take 5 and 1 s of arithmetic, 2 and 4 s of memory: 5 + 4."""
    slow = Machine([_pass(500.0, 16, "torch")], {"read": 50.0})
    best = Machine([_pass(1000.0, 512, "shoal"), _pass(250.0, 16, "torch")], {"read": 100.0, "copy": 70.0})
    least = floor([Work(5000, 200), Work(1000, 400)], slow, best)
    assert least.arithmetic == pytest.approx(6.0)
    assert least.memory == pytest.approx(6.0)
    assert least.roofline == pytest.approx(9.0)
    assert least.arithmetic_at_16 == pytest.approx(6000 / 500)


def _pass(flops_per_s: float, rows: int, way: str) -> Pass:
    """Of 10 weights of 1 byte that take long enough for no bandwidth to matter."""
    return Pass(way, "bfloat16", rows, 2 * rows * 10 / flops_per_s, 1.0, 10, 1, 1)
