"""From a request's body to what dispatch works with: checked, defaults filled in, one form for both endpoints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shoal.core.request import Refusal, Sampling
from shoal.gateway.errors import ApiError, invalid, unsupported
from shoal.gateway.schema import INERT, INERT_IN_MESSAGES, MAX_STOP_BYTES, ChatMessage, ChatRequest, CompletionRequest
from shoal.gateway.text.tokenizer import read_json

Asked = ChatRequest | CompletionRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    n: int
    max_tokens: int | None  # None: whatever fits
    min_tokens: int
    sampling: Sampling  # without the seed
    seed: int | None
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    include_stop: bool  # the stop string stays in the text
    skip_special_tokens: bool
    priority: int
    stream: bool
    include_usage: bool
    echo: bool = False


_ADVISED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def advised_sampling(model_dir: Path) -> Sampling:
    """What the model's generation_config.json advises for requests that say nothing of a field, as vLLM takes it.

    Raises ValueError for a value that a request could not have either.
    """
    path = model_dir / "generation_config.json"
    content = read_json(path)
    told = {name: content[name] for name in _ADVISED if content.get(name) is not None}
    try:
        body = msgspec.convert({"model": "", "prompt": "", **told}, CompletionRequest)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}") from None
    return _sampling(body, Sampling(), logprobs=None, echo=False)


def chat_params(body: ChatRequest, advised: Sampling = Sampling()) -> Params:
    refuse_active(body, INERT)
    for number, message in enumerate(body.messages):
        refuse_active(message, INERT_IN_MESSAGES, f"messages[{number}].")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("'top_logprobs' needs 'logprobs': true", "top_logprobs")
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return _params(body, advised, max_tokens, logprobs=(body.top_logprobs or 0) if body.logprobs else None)


def completion_params(body: CompletionRequest, advised: Sampling = Sampling()) -> Params:
    refuse_active(body, INERT)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "'best_of' is not supported unless it equals 'n'")
    if body.max_tokens == 0 and not body.echo:
        raise invalid("'max_tokens' must be at least 1 (0 is for scoring a prompt, with 'echo': true)", "max_tokens")
    return _params(body, advised, body.max_tokens, logprobs=body.logprobs, echo=bool(body.echo))


def refuse_active(body: Any, inert: dict[str, tuple[Any, ...]], prefix: str = "") -> None:
    """Raises ApiError where a field that is not acted on would have to change something."""
    for field, harmless in inert.items():
        value = getattr(body, field, None)
        if value is not None and value not in harmless:
            allowed = " or ".join(repr(value) for value in harmless)
            raise unsupported(
                prefix + field, f"'{prefix}{field}' is not supported{f' except {allowed}' * bool(allowed)}"
            )


def _params(
    body: Asked, advised: Sampling, max_tokens: int | None, *, logprobs: int | None, echo: bool = False
) -> Params:
    if body.stream_options is not None and not body.stream:
        raise invalid("'stream_options' needs 'stream': true", "stream_options")
    min_tokens = body.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid(f"'min_tokens' is {min_tokens}, more than the {max_tokens} of 'max_tokens'", "min_tokens")
    return Params(
        n=body.n or 1,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        sampling=_sampling(body, advised, logprobs=logprobs, echo=echo),
        seed=body.seed,
        stops=_stops(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        priority=body.priority or 0,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        echo=echo,
    )


def _sampling(body: Asked, advised: Sampling, *, logprobs: int | None, echo: bool) -> Sampling:
    def given(value: float | None, otherwise: float) -> float:
        return otherwise if value is None else float(value)

    return Sampling(
        temperature=given(body.temperature, advised.temperature),
        top_p=max(given(body.top_p, advised.top_p), 1e-6),  # 0 means the single likeliest token
        top_k=max(advised.top_k if body.top_k is None else body.top_k, 0),
        min_p=given(body.min_p, advised.min_p),
        repetition_penalty=given(body.repetition_penalty, advised.repetition_penalty),
        presence_penalty=given(body.presence_penalty, 0.0),
        frequency_penalty=given(body.frequency_penalty, 0.0),
        logit_bias=tuple(sorted((body.logit_bias or {}).items())),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
    )


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(dict.fromkeys(stop or ()))
    for text in stops:
        if len(text.encode()) > MAX_STOP_BYTES:
            raise invalid(f"'stop' strings may have {MAX_STOP_BYTES} bytes", "stop")
    return stops


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, str]]:
    """Messages as chat templates take them: role and text. Raises ApiError for what is not text."""
    plain = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if message.role in ("tool", "function"):
            raise unsupported(f"{where}.role", f"the role '{message.role}' is not supported: there are no tools")
        if message.content is None and message.role != "assistant":
            raise invalid(f"'{where}.content' is required", f"{where}.content")
        role = "system" if message.role == "developer" else message.role
        entry = {"role": role, "content": _text(message, where)}
        if message.name is not None:
            entry["name"] = message.name
        plain.append(entry)
    return plain


def _text(message: ChatMessage, where: str) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    texts = []
    for number, part in enumerate(message.content):
        name = f"{where}.content[{number}]"
        if part.type != "text":
            raise unsupported(f"{name}.type", f"{name}: content of type '{part.type[:40]}' is not supported, only text")
        if part.text is None:
            raise invalid(f"'{name}.text' is required", f"{name}.text")
        texts.append(part.text)
    return "\n".join(texts)


def check_ids(ids: Iterable[int], vocab_size: int, field: str) -> None:
    highest = max(ids, default=0)
    if highest >= vocab_size:
        message = f"'{field}' holds token {highest}: the vocabulary has {vocab_size}"
        raise ApiError(Refusal.TOKEN_OUT_OF_RANGE, message, param=field)


def fit(num_prompt: int, params: Params, window: int, field: str) -> int:
    """How many tokens may be generated. What was asked for must fit; where nothing was asked, what fits is given.

    Raises ApiError context_length_exceeded with the window, the prompt and the requested counts. `field` holds the
    prompt.
    """
    room = window - num_prompt
    asked = params.max_tokens if params.max_tokens is not None else max(1, params.min_tokens)
    if asked <= room:
        return room if params.max_tokens is None else params.max_tokens
    raise ApiError(
        Refusal.CONTEXT_LENGTH,
        f"the context window is {window} tokens: the prompt has {num_prompt} and {asked} more were requested",
        param=field if num_prompt >= window else "max_tokens",
    )
