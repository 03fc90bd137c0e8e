"""What is asked of a model in this process, and what is answered: the values and the growing answers of `llm.py`."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import msgspec

from shoal.core.plan import Logprobs
from shoal.core.request import Finish
from shoal.gateway import params as checked
from shoal.gateway.errors import ApiError
from shoal.gateway.output import ChoiceOutput
from shoal.gateway.schema import CompletionRequest
from shoal.gateway.violations import explain
from shoal.wire.messages import Refusing, Update

T = TypeVar("T")
Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class RequestError(ValueError):
    """This request cannot be answered; the message names the field and the limit."""


class EngineError(RuntimeError):
    """The engine failed; nothing more can be asked of it."""


# -- what is asked -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt. Names and meaning as in vLLM; raises RequestError for a value out of bounds."""

    n: int = 1  # choices per prompt
    max_tokens: int | None = 16  # None: until the model ends or its window is full
    min_tokens: int = 0
    temperature: float = 1.0  # 0: always the likeliest token
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None  # None: another one each time
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # alternatives beside each token; None: no logprobs at all

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> checked.Params:
        """The same, as the gateway makes it of a request's body."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise RequestError(f"{name}: {value} is not a finite number")
        if self.max_tokens == 0:
            raise RequestError("max_tokens: Expected `int` >= 1, got 0")  # the gateway has a use for 0, here is none
        try:
            return checked.completion_params(convert({"model": "", "prompt": "", **values}, CompletionRequest))
        except ApiError as error:
            raise RequestError(error.message) from None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt: text, token ids, or the messages of a chat."""

    prompt: Prompt | Messages
    params: SamplingParams


# -- what is answered --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Delta:
    """What a step added to one choice."""

    choice: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None  # with the last delta: "stop" or "length"


@dataclass(frozen=True, slots=True)
class Choice:
    text: str
    token_ids: tuple[int, ...]  # the stop token included
    finish_reason: str  # "stop" or "length"
    logprobs: tuple[Logprobs, ...]  # one per token where they were asked for, else empty


@dataclass(frozen=True, slots=True)
class Output:
    """The answer to one prompt, or the reason why there is none."""

    prompt_token_ids: tuple[int, ...] = ()
    choices: tuple[Choice, ...] = ()
    cached_tokens: int = 0  # prompt tokens whose KV was there already
    error: str = ""

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text


class Answer:
    """The choices of one request as they grow, or why there are none."""

    def __init__(
        self,
        id: str,
        prompt: tuple[int, ...],
        choices: list[ChoiceOutput],
        *,
        include_stop: bool = False,
        error: str = "",
    ) -> None:
        self.id = id
        self.error = error
        self.unwanted: list[str] = []  # what the engine need not go on with, after the last `take`
        self._prompt = prompt
        self._include_stop = include_stop
        self._cached_tokens = 0
        self._growing = choices
        self._text = [""] * len(choices)
        self._token_ids: list[list[int]] = [[] for _ in choices]
        self._logprobs: list[list[Logprobs]] = [[] for _ in choices]

    @property
    def num_open(self) -> int:
        return 0 if self.error else sum(choice.finish is None for choice in self._growing)

    @property
    def ended(self) -> bool:
        return not self.num_open

    def open_ids(self) -> list[str]:
        return [f"{self.id}.{choice.choice}" for choice in self._growing if choice.finish is None]

    def take(self, message: Update | Refusing) -> list[Delta]:
        """What the engine's next word on this request adds. Raises EngineError where it is the last of a failure."""
        number = int(message.id.partition(".")[2])
        choice = self._growing[number]
        self.unwanted = []
        if choice.finish is not None:
            return []
        if isinstance(message, Refusing):
            self._fail(message.message)
            return []
        ending = message.ending
        if ending is not None and ending.reason not in (Finish.STOP, Finish.LENGTH):
            raise EngineError(ending.message or f"the engine ended a request: {ending.reason}")
        silent = ending is not None and ending.stop_token is not None and not self._include_stop
        before = choice.num_tokens
        pieces = [choice.feed(message.tokens, message.logprobs, int(silent))]
        tokens = message.tokens[: choice.num_tokens - before]
        if ending is None:
            self.unwanted = [message.id] if choice.finish is not None else []
        else:
            self._cached_tokens = ending.cached_tokens if number == 0 else self._cached_tokens
            if choice.finish is None:
                pieces.append(choice.end(ending.reason))
        text = "".join(piece.text for piece in pieces if piece is not None)
        self._text[number] += text
        self._token_ids[number] += tokens
        self._logprobs[number] += message.logprobs[: len(tokens)]
        return [Delta(number, text, tokens, choice.finish)]

    def output(self) -> Output:
        if self.error:
            return Output(self._prompt, error=self.error)
        choices = zip(self._growing, self._text, self._token_ids, self._logprobs, strict=True)
        return Output(
            self._prompt,
            tuple(
                Choice(text, tuple(ids), grown.finish or "", tuple(logprobs)) for grown, text, ids, logprobs in choices
            ),
            self._cached_tokens,
        )

    def _fail(self, why: str) -> None:
        self.unwanted = self.open_ids()
        self.error = why


def convert(value: Any, schema: type[T]) -> T:
    """As msgspec does; raises RequestError that names the field and its value."""
    try:
        return msgspec.convert(value, schema)
    except msgspec.ValidationError as error:
        explained = explain(error, schema)
        field = (explained.param or "").partition(".")[0].partition("[")[0]
        got = f", got {reprlib.repr(value[field])}" if field in value and ", got " not in explained.message else ""
        raise RequestError(explained.message + got) from None
