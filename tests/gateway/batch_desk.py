"""A runner of batches over a folder, with a function instead of a gateway to answer the lines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.gateway.batches.archive import Archive
from shoal.gateway.batches.objects import OPEN, WINDOW_S, Batch, File
from shoal.gateway.batches.runner import Runner
from shoal.gateway.batches.store import Store
from shoal.gateway.batches.window import Window
from shoal.gateway.batches.work import Means
from tests.support.wires import eventually

URL = "/v1/completions"
NOW_S = 1_000_000.0
Answer = Callable[[str], Awaitable[bytes]]


async def fine(name: str) -> bytes:
    return b'{"answer": "%s"}' % name.encode()


async def never(name: str) -> bytes:
    await asyncio.Event().wait()
    raise AssertionError


@dataclass
class Desk:
    """A runner over a folder. `answer` gets the custom_id of the line, which its body repeats."""

    folder: Path
    answer: Answer = fine
    owner: str = "one"
    num_places: int = 4
    now_s: float = NOW_S
    asked: list[str] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    counted: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.archive = Archive(self.folder)
        means = Means(
            owner=self.owner,
            archive=self.archive,
            ask=self._ask,
            window=Window(self.num_places),
            now_s=lambda: self.now_s,
            max_body_bytes=10_000,
            retention_s=30 * 86400.0,
            count=self.counted.append,
        )
        self.runner = Runner(means, "m")

    async def _ask(self, path: str, body: bytes, *, id: str, tenant: str) -> bytes:
        name: str = json.loads(body)["name"]
        self.asked.append(name)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(0)
            return await self.answer(name)
        finally:
            self.at_once -= 1

    async def batch(self, *names: str, content: bytes | None = None, tenant: str = "") -> str:
        lines = [{"custom_id": name, "method": "POST", "url": URL, "body": {"name": name}} for name in names]
        data = content if content is not None else b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        stored = await self.archive.new_file()
        await stored.write(data)
        await stored.keep()
        now = int(self.now_s)
        row = File(
            id=stored.id, tenant=tenant, purpose="batch", filename="in", bytes=1, created_at=now, expires_at=now + 10**7
        )
        assert await self.archive.do(Store.add_file, row, 1 << 40)
        made = Batch(
            id=f"batch_{stored.id[5:]}",
            tenant=tenant,
            model="m",
            endpoint=URL,
            input_file_id=stored.id,
            metadata="null",
            created_at=now,
            expires_at=now + WINDOW_S,
        )
        assert await self.archive.do(Store.add_batch, made, 1000) == "added"
        self.runner.wake()
        return made.id

    async def look(self, id: str, tenant: str = "") -> Batch:
        batch = await self.archive.do(Store.batch, tenant, id)
        assert batch is not None
        return batch

    async def until(self, id: str, true: Callable[[Batch], object], tenant: str = "") -> Batch:
        async def look() -> Batch | None:
            batch = await self.look(id, tenant)
            return batch if true(batch) else None

        found = await eventually(look)
        assert found is not None
        return found

    async def ended(self, id: str, tenant: str = "") -> Batch:
        return await self.until(id, lambda batch: batch.status not in OPEN, tenant)

    def lines(self, id: str | None) -> dict[str, Any]:
        """The lines of an output or error file by custom_id; each is there once."""
        if id is None:
            return {}
        lines = [json.loads(line) for line in self.archive.path(id).read_text().splitlines()]
        found = {line["custom_id"]: line for line in lines}
        assert len(found) == len(lines)
        return found

    def on_disk(self) -> set[str]:
        return {path.name for path in (self.folder / "files").iterdir()}


@asynccontextmanager
async def running(desk: Desk) -> AsyncIterator[Desk]:
    task = asyncio.create_task(desk.runner.run())
    try:
        yield desk
    finally:
        desk.runner.stop()
        await asyncio.wait_for(task, 5)
        await desk.archive.close()
