"""Each architecture, with the variations that its config.json allows, answers as transformers does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.core.request import RequestSpec, Sampling
from shoal.engine.loop import Runner
from tests.support.drive import make_scheduler, run_requests
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.torch

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIATIONS: dict[str, dict[str, Any]] = {
    "llama, 2 queries a key head, tied": {},
    "llama, 4 queries a key head, untied": {"num_kv_heads": 1, "tied": False},
    "llama, 1 query a key head, llama3 rope": {"num_kv_heads": 4, "rope_scaling": LLAMA3},
    "llama, linear rope, old spelling": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama, rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "llama, biases everywhere": {"attention_bias": True, "mlp_bias": True},
    "mistral, sliding window": {"architecture": "mistral", "num_kv_heads": 1, "sliding_window": 300},
    "qwen2, biases of q, k and v": {"architecture": "qwen2", "tied": False},
    "qwen3, head norms, wide heads": {"architecture": "qwen3", "head_dim": 32},
}


@pytest.mark.parametrize("variation", VARIATIONS.values(), ids=VARIATIONS)
def test_greedy_tokens_equal_those_of_transformers(
    variation: dict[str, Any], tmp_path: Path, new_runner: Callable[..., Runner]
) -> None:
    from tests.support.reference import greedy, load_reference

    folder = make_tiny_model(tmp_path / "model", **variation)
    runner = new_runner(folder)
    prompts = [tuple((37 * row + 11 * place) % 269 for place in range(n)) for row, n in enumerate((1, 3, 17, 100, 200))]
    specs = [
        RequestSpec(id=str(row), prompt=prompt, max_tokens=24, sampling=Sampling(temperature=0))
        for row, prompt in enumerate(prompts)
    ]
    outcomes = run_requests(runner, make_scheduler(runner, max_prefill_chunk=61), specs)
    model = load_reference(folder)
    for row, prompt in enumerate(prompts):
        tokens, margins = greedy(model, list(prompt), 24)
        sure = next((n for n, margin in enumerate(margins) if margin < 0.0005), 24)
        assert sure >= 8
        assert outcomes[str(row)].tokens[:sure] == tokens[:sure], f"prompt {row}"
