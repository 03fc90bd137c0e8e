"""What clients may send: OpenAI's fields, vLLM's names for what OpenAI has not, and the limit of each.

A field that is not here is refused by name. A field that is here and not acted on is either without effect on the
answer (listed in `Common` and in the classes below as "accepted") or allowed with its inert values only (`INERT`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from shoal.wire.messages import MAX_CHOICES

MAX_STOPS, MAX_STOP_BYTES = 16, 256
MAX_PROMPTS = 128

Count = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Tokens = Annotated[int, Meta(ge=0, le=1 << 53)]
SomeTokens = Annotated[int, Meta(ge=1, le=1 << 53)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Unit = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Alternatives = Annotated[int, Meta(ge=0, le=20)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Int32 = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_BYTES)]


class StreamOptions(Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # accepted


class Common(Struct, forbid_unknown_fields=True, kw_only=True):
    """What chat and plain completions share."""

    model: str
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Unit | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=1024)] | None = None
    seed: Int64 | None = None
    # vLLM's extensions
    top_k: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    min_p: Unit | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    min_tokens: Tokens | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Int32 | None = None
    # accepted
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # allowed with inert values
    store: Any = None
    service_tier: Any = None
    cache_salt: Any = None
    structured_outputs: Any = None
    prompt_logprobs: Any = None


class Part(Struct, forbid_unknown_fields=True, kw_only=True):
    """A piece of a message's content. Only text is served; the others are known so that the refusal can be clear."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    video_url: Any = None
    audio_url: Any = None
    refusal: Any = None


Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class ChatMessage(Struct, forbid_unknown_fields=True, kw_only=True):
    role: Role
    content: str | list[Part] | None = None
    name: str | None = None
    # what clients send back with an assistant's answer; allowed empty
    refusal: Any = None
    audio: Any = None
    annotations: Any = None
    tool_calls: Any = None
    function_call: Any = None
    tool_call_id: Any = None


class ChatRequest(Common):
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=2048)]
    max_tokens: SomeTokens | None = None
    max_completion_tokens: SomeTokens | None = None  # wins over max_tokens
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    # accepted
    prediction: Any = None
    parallel_tool_calls: bool | None = None
    # allowed with inert values
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None


class CompletionRequest(Common):
    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: Tokens | None = None
    logprobs: Alternatives | None = None
    echo: bool | None = None
    # allowed with inert values
    best_of: Any = None
    suffix: Any = None


# The paths whose requests may come as lines of a batch, and the body of each.
BATCHED: dict[str, type[ChatRequest] | type[CompletionRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=2048)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


# Values under which a field asks for nothing that is not done anyway. Null is always one.
INERT: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "cache_salt": (),  # separates tenants, so it comes from the key, never from a body
    "structured_outputs": (),
    "prompt_logprobs": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "chat_template": (),  # a template is a program: the model's own or none
    "chat_template_kwargs": ({},),
    "suffix": ("",),
}
INERT_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    "refusal": ("",),
    "audio": (),
    "annotations": ([],),
    "tool_calls": ([],),
    "function_call": (),
    "tool_call_id": (),
}
