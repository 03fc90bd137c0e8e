"""The default model, as people get it: `shoal serve`, and the official client."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.support.default_model import default_model
from tests.support.serve import serve

pytestmark = [pytest.mark.torch, pytest.mark.processes]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with serve(default_model(), "--served-model-name", "smollm2-135m") as service:
        yield openai.OpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, **fields: object) -> openai.types.chat.ChatCompletion:
    return client.chat.completions.create(model="smollm2-135m", messages=QUESTION, temperature=0, **fields)


def test_it_answers_whole(client: openai.OpenAI) -> None:
    answer = ask(client)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (ANSWER, "stop")
    assert answer.usage.prompt_tokens == 37 and answer.usage.completion_tokens == 8


def test_it_answers_as_a_stream(client: openai.OpenAI) -> None:
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert chunks[-1].usage.completion_tokens == 8


def test_two_choices_with_logprobs_from_a_prompt_that_is_cached(client: openai.OpenAI) -> None:
    answer = ask(client, n=2, logprobs=True, top_logprobs=2)
    assert [choice.message.content for choice in answer.choices] == [ANSWER] * 2
    assert answer.usage.prompt_tokens_details.cached_tokens == 32
    for choice in answer.choices:
        assert "".join(entry.token for entry in choice.logprobs.content) == ANSWER
        assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in choice.logprobs.content)
