"""Stages of a pipeline, and ranks that share contexts, make the tokens that one process makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.parallel.test_tensor_parallel import requests
from tests.support.drive import make_scheduler, run_requests
from tests.support.ranks import ranks
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.torch, pytest.mark.processes]

MODEL = {"num_heads": 8, "num_kv_heads": 4, "num_layers": 4}
LAYOUTS = {
    "two stages": (1, 1, 2),
    "three stages": (1, 1, 3),
    "two shares of a context": (1, 2, 1),
    "contexts and heads": (2, 2, 1),
    "heads and stages": (2, 1, 2),
    "contexts and stages": (1, 2, 2),
}


@pytest.mark.parametrize(("tp", "cp", "pp"), LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_makes_the_same_tokens(
    tp: int, cp: int, pp: int, tmp_path: Path, new_runner: Callable[..., Any]
) -> None:
    folder = make_tiny_model(tmp_path / "model", **MODEL)
    one = new_runner(folder)
    expected = run_requests(one, make_scheduler(one, max_prefill_chunk=61), requests())
    layout = {"tensor_parallel_size": tp, "context_parallel_size": cp, "pipeline_parallel_size": pp}
    with ranks(folder, **layout) as several:
        limits = {"num_stages": pp, "max_steps_in_flight": pp, "max_prefill_chunk": 61}
        found = run_requests(several, make_scheduler(several, **limits), requests())
        assert several.moved_bytes > 0
        assert several.block_tokens == 16 * cp
    for id, outcome in expected.items():
        assert found[id].tokens == outcome.tokens, id
        for one_score, other in zip(outcome.prompt_logprobs, found[id].prompt_logprobs, strict=True):
            assert other.logprob == pytest.approx(one_score.logprob, abs=1e-3)
