"""Files and batches against hostile clients and bad luck: nothing strange gets in, and nothing is left behind."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from shoal.core.request import RequestSpec
from shoal.gateway.batches import archive
from tests.gateway.batch_client import Client, jsonl, line
from tests.gateway.stub import StubEngine, stage
from tests.support.wires import until

STRANGE = (
    *("..%2f..%2fetc%2fpasswd", "%2e%2e", "file-..%5c", "x" * 5000),
    *("%27%20OR%201=1--", "%F0%9F%98%80", "batches.sqlite3"),
)


async def test_ids_are_only_ever_looked_up(model_dir: Path, folder: Path) -> None:
    async with stage(model_dir, folder, StubEngine()) as at:
        for method, path in [
            ("GET", "/v1/files/{}"),
            ("GET", "/v1/files/{}/content"),
            ("DELETE", "/v1/files/{}"),
            ("GET", "/v1/batches/{}"),
            ("POST", "/v1/batches/{}/cancel"),
        ]:
            for id in STRANGE:
                url = URL(at.url + path.format(id), encoded=True)
                async with at.http.request(method, url) as answer:
                    assert answer.status == 404, (path, id)
                    assert len(await answer.read()) < 1000
        assert (await Client(at).create("../batches.sqlite3"))[0] == 404


BAD_BATCHES: list[tuple[dict[str, Any], str]] = [
    ({"endpoint": "/v1/embeddings"}, "endpoint"),
    ({"completion_window": "1h"}, "completion_window"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ({"metadata": {"k": "v" * 513}}, "metadata[...]"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
    ({"input_file_id": 1}, "input_file_id"),
]


async def test_a_bad_request_for_a_batch_is_named(model_dir: Path, folder: Path) -> None:
    async with stage(model_dir, folder, StubEngine()) as at:
        client = Client(at)
        file = await client.uploaded(line("a"))
        for more, param in BAD_BATCHES:
            status, answer = await client.create(file, **more)
            assert (status, answer["error"]["param"]) == (400, param)
        assert (await client.ok("GET", "/v1/batches"))["data"] == []


async def test_a_bad_upload_is_named_and_leaves_nothing(model_dir: Path, folder: Path) -> None:
    async with stage(model_dir, folder, StubEngine()) as at:
        for field, value in (("purpose", "fine-tune"), ("expires_after[seconds]", "9")):
            status, answer = await Client(at).upload(b"x", **{field: value})
            assert (status, answer["error"]["param"]) == (400, field)
        assert os.listdir(folder / "batches" / "files") == []
        assert (await Client(at).ok("GET", "/v1/files"))["data"] == []


async def test_lists_and_their_limits(model_dir: Path, folder: Path) -> None:
    async with stage(model_dir, folder, StubEngine()) as at:
        client = Client(at)
        files = [await client.uploaded(line("a")) for _ in range(3)]
        page = await client.ok("GET", "/v1/files?limit=2")
        assert [one["id"] for one in page["data"]] == files[:0:-1] and page["has_more"] is True
        page = await client.ok("GET", f"/v1/files?limit=2&after={page['last_id']}&purpose=batch")
        assert [one["id"] for one in page["data"]] == files[:1] and page["has_more"] is False
        assert (await client.ok("GET", "/v1/files?purpose=batch_output"))["data"] == []
        assert (await client.ok("GET", "/v1/files?order=asc"))["first_id"] == files[0]
        for query in ("limit=0", "limit=10001", "limit=x", "limit=%D9%A1", "after=file-0", "order=up"):
            assert (await client.call("GET", f"/v1/files?{query}"))[0] == 400, query
        assert (await client.call("GET", "/v1/batches?limit=101"))[0] == 400


async def test_an_upload_is_limited_streamed_and_private(model_dir: Path, folder: Path) -> None:
    async with stage(model_dir, folder, StubEngine(), max_file_bytes=3 << 20, max_body_bytes=1 << 20) as at:
        client = Client(at)
        status, file = await client.upload(b"x" * (3 << 20))
        assert status == 200 and file["bytes"] == 3 << 20, "more than other bodies may have"
        assert (await client.upload(b"x" * ((3 << 20) + 1)))[0] == 413
        assert (await client.upload(b"x" * (4 << 20)))[0] == 413
        assert (await at.complete(prompt="x" * (2 << 20)))[0] == 413, "other bodies have their own limit"
        assert os.listdir(folder / "batches" / "files") == [file["id"]]
        for path in [folder / "batches", *(folder / "batches").rglob("*")]:
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


async def test_a_client_that_goes_away_leaves_nothing(model_dir: Path, folder: Path) -> None:
    async with stage(model_dir, folder, StubEngine()) as at:
        _, writer = await asyncio.open_connection("127.0.0.1", int(at.url.rpartition(":")[2]))
        head = "POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-length: 9000\r\n"
        writer.write(f"{head}content-type: multipart/form-data; boundary=cut\r\n\r\n".encode())
        writer.write(b'--cut\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nhalf of it')
        files = folder / "batches" / "files"
        await until(lambda: files.exists() and os.listdir(files))
        writer.close()
        await until(lambda: not os.listdir(files))


async def test_a_full_disk_refuses_the_upload_and_says_so(
    model_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def write(self, fd: int, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    async with stage(model_dir, folder, StubEngine()) as at:
        client = Client(at)
        monkeypatch.setattr(archive, "os", FullDisk())
        status, answer = await client.upload(jsonl(line("a")))
        assert status == 507 and answer["error"]["code"] == "insufficient_storage"
        assert str(folder) not in answer["error"]["message"]
        monkeypatch.undo()
        assert os.listdir(folder / "batches" / "files") == []
        assert (await client.upload(jsonl(line("a"))))[0] == 200


async def test_a_file_in_use_is_not_deleted(model_dir: Path, folder: Path) -> None:
    async with stage(model_dir, folder, StubEngine(lambda engine, specs: None)) as at:
        client = Client(at)
        file = await client.uploaded(line("a"))
        _, batch = await client.create(file)
        assert (await client.call("DELETE", f"/v1/files/{file}"))[0] == 409
        await client.ok("POST", f"/v1/batches/{batch['id']}/cancel")
        await client.ended(batch["id"])
        assert (await client.ok("DELETE", f"/v1/files/{file}")) == {"id": file, "object": "file", "deleted": True}
        assert (await client.call("GET", f"/v1/files/{file}/content"))[0] == 404


async def test_no_more_lines_than_allowed_are_at_work(model_dir: Path, folder: Path) -> None:
    waiting: list[Sequence[RequestSpec]] = []
    engine = StubEngine(lambda engine, specs: waiting.append(specs))
    async with stage(model_dir, folder, engine, batch_lines_in_flight=3) as at:
        client = Client(at)
        id = await client.batch(*(line(f"n{number}") for number in range(9)))
        for round_ in range(3):
            await until(lambda: len(waiting) == 3)
            assert at.gateway._dispatcher.num_jobs == 3, round_
            for specs in waiting:
                engine.answer(specs)
            waiting.clear()
        assert (await client.ended(id))["status"] == "completed"
