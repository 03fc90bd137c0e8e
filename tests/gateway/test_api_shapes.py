"""API-03, API-07 and API-10: usage, degenerate requests, and limits of length, against real processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.conftest import WINDOW
from tests.support.gateways import Reply, Service

pytestmark = pytest.mark.processes


def usages(reply: Reply) -> list[Any]:
    return [event["usage"] for event in reply.events[:-1] if event.get("usage") is not None]


def numbers(usage: dict[str, Any]) -> tuple[int, int, int]:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


# -- API-03 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2], ids=["a", "c"])
def test_api_03_usage_comes_once_at_the_end_where_asked(small: Service, n: int) -> None:
    reply = small.chat("xyz", stream=True, n=n, stream_options={"include_usage": True})
    *events, last, done = reply.events
    assert done == "[DONE]"
    assert last["choices"] == [] and usages(reply) == [last["usage"]]
    assert all(event["usage"] is None for event in events)
    finished = [choice["index"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert sorted(finished) == list(range(n)) and events[-1]["choices"][0]["finish_reason"] == "stop"
    whole = small.chat("xyz", n=n).json["usage"]
    assert numbers(last["usage"]) == numbers(whole)
    assert whole["completion_tokens"] == 4 * n
    assert whole["prompt_tokens"] == small.chat("xyz").json["usage"]["prompt_tokens"], "the prompt counts once"


def test_api_03_b_no_usage_where_not_asked(small: Service) -> None:
    reply = small.chat("xyz", stream=True)
    assert reply.events[-1] == "[DONE]" and not usages(reply)
    assert all("usage" not in event for event in reply.events[:-1])


def test_api_03_d_stream_options_need_a_stream(small: Service) -> None:
    reply = small.chat("xyz", stream=False, stream_options={"include_usage": True})
    assert reply.status == 400 and reply.error["param"] == "stream_options"


# -- API-07 ------------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "a": ("/v1/completions", {"prompt": ""}),
    "b": ("/v1/completions", {"prompt": []}),
    "c": ("/v1/completions", {"prompt": ["", ""]}),
    "c2": ("/v1/completions", {"prompt": [[], []]}),
    "d": ("/v1/chat/completions", {"messages": []}),
    "h": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}),
    "i": ("/v1/completions", {"prompt": [999999999]}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_api_07_degenerate_requests_are_refused(small: Service, case: str) -> None:
    path, body = REFUSED[case]
    pid = small.engines[0].pid
    reply = small.call(path, {"model": "tiny"} | body)
    assert reply.status == 400
    assert reply.error["param"] == {"d": "messages", "h": "max_tokens"}.get(case, "prompt")
    assert small.complete("xyz").json["choices"][0]["text"] == "abc"
    assert small.engines[0].popen.poll() is None and small.engines[0].pid == pid


def test_api_07_e_an_empty_message_is_served(small: Service) -> None:
    assert small.chat("", max_tokens=2).status == 200


def test_api_07_f_a_prompt_is_scored(small: Service) -> None:
    for _ in range(2):  # the second time the prompt is cached
        body = small.complete("one two three", echo=True, max_tokens=0, logprobs=2).json
        choice = body["choices"][0]
        scores = choice["logprobs"]["token_logprobs"]
        assert choice["text"] == "one two three" and choice["finish_reason"] == "length"
        assert len(scores) == body["usage"]["prompt_tokens"] and body["usage"]["completion_tokens"] == 0
        assert scores[0] is None and all(score <= 0 for score in scores[1:])
        assert choice["logprobs"]["top_logprobs"][0] is None
        assert "".join(choice["logprobs"]["tokens"]) == "one two three"
    streamed = small.complete("one two three", echo=True, max_tokens=0, logprobs=2, stream=True).events
    assert streamed[0]["choices"][0]["text"] == "one two three"
    assert streamed[0]["choices"][0]["logprobs"] == choice["logprobs"]


def test_api_07_g_a_prompt_is_echoed_before_its_continuation(small: Service) -> None:
    body = small.complete("one two three", echo=True, max_tokens=1, n=2, logprobs=0).json
    for choice in body["choices"]:
        assert choice["text"] == "one two threeon"
        assert len(choice["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"] + 1
        offsets = choice["logprobs"]["text_offset"]
        assert offsets[0] == 0 and offsets[-1] == len("one two three")
    ids = small.call("/tokenize", {"prompt": "one two three"}).json["tokens"]
    assert small.complete(ids, echo=True, max_tokens=1).json["choices"][0]["text"] == "one two threeon"


# -- API-10: an explicit max_tokens must fit the window; without one, whatever fits is generated -----------------------

LENGTHS: dict[str, tuple[int, dict[str, Any], str | None]] = {
    "a": (100, {"max_tokens": 28}, None),
    "b": (100, {"max_tokens": 29}, "context_length_exceeded"),
    "c": (100, {"max_tokens": 100_000_000}, "context_length_exceeded"),
    "d": (100, {"max_tokens": None}, None),
    "e": (128, {"max_tokens": 1}, "context_length_exceeded"),
    "f": (129, {}, "context_length_exceeded"),
    "g": (100, {"max_tokens": "12"}, "invalid_request"),
    "h": (100, {"max_tokens": -1}, "invalid_request"),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_api_10_lengths(small: Service, case: str) -> None:
    num_prompt, fields, code = LENGTHS[case]
    prompt = [100 + number % 5 for number in range(num_prompt)]
    counted = small.engine_count("prompt_tokens_total"), small.counts("request_retries_total")
    reply = small.complete(prompt, **fields)
    if code is None:
        assert numbers(reply.json["usage"]) == (100, 28, WINDOW)
        assert reply.json["choices"][0]["finish_reason"] == "length"
        return
    assert reply.status == 400 and reply.error["code"] == code
    if code == "context_length_exceeded":
        for number in (WINDOW, num_prompt, fields.get("max_tokens", 1)):
            assert str(number) in reply.error["message"]
    else:
        assert reply.error["param"] == "max_tokens"
    assert (small.engine_count("prompt_tokens_total"), small.counts("request_retries_total")) == counted


def test_api_10_i_the_newer_name_wins(small: Service) -> None:
    assert small.chat("x", max_completion_tokens=5, max_tokens=50).json["usage"]["completion_tokens"] == 5


def test_api_10_a_long_text_is_refused_before_it_is_tokenised(small: Service) -> None:
    reply = small.complete("a" * 1_000_000)
    assert reply.status == 400 and reply.error["code"] == "context_length_exceeded"
    assert str(WINDOW) in reply.error["message"] and "1000000" in reply.error["message"]
