"""From what a client wrote to token ids. Long texts are rendered and tokenised off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from shoal.core.request import Refusal
from shoal.gateway.body import OFF_LOOP_BYTES
from shoal.gateway.errors import ApiError, invalid
from shoal.gateway.schema import MAX_PROMPTS
from shoal.gateway.text.template import ChatTemplate, TemplateError
from shoal.gateway.text.tokenizer import Tokenizer

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    ids: tuple[int, ...]
    text: str = ""  # what an echo gives back


class Prompts:
    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self._template = template
        self._longest_token_bytes = max(
            (len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)), default=1
        )

    async def chat(
        self, messages: Sequence[Mapping[str, str]], *, window: int | None, add_generation_prompt: bool = True
    ) -> Prompt:
        """Raises ApiError where the template refuses the messages, or where they cannot fit the window (None: any)."""

        def render() -> str:
            return self._template.render(messages, add_generation_prompt=add_generation_prompt)

        size = sum(len(message["content"].encode()) for message in messages)
        self._check_size(size, window, "messages")
        try:
            text = await off_loop(render, size)
        except TemplateError as e:
            raise invalid(f"messages: {e}", "messages") from None
        return Prompt(ids=await self._encode(text, window, "messages", add_special_tokens=False))

    async def text(self, text: str, *, window: int | None, add_special_tokens: bool = True) -> Prompt:
        return Prompt(ids=await self._encode(text, window, "prompt", add_special_tokens=add_special_tokens), text=text)

    async def _encode(self, text: str, window: int | None, field: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        num_bytes = len(text.encode())
        self._check_size(num_bytes, window, field)
        work = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return tuple(await off_loop(work, num_bytes))

    async def completion(self, prompt: str | list[Any], *, window: int, echo: bool) -> list[Prompt]:
        """A string, a list of strings, one list of token ids, or a list of such lists. None of them empty."""
        if isinstance(prompt, str):
            prompts: list[Any] = [prompt]
        elif prompt and all(isinstance(item, int) for item in prompt):
            prompts = [prompt]
        else:
            prompts = prompt
        if not prompts or len(prompts) > MAX_PROMPTS:
            raise invalid(f"'prompt' must hold 1 to {MAX_PROMPTS} prompts, not {len(prompts)}", "prompt")
        if not (all(isinstance(p, str) for p in prompts) or all(isinstance(p, list) for p in prompts)):
            raise invalid("'prompt' must be all strings, all token ids, or all lists of token ids", "prompt")
        return [await self._one(p, window, echo) for p in prompts]

    async def _one(self, prompt: str | list[int], window: int, echo: bool) -> Prompt:
        if not prompt:
            raise ApiError(Refusal.EMPTY_PROMPT, "'prompt' is empty", param="prompt")
        if isinstance(prompt, str):
            return await self.text(prompt, window=window)
        ids = prompt
        text = await off_loop(lambda: self.tokenizer.decode(ids), 4 * len(ids)) if echo else ""
        return Prompt(ids=tuple(ids), text=text)

    def _check_size(self, num_bytes: int, window: int | None, field: str) -> None:
        """A text that is too long however it is cut into tokens is refused before it costs anything."""
        least = num_bytes // self._longest_token_bytes
        if window is not None and least > window:
            raise ApiError(
                Refusal.CONTEXT_LENGTH,
                f"the context window is {window} tokens: '{field}' has {num_bytes} bytes, more than {least} tokens",
                param=field,
            )


async def off_loop(work: Callable[[], T], size: int) -> T:
    """`work()`, in a thread where it is large enough to hold up others."""
    return await asyncio.to_thread(work) if size > OFF_LOOP_BYTES else work()
