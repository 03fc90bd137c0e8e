"""A model in this process: the same text alone and in a batch, streamed and whole; and what is refused."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shoal.config import ConfigError
from shoal.llm import LLM, EngineError, Request, RequestError, SamplingParams
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.torch

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPTS = ["a", "the sea", "好 😀 é", "in the end " * 5, "0123456789" * 9, "x", "the sea", "y z"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float32", max_num_seqs=4, max_prefill_chunk=7, kv_cache_bytes=1 << 20) as llm:
        yield llm


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=12, temperature=1.2, top_p=0.9, seed=5)])
def test_a_batch_gives_what_each_prompt_gives_alone(llm, params):
    alone = [llm.generate(prompt, params)[0] for prompt in PROMPTS]
    together = llm.generate(PROMPTS, params)
    assert [output.choices for output in together] == [output.choices for output in alone]
    assert [output.prompt_token_ids for output in together] == [output.prompt_token_ids for output in alone]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_streamed_deltas_join_to_the_whole_answer(llm, prompt):
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=3, n=2)
    [whole] = llm.generate([prompt], params)
    deltas = list(llm.stream(prompt, params))
    for number, choice in enumerate(whole.choices):
        mine = [delta for delta in deltas if delta.choice == number]
        assert "".join(delta.text for delta in mine) == choice.text
        assert tuple(token for delta in mine for token in delta.token_ids) == choice.token_ids
        assert [delta.finish_reason for delta in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]


def test_more_may_be_asked_at_once_than_a_service_could_promise_to_begin_soon(folder):
    """A pool of five blocks, and requests of five each: all but one wait."""
    with LLM(str(folder), dtype="float32", threads=1, kv_cache_bytes=5 * 8192) as small:
        outputs = small.generate([[5, 6, 7] * 5] * 40, SamplingParams(max_tokens=60, ignore_eos=True))
    assert [len(output.choices[0].token_ids) for output in outputs] == [60] * 40


def test_several_ranks_answer_alike_and_are_gone_afterwards(llm, folder):
    with LLM(str(folder), dtype="float32", tensor_parallel_size=2, kv_cache_bytes=1 << 20) as two:
        ranks = psutil.Process().children()
        assert len(ranks) == 1
        texts = [output.choices[0].text for output in two.generate(PROMPTS, GREEDY)]
    assert texts == [output.choices[0].text for output in llm.generate(PROMPTS, GREEDY)]
    assert not any(rank.is_running() for rank in ranks)


def test_token_ids_are_a_prompt_too(llm):
    [text] = llm.generate("the sea", GREEDY)
    [ids] = llm.generate(list(text.prompt_token_ids), GREEDY)
    assert ids == llm.generate([text.prompt_token_ids], GREEDY)[0]
    assert ids.choices == text.choices


def test_a_seed_gives_the_same_choices_again_and_no_seed_others(llm):
    seeded = SamplingParams(max_tokens=16, seed=1, n=3)
    first, again = llm.generate(["a"], seeded), llm.generate(["a"], seeded)
    assert first[0].choices == again[0].choices
    assert len({choice.token_ids for choice in first[0].choices}) == 3
    unseeded = SamplingParams(max_tokens=16)
    assert llm.generate(["a"], unseeded)[0].choices != llm.generate(["a"], unseeded)[0].choices


def test_a_stop_string_ends_the_text_before_itself_and_the_work_with_it(llm):
    [plain] = llm.generate("the sea", GREEDY)
    stop = plain.text[3:5]
    [stopped] = llm.generate("the sea", SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, stop=stop))
    assert stopped.text == plain.text[: plain.text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    assert len(stopped.choices[0].token_ids) < len(plain.choices[0].token_ids)


def test_a_stop_token_is_counted_and_is_no_text(llm):
    [plain] = llm.generate("the sea", GREEDY)
    stop = plain.choices[0].token_ids[4]
    [stopped] = llm.generate("the sea", SamplingParams(max_tokens=12, temperature=0, stop_token_ids=[stop]))
    assert stopped.choices[0].token_ids[-1] == stop
    assert stopped.choices[0].finish_reason == "stop"
    assert plain.text.startswith(stopped.text)


def test_logprobs_come_one_per_token(llm):
    [output] = llm.generate("the sea", SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, logprobs=2))
    choice = output.choices[0]
    assert [entry.top[0][0] for entry in choice.logprobs] == list(choice.token_ids)
    assert all(len(entry.top) == 2 and entry.logprob <= 0 for entry in choice.logprobs)
    assert llm.generate("the sea", GREEDY)[0].choices[0].logprobs == ()


def test_a_chat_is_rendered_by_the_models_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    [chat] = llm.chat(messages, GREEDY)
    [plain] = llm.generate("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", GREEDY)
    assert chat.prompt_token_ids == plain.prompt_token_ids
    assert chat.text == plain.text
    assert [output.text for output in llm.chat([messages, messages], GREEDY)] == [chat.text] * 2


def test_more_prompts_than_fit_at_once_come_back_in_order(llm):
    prompts = [f"number {number}" for number in range(60)]
    params = SamplingParams(max_tokens=3, temperature=0)
    assert [o.text for o in llm.generate(prompts, params)] == [llm.generate(p, params)[0].text for p in prompts]


def test_outputs_takes_requests_one_by_one_and_answers_while_there_is_no_next(llm):
    answered = 0

    def requests() -> Iterator[Request | None]:
        yield Request("a", GREEDY)
        while answered < 1:
            yield None
        yield Request("", GREEDY)
        yield Request("b", GREEDY)

    outputs = []
    for output in llm.outputs(requests()):
        answered += 1
        outputs.append(output)
    assert [bool(output.error) for output in outputs] == [False, True, False]


def test_two_streams_and_a_batch_may_be_open_at_once(llm):
    first, second = llm.stream("a", GREEDY), llm.stream("b", GREEDY)
    texts = [next(first).text, next(second).text]
    whole = llm.generate(["a", "b"], GREEDY)
    texts[0] += "".join(delta.text for delta in first)
    texts[1] += "".join(delta.text for delta in second)
    assert texts == [output.text for output in whole]


def test_a_stream_that_is_left_gives_its_request_up(llm):
    stream = llm.stream("a", SamplingParams(max_tokens=400, temperature=0, ignore_eos=True))
    next(stream)
    stream.close()
    llm.generate("b", GREEDY)  # a turn later
    assert llm._steps.num_streams == 0
    assert not llm._inboxes


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt has 0 tokens"),
        ([], "prompt has 0 tokens"),
        ([5, 999], "999"),
        ([1, "a"], "Expected `int`, got `str`"),
        ("x" * 600, "the context window is 512 tokens"),
        ([{"role": "user"}], "'messages[0].content' is required"),
        (
            [{"role": "nobody", "content": "x"}],
            "messages[0].role: Invalid enum value 'nobody'",
        ),
        ("\ud800", "surrogate"),
    ],
)
def test_a_prompt_that_cannot_be_answered_is_refused_by_number_and_the_next_call_works(llm, prompt, message):
    with pytest.raises(RequestError, match=r"^prompt 1: ") as caught:
        llm.generate(["fine", prompt], GREEDY)
    assert message in str(caught.value)
    with pytest.raises(RequestError):
        list(llm.stream(prompt, GREEDY))
    assert llm.generate("fine", GREEDY)[0].text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n": 0}, "n: Expected `int` >= 1, got 0"),
        ({"n": 17}, "n: Expected `int` <= 16, got 17"),
        ({"temperature": -0.1}, "temperature: Expected `float` >= 0.0, got -0.1"),
        ({"temperature": float("nan")}, "temperature: nan is not a finite number"),
        ({"max_tokens": 0}, "max_tokens: Expected `int` >= 1, got 0"),
        ({"max_tokens": 4, "min_tokens": 5}, "'min_tokens' is 5, more than the 4 of 'max_tokens'"),
        ({"top_k": 1.5}, "top_k: Expected `int | null`, got `float`"),
        ({"stop": ["a", ""]}, "stop[1]: Expected `str` of length >= 1"),
        ({"logit_bias": {-1: 0}}, "logit_bias: a key: Expected `int` >= 0"),
    ],
)
def test_parameters_are_checked_by_the_gateways_schema(values, message):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)
    assert message in str(caught.value)


def test_an_unknown_engine_option_names_the_nearest(folder):
    with pytest.raises(ConfigError, match=r"did you mean engine\.max_num_seqs\?"):
        LLM(str(folder), max_num_seq=3)


def test_a_model_that_cannot_be_loaded_is_an_exception_here(folder):
    with pytest.raises(ValueError, match="max_model_len is 4096"):
        LLM(str(folder), max_model_len=4096)


def test_a_failure_of_the_engine_is_an_error_of_its_own_and_ends_it(folder, monkeypatch):
    with LLM(str(folder), dtype="float32", kv_cache_bytes=1 << 20) as llm:

        def fail() -> None:
            raise RuntimeError("out of luck")

        monkeypatch.setattr(llm._steps._runner, "collect", fail)
        with pytest.raises(EngineError, match="the engine failed: RuntimeError"):
            llm.generate(["a", "b"], GREEDY)
        llm._thread.join(10)
        with pytest.raises(EngineError, match="the engine has stopped"):
            llm.generate("a", GREEDY)


def test_the_example_runs(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["offline_generate.py", str(folder)])
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "offline_generate.py"), run_name="__main__")
    shown = capsys.readouterr().out.splitlines()
    assert sum(" -> " in line for line in shown) == 3
    assert any(line.startswith("stream: ") for line in shown)
