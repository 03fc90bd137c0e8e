"""Messages to the one string that the model was trained on, by the model folder's own Jinja template.

A template comes from the model folder, never from a caller, and still runs in Jinja's sandbox: it sees plain data and
can change nothing. Loops and macros that go on for ever, and texts that grow without end, are errors. Otherwise the
environment is the one that transformers gives a template, so that all of them render alike.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoal.gateway.text.tokenizer import named_special_tokens, read_json

RENDER_S = 0.5  # processor time
MAX_CHARS = 16 << 20  # of the rendered text, and of what an operator makes


class TemplateError(Exception):
    """The messages cannot be rendered; the message is the template's own reason, or that there is no template."""


class ChatTemplate:
    """Compiled once; `render` may be called from several threads."""

    def __init__(
        self, source: str | None, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        """`special_tokens`: bos_token, eos_token … as the template names them. Raises TemplateError for bad syntax."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        if source is None:
            return
        if not isinstance(source, str):
            raise TemplateError(f"the model's chat template is a {type(source).__name__}, not text")
        try:
            self._template = _environment(now).from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"the model's chat template has an error: {error}") from error

    @classmethod
    def load(cls, model_dir: Path) -> ChatTemplate:
        """chat_template.jinja, else `chat_template` of tokenizer_config.json: one string, or a list of named ones."""
        config = read_json(model_dir / "tokenizer_config.json")
        path = model_dir / "chat_template.jinja"
        try:
            source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
            if isinstance(source, list):
                source = {named["name"]: named["template"] for named in source}.get("default")
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise TemplateError(f"the chat template of {model_dir} cannot be read: {error!r}") from error
        return cls(source, named_special_tokens(config))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt's text, special tokens included: encode it with `add_special_tokens=False`.

        `messages` hold plain JSON data; a key whose value is None counts as missing. Raises TemplateError.
        """
        if self.source is None:
            raise TemplateError("this model has no chat template: use /v1/completions")
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            _limit.ends_s = time.thread_time() + RENDER_S
            pieces = self._template.generate(
                messages=plain,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
            return _joined(pieces)
        except jinja2.TemplateError as error:
            raise TemplateError(error.message or "the chat template refused the messages") from error
        except (RecursionError, MemoryError) as error:
            raise TemplateError(f"the chat template goes too far: {type(error).__name__}") from error
        except (TypeError, ValueError, KeyError, AttributeError, LookupError, ArithmeticError) as error:
            # A template that adds a list to a string, say: the messages do not suit it.
            raise TemplateError(f"the chat template cannot render these messages: {error}") from error


def _joined(pieces: Iterable[str]) -> str:
    kept, num_chars = [], 0
    for piece in pieces:
        kept.append(piece)
        num_chars += len(piece)
        if num_chars > MAX_CHARS:
            raise jinja2.TemplateRuntimeError(f"the chat template makes more than {MAX_CHARS} characters")
    return "".join(kept)


_limit = threading.local()  # ends_s: the thread's processor time at which its present rendering is over


class _Environment(ImmutableSandboxedEnvironment):
    """Each turn of a loop and each call of a macro looks at the time; operators that make long values at the length."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def take_turn(self) -> bool:
        if time.thread_time() > _limit.ends_s:
            raise jinja2.TemplateRuntimeError(f"the chat template took longer than {RENDER_S:g} s")
        return True

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _size(operator, left, right) > MAX_CHARS:
            raise jinja2.TemplateRuntimeError(f"the chat template makes a value of more than {MAX_CHARS} elements")
        return super().call_binop(context, operator, left, right)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        kinds: tuple[type[nodes.For | nodes.Macro | nodes.CallBlock], ...] = (nodes.For, nodes.Macro, nodes.CallBlock)
        for node in source.find_all(kinds):
            turn = nodes.Call(nodes.EnvironmentAttribute("take_turn"), [], [], None, None, lineno=node.lineno)
            if isinstance(node, nodes.For) and node.test is not None:
                node.test = nodes.And(turn, node.test, lineno=node.lineno)
            else:
                node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
        return super()._generate(source, *args, **kwargs)


def _size(operator: str, left: Any, right: Any) -> int:
    """Elements of what the operator makes; of a whole number: its bits. 0 where that is small anyway."""
    if operator == "**":
        return left.bit_length() * abs(right) if isinstance(left, int) and isinstance(right, int) else 0
    sizes = [len(value) if isinstance(value, str | list | tuple) else None for value in (left, right)]
    if operator == "+":
        return sum(size or 0 for size in sizes)
    match sizes:
        case [int(size), None]:
            return size * right if isinstance(right, int) else 0
        case [None, int(size)]:
            return size * left if isinstance(left, int) else 0
    return 0


def _environment(now: Callable[[], datetime]) -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # constant expressions would be computed, without any limit, when the template is loaded
        extensions=[loopcontrols, _GenerationBlock],
    )
    del environment.globals["lipsum"]
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks, for training, what an assistant wrote. Here it is its content."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter this does not escape HTML characters and keeps the order of keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
