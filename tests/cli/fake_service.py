"""A small service for tests of clients: it answers each chat with listed pieces and remembers what it was sent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from aiohttp import web


class FakeService:
    def __init__(self, pieces: list[str], hang: bool) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self._pieces, self._hang = pieces, hang

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b': waiting\n\ndata: {"choices": [{"delta": {"role": "assistant"}}]}\n\n')
        for piece in self._pieces:
            event = {"error": {"message": piece}} if piece == "broken" else {"choices": [{"delta": {"content": piece}}]}
            await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
        if self._hang:
            await asyncio.sleep(60)
        await response.write(b"data: [DONE]\n\n")
        return response


@contextmanager
def fake_service(pieces: list[str], hang: bool = False) -> Iterator[FakeService]:
    service, loop = FakeService(pieces, hang), asyncio.new_event_loop()
    app = web.Application()
    app.add_routes([web.get("/v1/models", service.models), web.post("/v1/chat/completions", service.chat)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    loop.run_until_complete(runner.setup())
    site = web.TCPSite(runner, "127.0.0.1", 0)
    loop.run_until_complete(site.start())
    service.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield service
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
