"""Stages of a pipeline, and ranks that share contexts, make the tokens that one process makes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.core.plan import Admit, Slice, StepPlan
from shoal.core.request import RequestSpec, Sampling
from shoal.engine import main
from shoal.engine.config import EngineConfig
from shoal.engine.parallel.group import RankFailed
from tests.engine.parallel.test_tensor_parallel import FAMILIES, requests
from tests.support.drive import make_scheduler, run_requests
from tests.support.ranks import ranks
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.torch, pytest.mark.processes]

LLAMA, MISTRAL, QWEN2, QWEN3 = (variation for _, variation in FAMILIES.values())
LAYOUTS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "three stages, untied": (1, 1, 3, QWEN2),
    "three shares, untied, uneven inner size": (1, 3, 1, QWEN2),
    "contexts and heads": (2, 2, 1, MISTRAL),
    "heads and stages": (2, 1, 2, LLAMA),
    "contexts and stages": (1, 2, 2, QWEN3),
}


@pytest.mark.parametrize(("tp", "cp", "pp", "variation"), LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_makes_the_same_tokens(
    tp: int, cp: int, pp: int, variation: dict[str, Any], tmp_path: Path, new_runner: Callable[..., Any]
) -> None:
    folder = make_tiny_model(tmp_path / "model", num_layers=4, **variation)
    one = new_runner(folder)
    expected = run_requests(one, make_scheduler(one, max_prefill_chunk=61), requests())
    layout = {"tensor_parallel_size": tp, "context_parallel_size": cp, "pipeline_parallel_size": pp}
    with ranks(folder, **layout) as several:
        limits = {"num_stages": pp, "max_steps_in_flight": pp, "max_prefill_chunk": 61}
        found = run_requests(several, make_scheduler(several, **limits), requests())
        assert several.moved_bytes > 0
        assert several.block_tokens == 16 * cp
        if pp > 1:
            assert all(ns > 0 for ns in several.stage_ns)
    for id, outcome in expected.items():
        assert found[id].tokens == outcome.tokens, id
        for one_score, other in zip(outcome.prompt_logprobs, found[id].prompt_logprobs, strict=True):
            assert other.logprob == pytest.approx(one_score.logprob, abs=1e-3)


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_a_context_that_no_rank_has_room_for_is_answered(
    tmp_path: Path, new_runner: Callable[..., Any], kernels: str
) -> None:
    """Ten blocks of 16 tokens a rank: 316 tokens are twice what a rank holds. Beside it, and after it, others."""
    folder = make_tiny_model(tmp_path / "model")
    greedy = Sampling(temperature=0)
    long = RequestSpec(id="long", prompt=tuple(7 * n % 269 for n in range(280)), max_tokens=36, sampling=greedy)
    short = [RequestSpec(id=f"{n}", prompt=long.prompt[: 40 * n + 1], max_tokens=9, sampling=greedy) for n in range(4)]
    one = new_runner(folder, kernels=kernels)
    expected = run_requests(one, make_scheduler(one), [long, *short])
    with ranks(folder, context_parallel_size=2, kv_cache_bytes=2 * 10 * 8192, kernels=kernels) as two:
        assert (two.num_blocks, two.block_tokens, two.max_model_len) == (10, 32, 320)
        found = run_requests(two, make_scheduler(two), [long, *short])
    assert {id: outcome.tokens for id, outcome in found.items()} == {id: o.tokens for id, o in expected.items()}


def test_stages_without_kernels(tiny: Path, new_runner: Callable[..., Any]) -> None:
    """By torch.distributed."""
    one = new_runner(tiny, kernels="off")
    expected = run_requests(one, make_scheduler(one), requests())
    with ranks(tiny, pipeline_parallel_size=2, kernels="off") as two:
        found = run_requests(two, make_scheduler(two, num_stages=2, max_steps_in_flight=2), requests())
    assert {id: outcome.tokens for id, outcome in found.items()} == {id: o.tokens for id, o in expected.items()}


def plan(step: int, *slices: Slice, admits: tuple[Admit, ...] = ()) -> StepPlan:
    return StepPlan(step, [], list(admits), list(slices), sum(piece.count for piece in slices), 0)


def test_the_first_stage_goes_on_while_the_last_one_computes(tiny: Path) -> None:
    """Two prompts of 200 tokens: both are launched before the first result is asked for, and the results are whole."""
    prompt = tuple(7 * n % 269 for n in range(200))
    admits = [Admit(name, prompt, 200, 0, tuple(range(13 * n, 13 * n + 13)), Sampling(temperature=0), 0, 0, ())
              for n, name in enumerate("ab")]  # fmt: skip
    with ranks(tiny, pipeline_parallel_size=2) as two:
        two.launch(plan(1, Slice("a", 0, 200, (), -1, True), admits=(admits[0],)))
        two.launch(plan(2, Slice("b", 0, 200, (), -1, True), admits=(admits[1],)))
        first, second = two.collect(), two.collect()
        assert (first.step, second.step) == (1, 2)
        assert first.tokens == second.tokens and len(first.tokens) == 1
        assert first.busy_ns > 0 and first.latency_ns > first.busy_ns
        two.launch(plan(3, Slice("a", 200, 1, (), -1, True), Slice("b", 200, 1, (), -1, True)))
        third = two.collect()
    assert third.tokens[0] == third.tokens[1], "both stages know what was sampled"


def test_a_stage_that_dies_ends_the_group(tiny: Path) -> None:
    admit = Admit("a", (1, 2, 3), 3, 0, tuple(range(30)), Sampling(temperature=0), 0, 0, ())
    with ranks(tiny, pipeline_parallel_size=2) as two:
        two.launch(plan(1, Slice("a", 0, 3, (), -1, True), admits=(admit,)))
        two.collect()
        os.kill(two.group.pids[0], signal.SIGKILL)
        began_s = time.monotonic()

        def go_on() -> None:
            for step in range(2, 400):
                two.launch(plan(step, Slice("a", step + 1, 1, (), -1, True)))
                two.collect()

        with pytest.raises(RankFailed, match="rank 1 of tp=1 cp=1 pp=2: was killed by SIGKILL"):
            go_on()
        assert time.monotonic() - began_s < 3.0


def test_an_engine_of_two_stages_plans_for_two(tiny: Path) -> None:
    """And counts a block's bytes in both."""
    parts = main.build(
        tiny, EngineConfig(dtype="float32", threads=2, pipeline_parallel_size=2, peer_address=""), "tiny"
    )
    try:
        limits = parts.scheduler.limits
        assert (limits.num_stages, limits.max_steps_in_flight, limits.block_bytes) == (2, 2, 8192)
    finally:
        assert parts.group is not None
        parts.group.close()


def test_contexts_are_not_shared_where_bits_must_not_change(tiny: Path) -> None:
    config = EngineConfig(dtype="float32", threads=2, context_parallel_size=2, batch_invariant=True)
    with pytest.raises(ValueError, match=r"engine\.batch_invariant is true; with tp=1 cp=2 pp=1"):
        main.build(tiny, config, "tiny")
