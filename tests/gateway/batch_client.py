"""A client of files and batches, for tests of a gateway in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import aiohttp

from tests.gateway.stub import MODEL, Stage
from tests.support.wires import eventually

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ENDED = {"failed", "completed", "expired", "cancelled"}


def line(custom_id: str, url: str = TEXT, **body: Any) -> dict[str, Any]:
    body = {"model": MODEL, **({"prompt": "hello"} if url == TEXT else {"messages": [message("hello")]}), **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


class Client:
    def __init__(self, at: Stage, key: str = "") -> None:
        self._at = at
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    async def call(self, method: str, path: str, **more: Any) -> tuple[int, Any]:
        async with self._at.http.request(method, self._at.url + path, headers=self._headers, **more) as answer:
            text = await answer.read()
            return answer.status, json.loads(text) if answer.content_type == "application/json" else text

    async def ok(self, method: str, path: str, **more: Any) -> Any:
        status, answer = await self.call(method, path, **more)
        assert status == 200, answer
        return answer

    async def upload(self, content: bytes, **fields: str) -> tuple[int, Any]:
        form = aiohttp.FormData({"purpose": "batch"} | fields)
        form.add_field("file", content, filename="in.jsonl")
        return await self.call("POST", "/v1/files", data=form)

    async def uploaded(self, *lines: Any) -> str:
        status, file = await self.upload(jsonl(*lines))
        assert status == 200, file
        id: str = file["id"]
        return id

    async def create(self, file: str, endpoint: str = TEXT, **more: Any) -> tuple[int, Any]:
        body = {"input_file_id": file, "endpoint": endpoint, "completion_window": "24h"} | more
        return await self.call("POST", "/v1/batches", json=body)

    async def batch(self, *lines: Any, endpoint: str = TEXT) -> str:
        status, batch = await self.create(await self.uploaded(*lines), endpoint)
        assert status == 200 and batch["status"] == "validating", batch
        id: str = batch["id"]
        return id

    async def until(self, id: str, true: Callable[[Any], object]) -> Any:
        async def look() -> Any:
            batch = await self.ok("GET", f"/v1/batches/{id}")
            return batch if true(batch) else None

        return await eventually(look)

    async def ended(self, id: str) -> Any:
        return await self.until(id, lambda batch: batch["status"] in ENDED)

    async def lines(self, file: str) -> dict[str, Any]:
        """By custom_id, in the file's order; each is there once."""
        lines = [json.loads(text) for text in (await self.ok("GET", f"/v1/files/{file}/content")).splitlines()]
        found = {one["custom_id"]: one for one in lines}
        assert len(found) == len(lines)
        return found
