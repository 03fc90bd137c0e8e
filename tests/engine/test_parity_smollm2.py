"""The default model answers as transformers does, token for token in float32, however the scheduler cuts the work."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from shoal.core.request import RequestSpec, Sampling
from shoal.engine.loop import Runner
from tests.support.default_model import default_model
from tests.support.drive import make_scheduler, run_requests

pytestmark = pytest.mark.torch

MIN_MARGIN = 0.001
Shorter = Callable[[list["Case"], int], list["Case"]]
PATH = Path(__file__).parent.parent / "data" / "parity_prompts.jsonl"  # made by tests/data/make_parity.py


@dataclass(frozen=True, slots=True)
class Case:
    prompt: tuple[int, ...]
    answer: list[int]

    def spec(self, name: str, priority: int = 0) -> RequestSpec:
        return RequestSpec(
            id=name,
            prompt=self.prompt,
            max_tokens=len(self.answer),
            sampling=Sampling(temperature=0),
            priority=priority,
        )


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    tokenizer = Tokenizer.from_file(str(default_model() / "tokenizer.json"))
    rows = [json.loads(line) for line in PATH.read_text(encoding="utf-8").splitlines()]
    made = [Case(tuple(tokenizer.encode(row["text"], add_special_tokens=False).ids), row["tokens"]) for row in rows]
    assert [len(case.prompt) for case in made] == [row["num_prompt_tokens"] for row in rows]
    assert min(row["min_margin"] for row in rows) >= MIN_MARGIN
    return made


@pytest.fixture(scope="module")
def shorter(request: pytest.FixtureRequest) -> Shorter:
    """Leaves the longest prompts out where a mode would compute them many times; with --full it leaves none out."""
    full = request.config.getoption("--full")
    return lambda cases, num_tokens: [case for case in cases if full or len(case.prompt) <= num_tokens]


def assert_parity(runner: Runner, cases: list[Case], **limits: int | bool) -> None:
    """Runs all together."""
    specs = [case.spec(str(index)) for index, case in enumerate(cases)]
    outcomes = run_requests(runner, make_scheduler(runner, **limits), specs)
    wrong = {name: outcome.tokens for name, outcome in outcomes.items() if outcome.tokens != cases[int(name)].answer}
    assert not wrong, {name: (tokens, cases[int(name)].answer) for name, tokens in wrong.items()}


def test_the_prompts_are_many_and_of_every_length(cases: list[Case]) -> None:
    lengths = sorted(len(case.prompt) for case in cases)
    assert len(cases) >= 40
    assert lengths[0] == 1 and 1400 <= lengths[-1] <= 1500
    assert len([n for n in lengths if n > 100]) >= 6


def test_each_prompt_alone(smollm2: Runner, cases: list[Case], request: pytest.FixtureRequest) -> None:
    """A step of one row costs as much as of ten: of most answers only the beginning is computed, unless --full."""
    full = request.config.getoption("--full")
    for index, case in enumerate(cases):
        whole = full or index % 8 == 0
        assert_parity(smollm2, [case if whole else Case(case.prompt, case.answer[:3])], prefix_caching=False)


def test_all_prompts_together(smollm2: Runner, cases: list[Case]) -> None:
    assert_parity(smollm2, cases, prefix_caching=False)


@pytest.mark.parametrize(("chunk", "longest"), [(7, 64), (61, 200), (333, 400)])
def test_prompts_cut_into_odd_chunks(
    smollm2: Runner, cases: list[Case], shorter: Shorter, chunk: int, longest: int
) -> None:
    some = shorter(cases, longest)
    assert len(some) >= 30 and max(len(case.prompt) for case in some) > chunk
    assert_parity(smollm2, some, max_prefill_chunk=chunk, prefix_caching=False)


def test_prompts_whose_beginning_is_cached(smollm2: Runner, cases: list[Case], shorter: Shorter) -> None:
    some = [case for case in shorter(cases, 200) if len(case.prompt) > 16]
    scheduler = make_scheduler(smollm2)
    run_requests(smollm2, scheduler, [case.spec(f"first {index}") for index, case in enumerate(some)])
    again = run_requests(smollm2, scheduler, [case.spec(str(index)) for index, case in enumerate(some)])
    for index, case in enumerate(some):
        outcome = again[str(index)]
        assert outcome.ended is not None and outcome.ended.cached_tokens == (len(case.prompt) - 1) // 16 * 16
        assert outcome.tokens == case.answer


def test_requests_that_are_preempted(smollm2: Runner, cases: list[Case], shorter: Shorter) -> None:
    """Four at a time; urgent ones arrive while others generate, and these start over later, from known tokens."""
    some = shorter(cases, 40)
    some = some[: len(some) // 2 * 2]
    patient, urgent = some[::2], some[1::2]
    assert len(urgent) >= 10
    specs = [case.spec(f"patient {index}", priority=1) for index, case in enumerate(patient)]
    arriving = [case.spec(f"urgent {index}", priority=0) for index, case in enumerate(urgent)]
    later = {4 + 3 * first: arriving[first : first + 4] for first in range(0, len(arriving), 4)}
    outcomes = run_requests(smollm2, make_scheduler(smollm2, max_num_seqs=4, prefix_caching=False), specs, later=later)
    assert sum(outcome.preemptions for outcome in outcomes.values()) >= 8
    for kind, group in (("patient", patient), ("urgent", urgent)):
        for index, case in enumerate(group):
            assert outcomes[f"{kind} {index}"].tokens == case.answer


def test_two_steps_in_flight(smollm2: Runner, cases: list[Case], shorter: Shorter) -> None:
    assert_parity(smollm2, shorter(cases, 64), max_steps_in_flight=2, max_prefill_chunk=13, prefix_caching=False)


def test_the_recorded_answers_are_still_those_of_transformers(cases: list[Case], shorter: Shorter) -> None:
    from tests.support.reference import greedy, load_reference

    model = load_reference(default_model())
    for case in shorter(cases, 64)[::8]:
        tokens, margins = greedy(model, list(case.prompt), len(case.answer))
        assert tokens == case.answer
        assert min(margins) >= MIN_MARGIN / 2
