"""In bfloat16 the default model is as close to the float32 reference as transformers in bfloat16 is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from shoal.core.plan import Admit, Slice, StepPlan
from shoal.core.request import Sampling
from shoal.engine.runner import Runner
from tests.support.default_model import default_model
from tests.support.reference import all_logits, load_reference

pytestmark = pytest.mark.torch

PROMPTS = Path(__file__).parent.parent / "data" / "parity_prompts.jsonl"


def logits_of(runner: Runner, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """[tokens, vocabulary]: what the model gave while it scored the prompt."""
    seen: list[Tensor] = []
    real = runner._model.logits
    monkeypatch.setattr(runner._model, "logits", lambda hidden: seen.append(real(hidden).clone()) or seen[-1])
    runner.forget_all()
    sampling = Sampling(temperature=0, prompt_logprobs=0)
    blocks = tuple(range(-(-len(prompt) // runner.block_tokens)))
    admit = Admit("a", tuple(prompt), len(prompt), 0, blocks, sampling, 0, 0, ())
    runner.compute(StepPlan(1, [], [admit], [Slice("a", 0, len(prompt), (), -1, True)], len(prompt), 0))
    monkeypatch.undo()
    return torch.cat(seen)


def test_bfloat16_is_within_the_bound_that_transformers_shows(
    new_runner: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
    pytestconfig: pytest.Config,
) -> None:
    folder = default_model()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    if not pytestconfig.getoption("--full"):
        prompts = [prompt for prompt in prompts if 8 <= len(prompt) <= 64][::2]
    exact_model, theirs_model = load_reference(folder), load_reference(folder, torch.bfloat16)
    runner = new_runner(folder, dtype="bfloat16", kv_cache_bytes=64 << 20)
    differences: dict[str, list[Tensor]] = {"ours": [], "transformers": []}  # of each prompt: largest, mean
    for prompt in prompts:
        exact = all_logits(exact_model, prompt)
        answers = {"ours": logits_of(runner, prompt, monkeypatch), "transformers": all_logits(theirs_model, prompt)}
        for whose, logits in answers.items():
            difference = (logits - exact).abs()
            differences[whose].append(torch.stack((difference.max(), difference.mean())))
    figures = {}
    for whose, of_prompts in differences.items():
        figures[f"max_{whose}"] = float(torch.stack(of_prompts)[:, 0].max())
        figures[f"mean_{whose}"] = float(torch.stack(of_prompts)[:, 1].mean())
    for name, value in figures.items():
        record_property(f"bfloat16 logit difference to float32, {name}", round(value, 4))
        print(f"bfloat16 logit difference to float32, {name}: {value:.4f}")
    assert sum(map(len, prompts)) > 250
    assert figures["max_ours"] <= figures["max_transformers"]
    assert figures["mean_ours"] <= 1.1 * figures["mean_transformers"]
