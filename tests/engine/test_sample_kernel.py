"""The sampling kernel against the version in torch: the same tokens, whatever is asked for.

test_sample.py tests the distribution, with the kernel wherever there is one; so what is equal to it is right as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shoal.engine.config import EngineConfig
from shoal.engine.device import choose
from shoal.engine.sample import sample
from tests.engine.test_sample import make_batch

pytestmark = pytest.mark.torch

KERNEL = choose(EngineConfig(device="cpu", dtype="float32", threads=2))
TORCH = choose(EngineConfig(device="cpu", dtype="float32", threads=1, kernels="off"))
needs_kernel = pytest.mark.skipif(KERNEL.kernels is None, reason="no C++ compiler")

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1e-4, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.999},
    {"top_p": 1e-6},
    {"top_k": 1},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 4000, "top_p": 0.95},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 1.3, "top_k": 50, "top_p": 0.7, "min_p": 0.01},
]


def both(logits: torch.Tensor, **settings: Any) -> tuple[list[int], list[int]]:
    """Tokens by the kernel and by torch."""
    batch = make_batch(len(logits), **settings)
    return tuple(sample(logits.clone(), batch, device).tolist() for device in (KERNEL, TORCH))  # type: ignore[return-value]


@needs_kernel
@pytest.mark.parametrize("vocab_size", [1, 7, 64, 1000, 49_152 + 3])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_equal_tokens(setting: dict[str, Any], vocab_size: int) -> None:
    """Flat rows and steep ones. Sizes that are no multiple of a vector's lanes too."""
    chance = torch.Generator().manual_seed(vocab_size)
    spread = torch.linspace(0.1, 6, 24).unsqueeze(1)
    logits = torch.randn((24, vocab_size), generator=chance) * spread
    ours, theirs = both(logits, **setting, seed=np.arange(24) - 12, choice=np.arange(24) % 3, position=np.arange(24))
    assert ours == theirs


@needs_kernel
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_equal_tokens_among_equal_logits(setting: dict[str, Any]) -> None:
    """As bfloat16 weights give them: whole groups of tokens stay or go."""
    logits = (torch.randn((32, 3000), generator=torch.Generator().manual_seed(3)) * 3).round()
    ours, theirs = both(logits, **setting)
    assert ours == theirs


@needs_kernel
def test_every_row_has_its_own_settings() -> None:
    chance = np.random.default_rng(4)
    logits = torch.randn((96, 5000), generator=torch.Generator().manual_seed(4)) * 3
    columns = {
        "temperature": chance.choice([0, 0.3, 1], 96),
        "top_p": chance.choice([1, 0.9, 0.3], 96),
        "top_k": chance.choice([0, 3, 400, 5000, 9000], 96),
        "min_p": chance.choice([0, 0.02], 96),
        "position": chance.integers(0, 10**6, 96),
    }
    ours, theirs = both(logits, **columns)
    assert ours == theirs


@needs_kernel
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_banned_token_is_never_drawn(setting: dict[str, Any]) -> None:
    logits = torch.zeros((64, 40))
    logits[:, :30] = -torch.inf
    ours, theirs = both(logits, **setting)
    assert ours == theirs
    assert min(ours) >= 30


@needs_kernel
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_logits_that_are_no_numbers_give_some_token(value: float, temperature: float) -> None:
    batch = make_batch(2, temperature=temperature, top_p=0.9)
    for logits in (torch.full((2, 50), value), torch.where(torch.arange(50) == 7, value, torch.zeros((2, 50)))):
        assert all(0 <= token < 50 for token in sample(logits, batch, KERNEL).tolist())


@needs_kernel
def test_of_equally_likely_tokens_the_first_is_greedy() -> None:
    logits = torch.zeros((3, 5000))
    logits[1, [4999, 1030, 1031]] = 1
    logits[2, 4999] = 1
    assert both(logits, temperature=0) == ([0, 1030, 4999],) * 2
