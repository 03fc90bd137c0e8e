"""One random stream per request, indexed by position: the same tokens whoever shares the batch, however it is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.core.request import RequestSpec, Sampling
from shoal.engine import sample as sample_module
from shoal.engine.loop import Runner
from tests.support.drive import Outcome, make_scheduler, run_requests

pytestmark = pytest.mark.torch

PROMPT = tuple(b + 3 for b in b"The sea")  # any ids
NUM_TOKENS = 24
SAMPLING = Sampling(temperature=0.8, seed=42)


@pytest.fixture(scope="module")
def second_runner(tiny: Path, new_runner: Callable[..., Runner]) -> Runner:
    return new_runner(tiny)


@pytest.fixture(scope="module")
def tiered_runner(tiny: Path, new_runner: Callable[..., Runner]) -> Runner:
    """With main memory for eight blocks of preempted requests."""
    return new_runner(tiny, host_cache_bytes=8 * 8192)


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[tuple[int, int, int], set[float]]]:
    """The uniform numbers drawn for token 100, by (seed, choice, position)."""
    seen: dict[tuple[int, int, int], set[float]] = {}
    real = sample_module.noise_keys

    def spy(*columns: torch.Tensor) -> torch.Tensor:
        keys = real(*columns)
        noise = sample_module.gumbel(keys, torch.tensor([100]))[:, 0].tolist()
        for where, value in zip(zip(*(column.tolist() for column in columns), strict=True), noise, strict=True):
            seen.setdefault(where, set()).add(value)
        return keys

    monkeypatch.setattr(sample_module, "noise_keys", spy)
    yield seen
    assert all(len(values) == 1 for values in seen.values()), "one position drew two numbers"


def request(name: str = "A", **changes: object) -> RequestSpec:
    settings = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "sampling": SAMPLING, **changes}
    return RequestSpec(id=name, **settings)


def neighbours(count: int, **changes: object) -> list[RequestSpec]:
    return [
        request(f"n{n}", prompt=tuple(range(3 + n, 40 + 9 * n)), sampling=Sampling(seed=1000 + n, top_p=0.9), **changes)
        for n in range(count)
    ]


def run(runner: Runner, specs: list[RequestSpec], later: dict | None = None, **limits: Any) -> dict[str, Outcome]:
    scheduler = make_scheduler(runner, prefix_caching=False, **limits)
    return run_requests(runner, scheduler, specs, later=later)


@pytest.fixture(scope="module")
def alone(tiny_runner: Runner) -> list[int]:
    tokens = run(tiny_runner, [request()])["A"].tokens
    assert len(set(tokens)) > 10
    return tokens


def test_api_06_with_neighbours_in_any_order(tiny_runner: Runner, alone: list[int]) -> None:
    assert run(tiny_runner, [request(), *neighbours(3)])["A"].tokens == alone
    assert run(tiny_runner, [*reversed(neighbours(3)), request()])["A"].tokens == alone


def test_api_06_twice_in_one_batch(tiny_runner: Runner, alone: list[int]) -> None:
    outcomes = run(tiny_runner, [request("A"), request("B"), request("C", sampling=Sampling(temperature=0.8, seed=43))])
    assert outcomes["A"].tokens == outcomes["B"].tokens == alone
    assert outcomes["C"].tokens != alone


def test_api_06_in_chunks_of_any_size(tiny_runner: Runner, alone: list[int]) -> None:
    for chunk in (1, 3, 5):
        assert run(tiny_runner, [request(), *neighbours(2)], max_prefill_chunk=chunk)["A"].tokens == alone


def test_api_06_with_two_steps_in_flight(tiny_runner: Runner, alone: list[int]) -> None:
    assert run(tiny_runner, [request(), *neighbours(3)], max_steps_in_flight=2)["A"].tokens == alone


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_api_06_preempted_at_token_8(
    tiered_runner: Runner, alone: list[int], steps_in_flight: int, preemption: str
) -> None:
    scheduler = make_scheduler(
        tiered_runner,
        prefix_caching=False,
        max_num_seqs=1,
        max_steps_in_flight=steps_in_flight,
        preemption=preemption,
    )
    urgent = request("urgent", prompt=PROMPT[::-1])
    outcome = run_requests(tiered_runner, scheduler, [request(priority=1)], later={9: [urgent]})["A"]
    assert (outcome.parks, outcome.preemptions) == ((1, 0) if preemption == "swap" else (0, 1))
    assert (scheduler.view().recomputed_tokens == 0) == (preemption == "swap")
    assert outcome.tokens == alone


def test_api_06_replayed_on_a_second_replica_after_8_tokens(second_runner: Runner, alone: list[int]) -> None:
    """What the gateway sends after a replica died: the same request with the delivered tokens as output."""
    outcome = run_requests(second_runner, make_scheduler(second_runner), [request(output=tuple(alone[:8]))])["A"]
    assert outcome.tokens == alone[8:]


def test_api_06_a_draw_depends_only_on_seed_choice_and_position(
    tiny_runner: Runner, alone: list[int], drawn: dict[tuple[int, int, int], set[float]]
) -> None:
    run(tiny_runner, [request(), *neighbours(2)])
    run(tiny_runner, [request("other prompt, same length", prompt=PROMPT[::-1]), request("choice", choice=1)])
    places = [(42, 0, len(PROMPT) + index) for index in range(NUM_TOKENS)]
    assert all(len(drawn[place]) == 1 for place in places)
    assert len({*drawn[places[0]], *drawn[places[1]], *drawn[(42, 1, len(PROMPT))]}) == 3


def test_choices_of_one_request_differ_and_share_the_prompt(tiny_runner: Runner) -> None:
    prompt = tuple(range(3, 60))
    choices = [request(f"r.{n}", prompt=prompt, choice=n, leader=None if n == 0 else "r.0") for n in range(4)]
    outcomes = run_requests(tiny_runner, make_scheduler(tiny_runner), choices)
    assert len({tuple(outcome.tokens) for outcome in outcomes.values()}) == 4
    for choice in choices:
        again = run(tiny_runner, [request("again", prompt=prompt, choice=choice.choice)])["again"]
        assert outcomes[choice.id].tokens == again.tokens


def test_penalties_and_min_tokens_survive_preemption_and_replay(tiny_runner: Runner, second_runner: Runner) -> None:
    sampling = Sampling(
        temperature=0.7, seed=7, top_k=20, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5
    )
    common = {"sampling": sampling, "min_tokens": 12, "stop_token_ids": tuple(range(0, 288, 7))}
    whole = run(tiny_runner, [request(**common)])["A"].tokens
    assert len(whole) >= 12
    for steps_in_flight in (1, 2):
        outcomes = run(
            tiny_runner,
            [request(**common, priority=1)],
            later={6: [request("urgent")]},
            max_num_seqs=1,
            max_steps_in_flight=steps_in_flight,
        )
        assert outcomes["A"].preemptions == 1
        assert outcomes["A"].tokens == whole
    replayed = run_requests(second_runner, make_scheduler(second_runner), [request(**common, output=tuple(whole[:5]))])
    assert replayed["A"].tokens == whole[5:]


def test_seeds_of_64_bits_with_and_without_sign_are_one_seed(tiny_runner: Runner) -> None:
    signed, unsigned, other = (
        run(tiny_runner, [request(sampling=Sampling(seed=seed))])["A"].tokens for seed in (-1, 2**64 - 1, 2**63)
    )
    assert signed == unsigned != other
