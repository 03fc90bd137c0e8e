"""The runner against hand-made plans: order of effects, block hygiene, log-probabilities."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.core.plan import Admit, Logprobs, Slice, StepPlan
from shoal.core.request import RequestSpec, Sampling
from shoal.core.stepcost import FEATURES
from shoal.engine.config import EngineConfig
from shoal.engine.runner import Runner
from shoal.engine.warmup import largest_step
from tests.support.drive import make_scheduler, run_requests
from tests.support.reference import all_logits, load_reference

pytestmark = pytest.mark.torch

GREEDY = Sampling(temperature=0)
PROMPT = tuple((29 * place + 3) % 269 for place in range(40))


@pytest.fixture
def runner(tiny_runner: Runner) -> Runner:
    tiny_runner.forget_all()
    return tiny_runner


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Any:
    return load_reference(tiny)


def admit(name: str, tokens: tuple[int, ...], blocks: tuple[int, ...], sampling: Sampling = GREEDY) -> Admit:
    return Admit(name, tokens, len(tokens), 0, blocks, sampling, 0, 0, ())


def plan(
    step: int, slices: list[Slice], admits: list[Admit] | None = None, leaves: list[str] | None = None
) -> StepPlan:
    return StepPlan(step, leaves or [], admits or [], slices, sum(piece.count for piece in slices), 0)


def greedy_tokens(runner: Runner, name: str, prompt: tuple[int, ...], blocks: tuple[int, ...], count: int) -> list[int]:
    """One request alone, all blocks given at once."""
    first = plan(1, [Slice(name, 0, len(prompt), (), -1, True)], [admit(name, prompt, blocks)])
    tokens = runner.compute(first).tokens
    for step in range(2, count + 1):
        piece = Slice(name, len(prompt) + step - 2, 1, (), -1, True)
        tokens += runner.compute(plan(step, [piece])).tokens
    return tokens


def test_results_come_in_the_order_of_launches_and_inputs_from_steps_in_flight(runner: Runner) -> None:
    expected = greedy_tokens(runner, "alone", PROMPT, (0, 1, 2, 3), 4)
    runner.launch(plan(11, [Slice("a", 0, 40, (), -1, True)], [admit("a", PROMPT, (4, 5, 6))]))
    runner.launch(plan(12, [Slice("a", 40, 1, (), 11, True)]))
    runner.launch(plan(13, [Slice("a", 41, 1, (), 12, True)]))
    results = [runner.collect() for _ in range(3)]
    assert [result.step for result in results] == [11, 12, 13]
    assert [result.tokens[0] for result in results] == expected[:3]
    assert all(0 < result.busy_ns <= result.latency_ns for result in results)


def test_chunks_and_decodes_share_a_step(runner: Runner) -> None:
    """Tokens come one per slice that samples, in slice order; a chunk before the prompt's end samples nothing."""
    expected = greedy_tokens(runner, "alone", PROMPT, (0, 1, 2), 2)
    runner.compute(plan(2, [Slice("a", 0, 40, (), -1, True)], [admit("a", PROMPT, (3, 4, 5))]))
    chunk = runner.compute(
        plan(3, [Slice("b", 0, 33, (), -1, False), Slice("a", 40, 1, (), 2, True)], [admit("b", PROMPT, (6, 7, 8))])
    )
    assert chunk.tokens == expected[1:]
    assert runner.compute(plan(4, [Slice("b", 33, 7, (), -1, True)])).tokens == expected[:1]


def test_a_request_that_left_may_come_back_in_the_same_plan(runner: Runner) -> None:
    expected = greedy_tokens(runner, "a", PROMPT, (0, 1, 2), 3)
    known = (*PROMPT, *expected[:2])
    again = Admit("a", known, len(PROMPT), 0, (5, 6, 7), GREEDY, 0, 0, ())
    result = runner.compute(plan(9, [Slice("a", 0, 42, (), -1, True)], [again], ["a"]))
    assert result.tokens == expected[2:]


def test_a_plan_may_only_say_who_leaves(runner: Runner) -> None:
    runner.compute(plan(1, [Slice("a", 0, 40, (), -1, True)], [admit("a", PROMPT, (0, 1, 2))]))
    assert runner.compute(plan(2, [], leaves=["a"])).tokens == []
    with pytest.raises(KeyError):
        runner.compute(plan(3, [], leaves=["a"]))


def test_plans_that_break_the_contract_are_noticed(runner: Runner) -> None:
    runner.compute(plan(1, [Slice("a", 0, 40, (), -1, True)], [admit("a", PROMPT, (0, 1, 2))]))
    with pytest.raises(AssertionError, match="admitted twice"):
        runner.launch(plan(2, [], [admit("a", PROMPT, (3, 4, 5))]))
    with pytest.raises(AssertionError, match="did not sample last in step 7"):
        runner.launch(plan(2, [Slice("a", 40, 1, (), 7, True)]))
    with pytest.raises(AssertionError, match="lacks blocks"):
        runner.launch(plan(2, [Slice("a", 40, 9, (), -1, True)]))


