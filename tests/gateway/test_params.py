"""Tables: every documented field acts, is accepted without effect, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.core.request import Sampling
from shoal.gateway import schema
from shoal.gateway.body import decode
from shoal.gateway.errors import ApiError
from shoal.gateway.params import (
    Params,
    advised_sampling,
    chat_params,
    check_ids,
    completion_params,
    fit,
    plain_messages,
)

MESSAGES = [{"role": "user", "content": "x"}]


def chat(**fields: Any) -> Params:
    body = decode(msgspec.json.encode({"model": "m", "messages": MESSAGES} | fields), schema.ChatRequest)
    plain_messages(body.messages)
    return chat_params(body)


def completion(**fields: Any) -> Params:
    return completion_params(
        decode(msgspec.json.encode({"model": "m", "prompt": "x"} | fields), schema.CompletionRequest)
    )


ACTING: dict[str, tuple[Any, Any]] = {
    "temperature": (0.5, lambda p: p.sampling.temperature == 0.5),
    "top_p": (0.5, lambda p: p.sampling.top_p == 0.5),
    "top_k": (7, lambda p: p.sampling.top_k == 7),
    "min_p": (0.1, lambda p: p.sampling.min_p == 0.1),
    "presence_penalty": (-1, lambda p: p.sampling.presence_penalty == -1),
    "frequency_penalty": (1, lambda p: p.sampling.frequency_penalty == 1),
    "repetition_penalty": (1.1, lambda p: p.sampling.repetition_penalty == 1.1),
    "logit_bias": ({"7": -100, "3": 1}, lambda p: p.sampling.logit_bias == ((3, 1.0), (7, -100.0))),
    "seed": (-1, lambda p: p.seed == -1),
    "n": (3, lambda p: p.n == 3),
    "stop": (["a", "b", "a"], lambda p: p.stops == ("a", "b")),
    "max_tokens": (5, lambda p: p.max_tokens == 5),
    "min_tokens": (5, lambda p: p.min_tokens == 5),
    "stop_token_ids": ([5], lambda p: p.stop_token_ids == (5,)),
    "ignore_eos": (True, lambda p: p.ignore_eos),
    "include_stop_str_in_output": (True, lambda p: p.include_stop),
    "skip_special_tokens": (False, lambda p: not p.skip_special_tokens),
    "priority": (-3, lambda p: p.priority == -3),
    "stream": (True, lambda p: p.stream),
}


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize("field", ACTING)
def test_field_acts(make: Any, field: str) -> None:
    value, check = ACTING[field]
    assert check(make(**{field: value}))
    assert not check(make()), "the default already is what was asked for"
    assert make(**{field: None}) == make()


def test_logprobs_of_both_endpoints() -> None:
    assert chat().sampling.logprobs is None
    assert chat(logprobs=False).sampling.logprobs is None
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).sampling.logprobs == 20
    assert completion(logprobs=0).sampling.logprobs == 0
    assert completion(logprobs=2).sampling.prompt_logprobs is None
    assert completion(logprobs=2, echo=True).sampling.prompt_logprobs == 2


def test_neutral_values_may_be_said_in_several_ways() -> None:
    assert chat(top_k=-1) == chat(top_k=0) == chat()
    assert 0 < chat(top_p=0).sampling.top_p < 1e-5  # the single likeliest token


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert chat(max_completion_tokens=5, max_tokens=50).max_tokens == 5
    assert chat(max_tokens=50).max_tokens == 50


IGNORED: list[dict[str, Any]] = [
    {"user": "u"},
    {"metadata": {"a": "b"}},
    {"store": False},
    {"service_tier": "auto"},
    {"service_tier": "default"},
    {"safety_identifier": "s"},
    {"prompt_cache_key": "k"},
]
IGNORED_IN_CHAT: list[dict[str, Any]] = [
    *IGNORED,
    {"tools": []},
    {"tool_choice": "none"},
    {"parallel_tool_calls": True},
    {"response_format": {"type": "text"}},
    {"modalities": ["text"]},
    {"prediction": {"type": "content", "content": "x"}},
    {"verbosity": "medium"},
]


@pytest.mark.parametrize("fields", IGNORED_IN_CHAT)
def test_accepted_in_chat_without_effect(fields: dict[str, Any]) -> None:
    assert chat(**fields) == chat()


@pytest.mark.parametrize("fields", [*IGNORED, {"suffix": ""}, {"best_of": 1}])
def test_accepted_in_completions_without_effect(fields: dict[str, Any]) -> None:
    assert completion(**fields) == completion()


REFUSED_IN_BOTH: list[dict[str, Any]] = [
    {"store": True},
    {"service_tier": "flex"},
    {"cache_salt": "s"},
    {"structured_outputs": {"regex": "a"}},
    {"prompt_logprobs": 1},
]
REFUSED_IN_CHAT: list[dict[str, Any]] = [
    *REFUSED_IN_BOTH,
    {"tools": [{"type": "function"}]},
    {"tool_choice": "required"},
    {"functions": [{}]},
    {"response_format": {"type": "json_object"}},
    {"modalities": ["text", "audio"]},
    {"audio": {"voice": "x"}},
    {"reasoning_effort": "high"},
    {"verbosity": "low"},
    {"web_search_options": {}},
    {"chat_template": "{{ x }}"},
    {"chat_template_kwargs": {"tokenize": True}},
]


@pytest.mark.parametrize("fields", REFUSED_IN_CHAT)
def test_refused_in_chat_by_name(fields: dict[str, Any]) -> None:
    _is_refused(chat, fields)


@pytest.mark.parametrize("fields", [*REFUSED_IN_BOTH, {"suffix": "s"}, {"best_of": 2}, {"best_of": 1, "n": 2}])
def test_refused_in_completions_by_name(fields: dict[str, Any]) -> None:
    _is_refused(completion, fields)


def _is_refused(make: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        make(**fields)
    assert caught.value.reason == "not_supported"
    assert caught.value.param == next(iter(fields)) and caught.value.param in caught.value.message


INVALID = [
    (chat, {"top_logprobs": 2}, "top_logprobs"),
    (chat, {"stream_options": {"include_usage": True}}, "stream_options"),
    (completion, {"stream": False, "stream_options": {}}, "stream_options"),
    (chat, {"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    (completion, {"max_tokens": 0}, "max_tokens"),
    (chat, {"stop": "ä" * 129}, "stop"),
    (chat, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (chat, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (chat, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    (chat, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    (
        chat,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://h/"}}]}]},
        "messages[0].content[0].type",
    ),
]


@pytest.mark.parametrize(("make", "fields", "param"), INVALID)
def test_invalid_combinations_name_the_field(make: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        make(**fields)
    assert caught.value.param == param and caught.value.shape.status == 400


def test_every_field_of_the_schema_is_covered_here() -> None:
    covered = {"model", "messages", "prompt", "logprobs", "top_logprobs", "echo", "max_completion_tokens"}
    covered |= {"stream_options", "prompt_cache_retention", "function_call", *ACTING}
    covered |= {name for fields in (*IGNORED_IN_CHAT, *REFUSED_IN_CHAT) for name in fields} | {"suffix", "best_of"}
    declared = {*schema.ChatRequest.__struct_fields__, *schema.CompletionRequest.__struct_fields__}
    assert declared == covered


def test_messages_become_role_and_text() -> None:
    body = {
        "model": "m",
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "u"},
            {"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": []},
        ],
    }
    assert plain_messages(decode(msgspec.json.encode(body), schema.ChatRequest).messages) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "u"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "expected"),
    [
        (100, 28, 28),
        (100, None, 28),
        (127, None, 1),
        (100, 29, "max_tokens"),
        (100, 10**8, "max_tokens"),
        (128, 1, "prompt"),
        (128, None, "prompt"),
        (129, None, "prompt"),
        (129, 5, "prompt"),
    ],
)
def test_what_fits_the_window(num_prompt: int, max_tokens: int | None, expected: int | str) -> None:
    params = completion(max_tokens=max_tokens)
    if isinstance(expected, int):
        assert fit(num_prompt, params, 128, "prompt") == expected
        return
    with pytest.raises(ApiError) as caught:
        fit(num_prompt, params, 128, "prompt")
    assert (caught.value.reason, caught.value.param) == ("context_length_exceeded", expected)
    for number in (128, num_prompt, max_tokens or 1):
        assert str(number) in caught.value.message


def test_token_ids_are_within_the_vocabulary() -> None:
    check_ids((0, 9), 10, "prompt")
    check_ids((), 10, "prompt")
    with pytest.raises(ApiError, match="token 10: the vocabulary has 10"):
        check_ids((0, 10), 10, "prompt")


def test_what_the_model_advises_holds_where_a_request_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.2, "top_p": 0.9, "top_k": 50, "max_length": 9}')
    advised = advised_sampling(tmp_path)
    body = decode(b'{"model": "m", "prompt": "x", "top_p": 1, "top_k": 0}', schema.CompletionRequest)
    sampling = completion_params(body, advised).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.2, 1.0, 0, 0.0)


def test_advice_that_no_request_could_follow_names_file_and_field(tmp_path: Path) -> None:
    assert advised_sampling(tmp_path) == Sampling()
    (tmp_path / "generation_config.json").write_text('{"temperature": -1}')
    with pytest.raises(ValueError, match=r"generation_config\.json: .*temperature"):
        advised_sampling(tmp_path)
