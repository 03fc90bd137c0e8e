"""Whatever a client sends: a 4xx that names the field and the limit, and a service that is as well as before."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.conftest import WINDOW
from tests.support.gateways import Service

pytestmark = pytest.mark.processes
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "x"}]
BIG = b'{"model": "tiny", "prompt": "' + b"x" * (10 << 20) + b'"}'


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": "tiny", "messages": MESSAGES} | fields


def text(**fields: Any) -> tuple[str, dict[str, Any]]:
    return TEXT, {"model": "tiny", "prompt": "x"} | fields


# what is sent, status, param, words of the message
TABLE: dict[str, tuple[tuple[str, Any], int, str | None, tuple[str, ...]]] = {
    "unknown model": (chat(model="other"), 404, "model", ("other", "tiny")),
    "over-long prompt": (text(prompt=[100] * 200), 400, "prompt", (str(WINDOW), "200")),
    "over-long messages": (
        chat(messages=[{"role": "user", "content": "x" * 200}]),
        400,
        "messages",
        (str(WINDOW), "217"),
    ),
    "negative max_tokens": (chat(max_tokens=-1), 400, "max_tokens", ("max_tokens", ">= 1")),
    "empty messages": (chat(messages=[]), 400, "messages", ("messages", ">= 1")),
    "too many messages": (chat(messages=MESSAGES * 2049), 400, "messages", ("messages", "<= 2048")),
    "empty prompt": (text(prompt=""), 400, "prompt", ("prompt", "empty")),
    "too many prompts": (text(prompt=["x"] * 129), 400, "prompt", ("prompt", "128")),
    "mixed prompts": (text(prompt=["x", [1]]), 400, "prompt", ("prompt",)),
    "no JSON": ((CHAT, b"{"), 400, None, ("JSON",)),
    "nothing": ((CHAT, b""), 400, None, ("JSON",)),
    "another type": ((CHAT, b"[]"), 400, None, ("object",)),
    "10 MB": ((TEXT, BIG), 413, None, (str(4 << 20),)),
    "unknown sampling field": (chat(temprature=1), 400, "temprature", ("temprature", "temperature")),
    "unknown field of a message": (
        chat(messages=[{"role": "user", "content": "x", "colour": 1}]),
        400,
        "messages[0].colour",
        ("colour",),
    ),
    "wrong type": (chat(temperature="hot"), 400, "temperature", ("temperature", "float")),
    "a boolean for a number": (chat(n=True), 400, "n", ("n", "int")),
    "bad UTF-8": ((TEXT, b'{"model": "tiny", "prompt": "\xff"}'), 400, None, ("UTF-8",)),
    "half a surrogate pair": ((TEXT, b'{"model": "tiny", "prompt": "\\ud800"}'), 400, None, ("JSON",)),
    "NaN": ((TEXT, b'{"model": "tiny", "prompt": "x", "temperature": NaN}'), 400, None, ("JSON",)),
    "temperature": (text(temperature=2.1), 400, "temperature", ("<= 2",)),
    "top_p": (text(top_p=1.1), 400, "top_p", ("<= 1",)),
    "n": (text(n=17), 400, "n", ("<= 16",)),
    "logprobs": (text(logprobs=21), 400, "logprobs", ("<= 20",)),
    "negative logprobs": (text(logprobs=-1), 400, "logprobs", (">= 0",)),
    "top_logprobs": (chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", ("<= 20",)),
    "stop": (text(stop=["x"] * 17), 400, "stop", ("<= 16",)),
    "long stop": (text(stop="x" * 257), 400, "stop", ("<= 256",)),
    "logit_bias": (text(logit_bias={str(n): 1 for n in range(1025)}), 400, "logit_bias", ("<= 1024",)),
    "logit_bias of no token": (text(logit_bias={"100000": 1}), 400, "logit_bias", ("100000",)),
    "stop token of no vocabulary": (text(stop_token_ids=[100000]), 400, "stop_token_ids", ("100000",)),
    "token of no vocabulary": (text(prompt=[100000]), 400, "prompt", ("100000",)),
    "negative token": (text(prompt=[-1]), 400, "prompt[0]", (">= 0",)),
    "min_tokens": (text(min_tokens=3, max_tokens=2), 400, "min_tokens", ("3", "2")),
    "tools": (chat(tools=[{"type": "function"}]), 400, "tools", ("not supported",)),
    "image": (
        chat(
            messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}]
        ),
        400,
        "messages[0].content[0].type",
        ("image_url", "only text"),
    ),
    "tokenize nothing": (("/tokenize", {}), 400, "prompt", ("prompt", "messages")),
    "logit_bias of a word": (text(logit_bias={"fish": 1}), 400, "logit_bias", ("key", "int")),
    "detokenize no token of the vocabulary": (("/detokenize", {"tokens": [1, 100000]}), 400, "tokens", ("100000",)),
    "detokenize text": (("/detokenize", {"tokens": "x"}), 400, "tokens", ("array",)),
}


@pytest.mark.parametrize("name", TABLE)
def test_bad_input(small: Service, name: str) -> None:
    (path, body), status, param, words = TABLE[name]
    reply = small.call(path, body)
    assert (reply.status, reply.error["param"]) == (status, param), reply.body
    for word in words:
        assert word in reply.error["message"]


def test_afterwards_all_is_well(small: Service) -> None:
    pids = small.gateway.pid, small.engines[0].pid
    for (path, body), *_ in TABLE.values():
        assert 400 <= small.call(path, body).status < 500
    assert small.complete("xyz").json["choices"][0]["text"] == "abc"
    assert small.call("/ready").status == 200
    assert (small.gateway.popen.poll(), small.engines[0].popen.poll()) == (None, None)
    assert (small.gateway.pid, small.engines[0].pid) == pids
    assert small.engine_count("kv_cache_usage_perc") == 0
    assert small.balanced()


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "GET"])
def test_wrong_methods(small: Service, method: str) -> None:
    reply = small.call(CHAT, method=method)
    assert reply.status == 405 and reply.headers["allow"] == "POST" and reply.error["code"] == "method_not_allowed"


def test_unknown_path(small: Service) -> None:
    assert small.call("/v1/embeddings", {"input": "x"}).error["code"] == "not_found"
