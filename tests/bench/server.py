"""A server that speaks just enough of the API: the first token id of a prompt says how the request fares.

python -m tests.bench.server --port N      until it is ended
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

FINE, BUSY, ERROR_EVENT, CUT, NO_DONE, NO_FINISH, NO_USAGE, GARBAGE, SILENT, SHORT = range(10)

LOGPROBS = {"tokens": [" a", " b"], "top_logprobs": [{" a": -0.1, " c": -3.0}, {" b": -0.2, " d": -2.0}]}


@dataclass
class Server:
    url: str = ""
    first_s: float = 0.0  # before the first token, one request at a time
    between_s: float = 0.0
    per_event: int = 1  # tokens in one event
    api_key: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    active: int = 0
    most_active: int = 0
    one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)
    heard: asyncio.Event = field(default_factory=asyncio.Event)  # set by the first request
    released: asyncio.Event = field(default_factory=asyncio.Event)  # ends SILENT requests

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": {"message": "who are you?"}}, status=401)
        body = await request.json()
        self.bodies.append(body)
        self.heard.set()
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": " a b", "logprobs": LOGPROBS}]})
        fate, total = body["prompt"][0], body["max_tokens"]
        if fate == BUSY:
            return web.json_response({"error": {"message": "full"}}, status=429)
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            return await self._stream(request, body, fate, total)
        finally:
            self.active -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any], fate: int, total: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def event(value: Any) -> None:
            await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")

        async with self.one_at_a_time:
            await asyncio.sleep(self.first_s)
        await response.write(b": a comment\r\n\r\n")
        if fate == SILENT:
            await self.released.wait()
            return response
        for sent in range(0, total, self.per_event):
            if sent:
                await asyncio.sleep(self.between_s)
            last = sent + self.per_event >= total and fate != NO_FINISH
            await event({"choices": [{"text": "", "finish_reason": "length" if last else None}], "usage": None})
            if fate == ERROR_EVENT:
                await event({"error": {"message": "the replica died"}})
            if fate == GARBAGE:
                await response.write(b"data: {oops\n\n")
            if fate == CUT:
                assert request.transport
                request.transport.close()
                return response
        if fate != NO_USAGE:
            done = total - (fate == SHORT)
            await event({"choices": [], "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": done}})
        if fate != NO_DONE:
            await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def serving(port: int = 0, **settings: Any) -> AsyncIterator[Server]:
    server = Server(**settings)
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.completions)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        server.url = "http://{}:{}".format(*runner.addresses[0][:2])
        yield server
    finally:
        server.released.set()
        await runner.cleanup()


async def _serve(port: int) -> None:
    async with serving(port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[sys.argv.index("--port") + 1])))