def test_more_requests_and_longer_tables_than_at_first(tiny: Path, new_runner: Callable[..., Runner]) -> None:
    runner = new_runner(tiny)
    admits = [admit(str(n), PROMPT[: n + 1], (3 * n, 3 * n + 1, 3 * n + 2)) for n in range(40)]
    slices = [Slice(str(n), 0, n + 1, (), -1, True) for n in range(40)]
    together = runner.compute(plan(1, slices, admits)).tokens
    runner.forget_all()
    assert [greedy_tokens(runner, str(n), PROMPT[: n + 1], (0, 1, 2), 1)[0] for n in range(40)] == together
    long = PROMPT * 12
    blocks = tuple(range(30))
    assert len(greedy_tokens(runner, "long", long, blocks, 1)) == 1
    assert len(runner.compute(plan(2, [Slice("long", 480, 1, (30,), 1, True)])).tokens) == 1


# -- blocks ------------------------------------------------------------------------------------------------------------


def test_a_request_that_overflows_spoils_no_other(runner: Runner) -> None:
    """Block 0 is the bad one's: a table that were padded with it would bring its NaN into the shorter request's row."""
    expected = greedy_tokens(runner, "alone", PROMPT, (4, 5, 6), 2)
    bad = admit("bad", PROMPT * 4, (0, *range(10, 20)))
    slices = [Slice("bad", 0, 160, (), -1, True), Slice("good", 0, 40, (), -1, True)]
    runner.compute(plan(3, slices, [bad, admit("good", PROMPT, (7, 8, 9))]))
    runner._store._kv_NB2tKD[:, bad.blocks] = math.nan
    both = runner.compute(plan(4, [Slice("bad", 160, 1, (), -1, True), Slice("good", 40, 1, (), -1, True)]))
    runner._store._kv_NB2tKD.zero_()
    assert both.tokens[1:] == expected[1:]


@pytest.mark.parametrize("left_behind", [math.nan, math.inf, 1e30])
def test_what_the_last_owner_left_in_a_block_is_never_read(runner: Runner, left_behind: float) -> None:
    expected = greedy_tokens(runner, "clean", PROMPT, (0, 1, 2, 3), 20)
    runner.forget_all()
    runner._store._kv_NB2tKD.fill_(left_behind)
    admits = [admit("a", PROMPT, (5, 6, 7)), admit("long", PROMPT * 4, tuple(range(10, 30)))]  # pads the table of a
    first = plan(1, [Slice("a", 0, 40, (), -1, True), Slice("long", 0, 160, (), -1, True)], admits)
    tokens = runner.compute(first).tokens[:1]
    for step in range(2, 21):
        blocks = (8,) if step == 10 else ()  # position 48 begins a block
        slices = [Slice("a", 38 + step, 1, blocks, -1, True), Slice("long", 158 + step, 1, (), -1, True)]
        tokens += runner.compute(plan(step, slices)).tokens[:1]
    runner._store._kv_NB2tKD.zero_()
    assert tokens == expected


def test_a_prefix_hit_keeps_what_is_in_its_blocks(runner: Runner) -> None:
    expected = greedy_tokens(runner, "first", PROMPT, (0, 1, 2), 1)
    hit = Admit("second", PROMPT, len(PROMPT), 32, (0, 1, 9), GREEDY, 0, 0, ())
    assert runner.compute(plan(2, [Slice("second", 32, 8, (), -1, True)], [hit])).tokens == expected


# -- log-probabilities -------------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_model_whatever_was_done_to_the_logits(runner: Runner, reference: Any) -> None:
    settings = {
        "plain": Sampling(temperature=0, logprobs=3),
        "none": Sampling(temperature=0),
        "bent": Sampling(temperature=0.5, top_k=5, logit_bias=((7, 50.0),), repetition_penalty=2.0, logprobs=0),
        "many": Sampling(temperature=0, logprobs=20),
    }
    admits = [admit(name, PROMPT, tuple(range(3 * n, 3 * n + 3)), s) for n, (name, s) in enumerate(settings.items())]
    result = runner.compute(plan(1, [Slice(name, 0, 40, (), -1, True) for name in settings], admits))
    exact = all_logits(reference, list(PROMPT))[-1].log_softmax(-1)
    best = exact.topk(20)
    assert set(result.logprobs) == {"plain", "bent", "many"}
    assert result.tokens[2] == 7 and result.logprobs["bent"].logprob == pytest.approx(float(exact[7]), abs=1e-4)
    assert result.logprobs["bent"].top == ()
    for name, count in (("plain", 3), ("many", 20)):
        assert [token for token, _ in result.logprobs[name].top] == best.indices[:count].tolist()
        values = [value for _, value in result.logprobs[name].top]
        assert values == pytest.approx(best.values[:count].tolist(), abs=1e-4)
        assert result.logprobs[name].logprob == values[0]


def exact_prompt_logprobs(reference: Any, prompt: tuple[int, ...]) -> list[float]:
    logprobs = all_logits(reference, list(prompt)).log_softmax(-1)
    return [float(logprobs[place - 1, prompt[place]]) for place in range(1, len(prompt))]


