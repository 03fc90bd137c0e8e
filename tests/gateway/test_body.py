"""Bodies: the limits hold before the parser runs, and what is wrong is named."""

from __future__ import annotations

import random
import time

import msgspec
import pytest

from shoal.gateway.body import MAX_DEPTH, decode, depth
from shoal.gateway.errors import ApiError
from shoal.gateway.schema import ChatRequest, CompletionRequest


def slow_depth(body: bytes) -> int:
    """The same, character by character."""
    level = deepest = 0
    in_string = escaped = False
    for byte in body:
        if in_string:
            in_string, escaped = escaped or byte != ord('"'), byte == ord("\\") and not escaped
        elif byte == ord('"'):
            in_string = True
        elif byte in b"[{":
            level += 1
            deepest = max(deepest, level)
        elif byte in b"]}":
            level -= 1
    return deepest


def test_depth_agrees_with_a_naive_scan() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        body = bytes(rng.choices(b'[]{}"\\a\n', k=rng.randrange(24)))
        assert depth(body) == slow_depth(body), body


@pytest.mark.parametrize(
    "body",
    [b"[" * 4_000_000, b"[]" * 2_000_000, b'"' + b'\\"' * 2_000_000, b'"' * 4_000_000, b"\\" * 4_000_000],
    ids=["deep", "wide", "escapes", "quotes", "backslashes"],
)
def test_depth_is_linear(body: bytes) -> None:
    began = time.perf_counter()
    depth(body)
    assert time.perf_counter() - began < 5  # quadratic would be hours


@pytest.mark.parametrize("levels", [MAX_DEPTH, MAX_DEPTH + 1])
def test_nesting_stops_at_the_limit(levels: int) -> None:
    value = b"[" * (levels - 1) + b"]" * (levels - 1)
    body = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "prediction": ' + value + b"}"
    if levels <= MAX_DEPTH:
        decode(body, ChatRequest)
        return
    with pytest.raises(ApiError) as caught:
        decode(body, ChatRequest)
    assert caught.value.reason == "invalid_json" and str(MAX_DEPTH) in caught.value.message


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"model": "m"', b"\xff", b'{"model": "\xff"}', b'{"model": "\\ud800"}', b'{"a": NaN}', b"{}}"]
)
def test_what_is_no_json_is_refused_as_that(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        decode(body, ChatRequest)
    assert caught.value.shape.status == 400


PROBLEMS = [
    ({"temprature": 1}, "temprature", "temperature"),
    ({"messages": [{"role": "user", "kontent": "x"}]}, "messages[0].kontent", ""),
    ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role", "boss"),
    ({"messages": "x"}, "messages", "array"),
    ({"messages": []}, "messages", ">= 1"),
    ({"max_tokens": -1}, "max_tokens", ">= 1"),
    ({"max_tokens": "12"}, "max_tokens", "int"),
    ({"temperature": 3}, "temperature", "<= 2"),
    ({"n": 17}, "n", "<= 16"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "int"),
    ({"logit_bias": {"5": 101}}, "logit_bias[...]", "<= 100"),
    ({"stop": ["a"] * 17}, "stop", "<= 16"),
    ({"stop": ""}, "stop", ">= 1"),
    ({"seed": 1 << 70}, "seed", ""),
    ({"stream": "yes"}, "stream", "bool"),
]


@pytest.mark.parametrize(("fields", "param", "text"), PROBLEMS)
def test_the_field_and_the_limit_are_named(fields: dict[str, object], param: str, text: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields
    with pytest.raises(ApiError) as caught:
        decode(msgspec.json.encode(body), ChatRequest)
    assert caught.value.param == param
    assert param in caught.value.message and text in caught.value.message


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ApiError) as caught:
        decode(b'{"model": "m"}', ChatRequest)
    assert caught.value.param == "messages" and "required" in caught.value.message


def test_of_a_key_that_comes_twice_the_last_one_counts() -> None:
    assert decode(b'{"model": "m", "prompt": "a", "prompt": "b"}', CompletionRequest).prompt == "b"
