"""Files and batches over HTTP: a real gateway, and engines that say what the test tells them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal.core.request import Refusal, RequestSpec
from shoal.gateway.auth import Grant, Keys, digest
from shoal.gateway.batches import api as batches_api
from shoal.gateway.batches import work
from shoal.wire.messages import Refusing
from tests.gateway.batch_client import CHAT, Client, jsonl, line, message
from tests.gateway.stub import MODEL, StubEngine, stage
from tests.support.wires import until


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
        other = asyncio.create_task(at.complete())  # keeps the gateway from ending at once
        await until(lambda: at.gateway._dispatcher.num_jobs == 5)
        at.gateway.drain()
        await until(lambda: at.gateway._dispatcher.num_jobs == 1, 1.0)
        other.cancel()
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


async def test_a_line_may_wait_longer_than_a_client_s_request(model_dir: Path, folder: Path) -> None:
    engine = StubEngine(lambda engine, specs: None)
    async with stage(model_dir, folder, engine, request_timeout_s=0.2) as at:
        client = Client(at)
        id = await client.batch(line("a"))
        await until(lambda: len(engine.submitted) == 1)
        assert (await at.complete())[0] == 504
        assert (await client.ok("GET", f"/v1/batches/{id}"))["status"] == "in_progress"
        engine.answer(engine.submitted[:1])
        assert (await client.ended(id))["request_counts"]["completed"] == 1