@pytest.mark.parametrize("chunk", [0, 1, 7, 16, 39])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_api_07_prompt_logprobs_equal_teacher_forcing_at_any_seam(
    runner: Runner, reference: Any, chunk: int, max_tokens: int
) -> None:
    """Also with the prompt in the prefix cache already, and beside requests that ask for none."""
    scheduler = make_scheduler(runner, max_prefill_chunk=chunk)
    plain = RequestSpec(id="plain", prompt=PROMPT, max_tokens=2, sampling=GREEDY)
    run_requests(runner, scheduler, [plain])
    sampling = Sampling(temperature=0, prompt_logprobs=2)
    asking = RequestSpec(id="asks", prompt=PROMPT, max_tokens=max_tokens, sampling=sampling)
    outcome = run_requests(runner, scheduler, [asking, plain])["asks"]
    exact = exact_prompt_logprobs(reference, PROMPT)
    assert len(outcome.tokens) == max_tokens
    assert [entry.logprob for entry in outcome.prompt_logprobs] == pytest.approx(exact, abs=1e-4)
    assert sum(entry.logprob for entry in outcome.prompt_logprobs) == pytest.approx(sum(exact), abs=1e-4)
    assert all(len(entry.top) == 2 and entry.top[0][1] >= entry.top[1][1] for entry in outcome.prompt_logprobs)


def test_prompt_logprobs_of_a_long_prompt_and_after_preemption(runner: Runner, reference: Any) -> None:
    prompt = tuple((31 * place + 5) % 269 for place in range(300))
    asking = RequestSpec(
        id="a", prompt=prompt, max_tokens=2, sampling=Sampling(temperature=0, prompt_logprobs=0), priority=1
    )
    urgent = RequestSpec(id="urgent", prompt=PROMPT, max_tokens=2, sampling=GREEDY)
    scheduler = make_scheduler(runner, max_prefill_chunk=70, max_num_seqs=1)
    outcome = run_requests(runner, scheduler, [asking], later={2: [urgent]})["a"]
    assert outcome.preemptions == 1
    exact = exact_prompt_logprobs(reference, prompt)
    assert [entry.logprob for entry in outcome.prompt_logprobs] == pytest.approx(exact, abs=2e-4)


def test_a_prompt_of_one_token_has_no_prompt_logprobs(runner: Runner) -> None:
    asking = admit("a", (5,), (0,), Sampling(temperature=0, prompt_logprobs=1))
    assert runner.compute(plan(1, [Slice("a", 0, 1, (), -1, True)], [asking])).prompt_logprobs == {}


def test_a_seam_waits_in_the_runner_and_goes_with_its_request(runner: Runner) -> None:
    asking = admit("a", PROMPT, (0, 1, 2), Sampling(temperature=0, prompt_logprobs=0))
    first = runner.compute(plan(1, [Slice("a", 0, 10, (), -1, False)], [asking]))
    assert [type(entry) for entry in first.prompt_logprobs["a"]] == [Logprobs] * 9  # of tokens 1 .. 9
    assert set(runner._seams) == {"a"}
    runner.compute(plan(2, [], leaves=["a"]))
    assert not runner._seams


# -- start-up ----------------------------------------------------------------------------------------------------------


def test_warm_up_times_steps_and_leaves_nothing(runner: Runner) -> None:
    began = time.monotonic()
    measured = runner.warm_up()
    assert time.monotonic() - began < 6  # 2 s plus the last step, on a busy machine
    assert len(measured) >= 8
    assert all(len(features) == len(FEATURES) and ns > 0 for features, ns in measured)
    assert len({features[1] for features, _ in measured}) >= 3, "steps of several sizes"
    assert not runner._table.rows


def test_warm_up_fits_a_pool_of_any_size(tiny: Path, new_runner: Callable[..., Runner]) -> None:
    for num_blocks in (1, 2, 12):
        runner = new_runner(tiny, kv_cache_bytes=num_blocks * 8192)
        assert runner.num_blocks == num_blocks
        assert isinstance(runner.warm_up(), list)


def test_the_largest_step_can_be_computed(runner: Runner) -> None:
    config = EngineConfig(max_num_batched_tokens=300, max_prefill_chunk=128)
    largest = largest_step(config, runner.max_model_len)
    assert largest.num_tokens == 256
    assert len(runner.compute(largest).tokens) == 2
    uncapped = largest_step(EngineConfig(max_num_batched_tokens=4096, max_prefill_chunk=0), 512)
    assert uncapped.num_tokens == 4096 and {piece.count for piece in uncapped.slices} == {512}


def test_nothing_of_a_step_keeps_gradients(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight asks for them, so steps need no mode in which torch records none."""
    seen: list[torch.Tensor] = []
    real = runner._model.logits

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        seen.extend((hidden, real(hidden)))
        return seen[1]

    monkeypatch.setattr(runner._model, "logits", logits)
    runner.compute(plan(1, [Slice("a", 0, 40, (), -1, True)], [admit("a", PROMPT, (0, 1, 2))]))
    assert len(seen) == 2 and torch.is_grad_enabled()
    assert not any(tensor.requires_grad for tensor in seen)
