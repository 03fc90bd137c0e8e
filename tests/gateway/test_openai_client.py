"""The official client against real processes."""

from __future__ import annotations

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.gateway.conftest import WINDOW
from tests.support.gateways import MODEL, Service

pytestmark = pytest.mark.processes


def asking(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def test_chat(small: Service) -> None:
    answer = small.client.chat.completions.create(model=MODEL, messages=asking("xyz"))
    assert answer.choices[0].message.content == "abc"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == 4
    assert answer.id.startswith("chatcmpl-") and answer.model == MODEL and answer.object == "chat.completion"


def test_chat_stream(small: Service) -> None:
    chunks = list(small.client.chat.completions.create(model=MODEL, messages=asking("xyz"), stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "abc"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    assert chunks[0].object == "chat.completion.chunk"


def test_completions(small: Service) -> None:
    answer = small.client.completions.create(model=MODEL, prompt="xyz")
    assert answer.choices[0].text == "abc" and answer.object == "text_completion"
    chunks = list(small.client.completions.create(model=MODEL, prompt="xyz", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_two_choices_speak_at_the_same_time_and_keep_apart(small: Service) -> None:
    whole = small.client.chat.completions.create(model=MODEL, messages=asking("XYZ"), n=2)
    assert [choice.message.content for choice in whole.choices] == ["one", "two😀"]
    assert [choice.index for choice in whole.choices] == [0, 1]
    texts = {0: "", 1: ""}
    for chunk in small.client.chat.completions.create(model=MODEL, messages=asking("XYZ"), n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "one", 1: "two😀"}


def test_several_prompts_of_every_form(small: Service) -> None:
    ids = [small.call("/tokenize", {"prompt": text}).json["tokens"] for text in ("xyz", "XYZ")]
    for prompt in (["xyz", "XYZ"], ids):
        answer = small.client.completions.create(model=MODEL, prompt=prompt, n=2)
        assert [choice.text for choice in answer.choices] == ["abc", "abc", "one", "two😀"]
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage is not None and answer.usage.prompt_tokens == len(ids[0]) + len(ids[1])
    assert small.client.completions.create(model=MODEL, prompt=ids[0]).choices[0].text == "abc"


def test_logprobs(small: Service) -> None:
    answer = small.client.chat.completions.create(
        model=MODEL, messages=asking("XYZ"), n=2, logprobs=True, top_logprobs=2
    )
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        joined = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
        assert joined.decode() == choice.message.content
        assert {len(entry.top_logprobs) for entry in choice.logprobs.content} == {2}
    old = small.client.completions.create(model=MODEL, prompt="xyz", logprobs=1).choices[0].logprobs
    assert old is not None and old.tokens == ["a", "b", "c"] and old.text_offset == [0, 1, 2]
    assert small.chat("xyz").json["choices"][0]["logprobs"] is None


def test_stop_strings(small: Service) -> None:
    for stop, text in (("b", "a"), (["c", "bc"], "a"), ("x", "abc"), ("a", "")):
        answer = small.client.chat.completions.create(model=MODEL, messages=asking("xyz"), stop=stop)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "stop")
        stream = small.client.chat.completions.create(model=MODEL, messages=asking("xyz"), stop=stop, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
    kept = small.complete("xyz", stop="b", include_stop_str_in_output=True).json["choices"][0]
    assert kept["text"] == "ab"


def test_length_and_seed(small: Service) -> None:
    answer = small.client.chat.completions.create(model=MODEL, messages=asking("xyz"), max_tokens=2, seed=-7)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("ab", "length")


def test_stop_token_ids_and_ignore_eos(small: Service) -> None:
    b = small.call("/tokenize", {"prompt": "b"}).json["tokens"]
    assert small.complete("xyz", stop_token_ids=b).json["choices"][0]["text"] == "a"
    ignoring = small.complete("xyz", ignore_eos=True, max_tokens=6, skip_special_tokens=False).json["choices"][0]
    assert ignoring["text"].startswith("abc<|im_end|>") and ignoring["finish_reason"] == "length"


def test_models(small: Service) -> None:
    assert [model.id for model in small.client.models.list()] == [MODEL]
    assert small.client.models.retrieve(MODEL).model_extra == {"max_model_len": WINDOW}
    with pytest.raises(openai.NotFoundError):
        small.client.models.retrieve("org/other")


def test_errors_are_the_client_s_exceptions(small: Service) -> None:
    with pytest.raises(openai.NotFoundError, match="other"):
        small.client.chat.completions.create(model="other", messages=asking("x"))
    with pytest.raises(openai.BadRequestError) as caught:
        small.client.chat.completions.create(model=MODEL, messages=asking("x"), max_tokens=1000)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "max_tokens"


def test_tokenize_and_back(small: Service) -> None:
    made = small.call("/tokenize", {"model": MODEL, "prompt": "the sea", "return_token_strs": True}).json
    assert made["count"] == len(made["tokens"]) and made["max_model_len"] == WINDOW
    assert "".join(made["token_strs"]) == "the sea"
    assert small.call("/detokenize", {"tokens": made["tokens"]}).json == {"prompt": "the sea"}
    chat = small.call("/tokenize", {"messages": asking("x")}).json
    assert small.call("/detokenize", {"tokens": chat["tokens"]}).json["prompt"].endswith("<|im_start|>assistant\n")


def test_request_id_comes_back_where_it_is_harmless(small: Service) -> None:
    assert small.call("/health", headers={"x-request-id": "a-b.C:1"}).headers["x-request-id"] == "a-b.C:1"
    for given in ("a b", "x" * 129, "a;b"):
        assert small.call("/health", headers={"x-request-id": given}).headers["x-request-id"] != given


def test_metrics_add_up(small: Service) -> None:
    before = small.counts("request_success_total")
    small.chat("xyz")
    small.chat("xyz", max_tokens=1)
    after = small.counts("request_success_total")
    assert {reason: after[reason] - before.get(reason, 0) for reason in ("stop", "length")} == {"stop": 1, "length": 1}
    assert small.balanced()
    assert small.counts("time_to_first_token_seconds_count")[""] >= 2
    assert small.counts("inter_token_latency_seconds_count")[""] >= 3


def test_the_log_has_one_line_a_request_and_no_text(small: Service) -> None:
    small.chat("xyz a-secret-of-the-user", user="u")
    request_id = small.chat("xyz").headers["x-request-id"]
    small.gateway.wait_line(f"request id={request_id} ")
    lines = [line for line in small.gateway.lines if f" id={request_id} " in line]
    assert len(lines) == 1 and "output_tokens=4" in lines[0] and "outcome=ok" in lines[0]
    assert "a-secret-of-the-user" not in small.gateway.text
