"""Messages to the one string that the model was trained on, by the model folder's own Jinja template.

A template comes from the model folder, never from a caller, and still runs in Jinja's sandbox: it sees plain data and
can change nothing. The environment is the one that transformers gives a template, so that all of them render alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoal.gateway.text.tokenizer import named_special_tokens, read_json


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
        try:
            self._template = _environment(now).from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template has an error: {error}") from error

    @classmethod
    def load(cls, model_dir: Path) -> ChatTemplate:
        """chat_template.jinja, else `chat_template` of tokenizer_config.json: one string, or a list of named ones."""
        config = read_json(model_dir / "tokenizer_config.json")
        path = model_dir / "chat_template.jinja"
        source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
        if isinstance(source, list):
            source = {named["name"]: named["template"] for named in source}.get("default")
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
            return self._template.render(
                messages=plain,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise TemplateError(error.message or "the chat template refused the messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, LookupError, ArithmeticError) as error:
            # A template that adds a list to a string, say: the messages do not suit it.
            raise TemplateError(f"the chat template cannot render these messages: {error}") from error


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
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
