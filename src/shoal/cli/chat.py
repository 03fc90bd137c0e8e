"""`shoal chat`: a conversation in the terminal, or over a pipe, with a running service."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

DEFAULT_URL = "http://127.0.0.1:8000"


def chat(
    url: Annotated[str, typer.Option("--url", metavar="URL", help="address of a running service")] = DEFAULT_URL,
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="served name; empty: the first one")] = "",
    system: Annotated[str, typer.Option("--system", metavar="TEXT", help="system message; empty: none")] = "",
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", metavar="TOKENS", min=1, help="longest answer  [default: what is left]"),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", metavar="X", min=0, max=2, help="0: always the likeliest token  [default: 1.0]"),
    ] = None,
) -> None:
    """Talk to a running service. Ctrl-C stops an answer, Ctrl-D leaves. Reads lines from a pipe, too."""
    import asyncio

    options = {"max_tokens": max_tokens, "temperature": temperature}
    conversation = Conversation(url, model or asyncio.run(first_model(url)), system, options)
    if sys.stdin.isatty():
        _interactive(conversation)
    else:
        for line in sys.stdin:
            if line.strip():
                conversation.turn(line.strip())


class Conversation:
    def __init__(self, url: str, model: str, system: str, options: dict[str, Any]):
        self.url = url
        self.model = model
        self.options = {name: value for name, value in options.items() if value is not None}
        self.messages = [{"role": "system", "content": system}] if system else []

    def turn(self, text: str) -> None:
        """One question and its answer, written as it comes. An interrupted answer stays in the conversation."""
        import asyncio

        self.messages.append({"role": "user", "content": text})
        answer: list[str] = []
        try:
            asyncio.run(self._stream(answer))
        finally:
            typer.echo()
            if answer:
                self.messages.append({"role": "assistant", "content": "".join(answer)})
            else:
                self.messages.pop()

    async def _stream(self, answer: list[str]) -> None:
        from shoal.cli import service

        body = {"model": self.model, "messages": self.messages, "stream": True, **self.options}
        async with service.request("POST", self.url, "/v1/chat/completions", body) as response:
            async for line in response.content:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise service.ServiceError(event["error"]["message"])
                for choice in event["choices"]:
                    if text := choice["delta"].get("content"):
                        answer.append(text)
                        typer.echo(service.printable(text), nl=False)


def _interactive(conversation: Conversation) -> None:
    import readline  # noqa: F401  (gives input() its line editing)

    from shoal.cli.service import ServiceError

    typer.echo(f"{conversation.model} at {conversation.url}; Ctrl-C stops an answer, Ctrl-D leaves")
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        if not line:
            continue
        try:
            conversation.turn(line)
        except KeyboardInterrupt:
            typer.echo("[stopped]", err=True)
        except ServiceError as error:
            typer.echo(f"shoal: {error}", err=True)


async def first_model(url: str) -> str:
    from shoal.cli import service

    async with service.request("GET", url, "/v1/models") as response:
        models = (await response.json())["data"]
    if not models:
        raise service.ServiceError(f"{url} serves no model yet")
    return models[0]["id"]
