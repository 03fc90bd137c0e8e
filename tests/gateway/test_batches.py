"""Files and batches over HTTP: a real gateway, and engines that say what the test tells them."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from shoal.core.request import Refusal, RequestSpec
from shoal.gateway.auth import Grant, Keys, digest
from shoal.gateway.batches import api as batches_api
from shoal.gateway.batches import archive, work
from shoal.wire.messages import Refusing
from tests.gateway.stub import MODEL, Stage, StubEngine, stage
from tests.support.wires import eventually, until

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


async def test_from_a_file_to_a_file(model_dir: Path, folder: Path) -> None:
    engine = StubEngine()
    async with stage(model_dir, folder, engine) as at:
        client = Client(at)
        content = jsonl(*(line(f"n{number}", CHAT, max_tokens=2) for number in range(10)))
        status, file = await client.upload(content)
        assert status == 200 and (file["object"], file["purpose"], file["bytes"]) == ("file", "batch", len(content))
        status, batch = await client.create(file["id"], CHAT, metadata={"what": "nightly"})
        assert status == 200 and batch["object"] == "batch" and batch["errors"] is None
        assert batch["expires_at"] == batch["created_at"] + 86400 and batch["metadata"] == {"what": "nightly"}
        batch = await client.ended(batch["id"])
        assert (batch["status"], batch["model"]) == ("completed", MODEL)
        assert batch["request_counts"] == {"total": 10, "completed": 10, "failed": 0}
        assert batch["in_progress_at"] <= batch["finalizing_at"] <= batch["completed_at"]
        output = await client.lines(batch["output_file_id"])
        assert list(output) == [f"n{number}" for number in range(10)]
        one = output["n0"]
        assert one["id"].startswith("batch_req_") and one["error"] is None
        assert one["response"]["status_code"] == 200 and one["response"]["request_id"]
        _, direct = await at.post(CHAT, messages=[message("hello")], max_tokens=2)
        for answer in (one["response"]["body"], direct):
            del answer["id"], answer["created"]
            answer["usage"].pop("prompt_tokens_details")
        assert one["response"]["body"] == direct
        assert {spec.service_class for spec in engine.submitted[:10]} == {"batch"}
        assert batch["error_file_id"] is None
        meta = await client.ok("GET", f"/v1/files/{batch['output_file_id']}")
        assert meta["purpose"] == "batch_output" and meta["filename"].endswith(".jsonl")
        assert (await client.ok("GET", f"/v1/files/{file['id']}/content")) == content


async def test_a_refused_line_says_what_http_would_say(model_dir: Path, folder: Path) -> None:
    bad = {
        "unknown field": {"temprature": 1},
        "other model": {"model": "other"},
        "out of bounds": {"max_tokens": -1},
        "unsupported": {"suffix": "x"},
        "too long": {"prompt": "x" * 500},
        "no room": {"max_tokens": 1000},
        "no text": {"prompt": ""},
        "not ours": {"logit_bias": {"9999": 1}},
    }
    async with stage(model_dir, folder, StubEngine()) as at:
        client = Client(at)
        id = await client.batch(*(line(name, **body) for name, body in bad.items()), line("good"))
        batch = await client.ended(id)
        assert batch["request_counts"] == {"total": len(bad) + 1, "completed": 1, "failed": len(bad)}
        errors = await client.lines(batch["error_file_id"])
        for name, body in bad.items():
            status, answer = await at.complete(**body)
            assert status >= 400
            response = errors[name]["response"]
            assert (response["status_code"], response["body"]) == (status, answer), name
        streaming = await client.ended(await client.batch(line("a", stream=True)))
        answer = (await client.lines(streaming["error_file_id"]))["a"]["response"]
        assert answer["status_code"] == 400 and answer["body"]["error"]["param"] == "stream"


async def test_a_file_that_is_none_of_requests(model_dir: Path, folder: Path) -> None:
    async with stage(model_dir, folder, StubEngine()) as at:
        client = Client(at)
        _, file = await client.upload(jsonl(line("a"), line("b", CHAT)) + b"{]\n" + jsonl(line("a")))
        _, batch = await client.create(file["id"])
        batch = await client.ended(batch["id"])
        assert batch["status"] == "failed" and batch["failed_at"] and batch["output_file_id"] is None
        assert batch["errors"]["object"] == "list"
        found = [(one["line"], one["code"], one["param"]) for one in batch["errors"]["data"]]
        assert found == [
            (2, "url_mismatch", "url"),
            (3, "invalid_json_line", None),
            (4, "duplicate_custom_id", "custom_id"),
        ]
        assert set(batch["errors"]["data"][0]) == {"code", "line", "message", "param"}


async def test_cancelled_in_the_middle(model_dir: Path, folder: Path) -> None:
    def two_only(engine: StubEngine, specs: Sequence[RequestSpec]) -> None:
        if len(engine.submitted) <= 2:
            engine.answer(specs)

    engine = StubEngine(two_only)
    async with stage(model_dir, folder, engine, batch_lines_in_flight=3) as at:
        client = Client(at)
        id = await client.batch(*(line(f"n{number}") for number in range(9)))
        await client.until(id, lambda batch: batch["request_counts"]["completed"] == 2 and len(engine.submitted) == 5)
        status, batch = await client.call("POST", f"/v1/batches/{id}/cancel")
        assert status == 200 and batch["status"] == "cancelling" and batch["cancelling_at"]
        batch = await client.ended(id)
        assert batch["status"] == "cancelled" and batch["cancelled_at"]
        assert len(await client.lines(batch["output_file_id"])) == 2
        errors = await client.lines(batch["error_file_id"])
        assert [one["error"]["code"] for one in errors.values()] == ["batch_cancelled"] * 7
        assert {id for id, _ in engine.aborted} == {spec.id for spec in engine.submitted[2:]}
        assert (await client.call("POST", f"/v1/batches/{id}/cancel"))[0] == 200, "once more does no harm"
        assert at.gateway._dispatcher.num_jobs == 0


async def test_what_has_ended_cannot_be_cancelled(model_dir: Path, folder: Path) -> None:
    async with stage(model_dir, folder, StubEngine()) as at:
        client = Client(at)
        id = await client.batch(line("a"))
        await client.ended(id)
        status, answer = await client.call("POST", f"/v1/batches/{id}/cancel")
        assert status == 409 and "completed" in answer["error"]["message"]


async def test_a_restart_in_the_middle_loses_nothing_and_repeats_nothing(model_dir: Path, folder: Path) -> None:
    def five_only(engine: StubEngine, specs: Sequence[RequestSpec]) -> None:
        if len(engine.submitted) <= 5:
            engine.answer(specs)

    shared = f"{folder}/batches"
    async with stage(model_dir, folder, StubEngine(five_only), batch_dir=shared, batch_lines_in_flight=4) as at:
        client = Client(at)
        id = await client.batch(*(line(f"n{number}", prompt=f"{number:02}") for number in range(12)))
        await client.until(id, lambda batch: batch["request_counts"]["completed"] == 5)
        loop = asyncio.get_running_loop()
        runner, began_s = at.gateway._runner, loop.time()
        at.gateway.drain()
        await until(lambda: not runner._tasks, 1.0)
        assert loop.time() - began_s < 1.0
    engine = StubEngine()
    async with stage(model_dir, folder / "second", engine, batch_dir=shared) as at:
        client = Client(at)
        batch = await client.ended(id)
        assert batch["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
        assert list(await client.lines(batch["output_file_id"])) == [f"n{number}" for number in range(12)]
        assert len(engine.submitted) == 7


async def test_two_gateways_share_a_folder(model_dir: Path, folder: Path) -> None:
    shared, engines = f"{folder}/batches", [StubEngine(), StubEngine()]
    async with (
        stage(model_dir, folder, engines[0], batch_dir=shared) as one,
        stage(model_dir, folder / "second", engines[1], batch_dir=shared) as two,
    ):
        ids = [await Client(one).batch(*(line(f"n{number}") for number in range(5))) for _ in range(6)]
        for id in ids:
            batch = await Client(two).ended(id)
            assert len(await Client(two).lines(batch["output_file_id"])) == 5
        assert sum(len(engine.submitted) for engine in engines) == 30


async def test_a_full_queue_and_a_missing_replica_cost_time_only(
    model_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "pause_s", lambda tries, at_least_s=0.0: 0.01)

    def full_at_first(engine: StubEngine, specs: Sequence[RequestSpec]) -> None:
        if len(engine.submitted) <= 12:
            engine.say(refused=[Refusing(spec.id, Refusal.QUEUE_FULL, "full") for spec in specs])
        else:
            engine.answer(specs)

    engine = StubEngine(full_at_first, ready=False)
    async with stage(model_dir, folder, engine) as at:
        client = Client(at)
        id = await client.batch(*(line(f"n{number}") for number in range(4)))
        await client.until(id, lambda batch: batch["status"] == "in_progress")
        engine.ready = True
        engine.say()
        batch = await client.ended(id)
        assert batch["request_counts"] == {"total": 4, "completed": 4, "failed": 0}


# -- tenants -----------------------------------------------------------------------------------------------------------


async def test_another_tenant_s_files_and_batches_do_not_exist(model_dir: Path, folder: Path) -> None:
    keys = Keys([], {digest(b"ka"): Grant(tenant="a"), digest(b"kb"): Grant(tenant="b")})
    async with stage(model_dir, folder, StubEngine(), keys=keys) as at:
        a, b = Client(at, "ka"), Client(at, "kb")
        file = await a.uploaded(line("x"))
        _, batch = await a.create(file)
        batch = await a.ended(batch["id"])
        output = batch["output_file_id"]
        for method, path in [
            ("GET", f"/v1/files/{file}"),
            ("GET", f"/v1/files/{file}/content"),
            ("GET", f"/v1/files/{output}/content"),
            ("DELETE", f"/v1/files/{file}"),
            ("GET", f"/v1/batches/{batch['id']}"),
            ("POST", f"/v1/batches/{batch['id']}/cancel"),
        ]:
            status, theirs = await b.call(method, path)
            _, nobodys = await b.call(method, path.replace(file, "file-0").replace(output, "file-0"))
            assert status == 404 and theirs["error"]["code"] == "not_found", path
            assert theirs["error"]["message"].split("'")[0] == nobodys["error"]["message"].split("'")[0]
        assert (await b.create(file))[0] == 404
        assert (await b.ok("GET", "/v1/files"))["data"] == (await b.ok("GET", "/v1/batches"))["data"] == []
        assert (await b.call("GET", f"/v1/files?after={file}"))[0] == 400
        assert len((await a.ok("GET", "/v1/files"))["data"]) == 2
        assert (await a.ok("DELETE", f"/v1/files/{file}"))["deleted"] is True


async def test_a_key_without_the_class_makes_no_batches(model_dir: Path, folder: Path) -> None:
    keys = Keys([], {digest(b"k"): Grant(tenant="a", classes=("interactive",))})
    async with stage(model_dir, folder, StubEngine(), keys=keys) as at:
        client = Client(at, "k")
        status, answer = await client.create(await client.uploaded(line("x")))
        assert status == 403 and answer["error"]["code"] == "class_not_granted"


async def test_limits_of_a_tenant(model_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_api, "MOST_OPEN", 2)
    engine = StubEngine(lambda engine, specs: None)
    async with stage(model_dir, folder, engine, tenant_file_bytes=2048) as at:
        client = Client(at)
        file = await client.uploaded(line("x"))
        assert [(await client.create(file))[0] for _ in range(3)] == [200, 200, 429]
        status, answer = await client.upload(b"x" * 2000)
        assert status == 507 and "2048" in answer["error"]["message"]
        assert len(os.listdir(folder / "batches" / "files")) == 1


# -- hostile and unlucky -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "id",
    [
        "..%2f..%2fetc%2fpasswd",
        "%2e%2e",
        "file-..%5c",
        "x" * 5000,
        "%27%20OR%201=1--",
        "%F0%9F%98%80",
        "batches.sqlite3",
    ],
)
async def test_ids_are_only_ever_looked_up(model_dir: Path, folder: Path, id: str) -> None:
    async with stage(model_dir, folder, StubEngine()) as at:
        client = Client(at)
        for method, path in [
            ("GET", "/v1/files/{}"),
            ("GET", "/v1/files/{}/content"),
            ("DELETE", "/v1/files/{}"),
            ("GET", "/v1/batches/{}"),
            ("POST", "/v1/batches/{}/cancel"),
        ]:
            url = URL(at.url + path.format(id), encoded=True)
            async with at.http.request(method, url) as answer:
                assert answer.status == 404, path
                assert len(await answer.read()) < 1000
        assert (await client.create("../batches.sqlite3"))[0] == 404


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata[...]"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
        ({"input_file_id": 1}, "input_file_id"),
    ],
)
async def test_a_bad_request_for_a_batch_is_named(model_dir: Path, folder: Path, more: Any, param: str) -> None:
    async with stage(model_dir, folder, StubEngine()) as at:
        client = Client(at)
        status, answer = await client.create(await client.uploaded(line("a")), **more)
        assert status == 400 and answer["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"purpose": "fine-tune"}, "purpose"), ({"expires_after[seconds]": "9"}, "expires_after[seconds]")],
)
async def test_a_bad_upload_is_named_and_leaves_nothing(
    model_dir: Path, folder: Path, fields: dict[str, str], param: str
) -> None:
    async with stage(model_dir, folder, StubEngine()) as at:
        status, answer = await Client(at).upload(b"x", **fields)
        assert status == 400 and answer["error"]["param"] == param
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
