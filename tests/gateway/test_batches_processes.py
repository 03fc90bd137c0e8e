"""Batches across real processes: OpenAI's client, a gateway that is killed, and `shoal batch` against the service."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import openai
import pytest

from shoal.gateway.batches.objects import OPEN
from tests.support.command import shoal
from tests.support.gateways import MODEL, Service, gateway_process
from tests.support.processes import scripted_engine, wait_until
from tests.support.scripted import Script

pytestmark = pytest.mark.processes


def line(name: str, **body: Any) -> bytes:
    asked = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"model": MODEL, **body}}
    return json.dumps(asked).encode() + b"\n"


def ended(client: openai.OpenAI, id: str) -> openai.types.Batch:
    def look() -> openai.types.Batch | None:
        batch = client.batches.retrieve(id)
        return None if batch.status in OPEN else batch

    batch = wait_until(look, 20)
    assert batch is not None
    return batch


def test_openai_s_client_goes_the_whole_way(small: Service) -> None:
    client = small.client
    lines = [line(f"n{number}", prompt="xyz") for number in range(20)] + [line("bad", prompt="xyz", n=99)]
    file = client.files.create(file=("in.jsonl", b"".join(lines)), purpose="batch")
    assert (file.purpose, file.filename, file.status) == ("batch", "in.jsonl", "processed")
    made = client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"who": "me"}
    )
    assert made.status == "validating" and made.metadata == {"who": "me"}
    batch = ended(client, made.id)
    assert batch.status == "completed" and batch.request_counts is not None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (21, 20, 1)
    assert batch.output_file_id is not None and batch.error_file_id is not None
    output = [json.loads(text) for text in client.files.content(batch.output_file_id).text.splitlines()]
    assert [one["custom_id"] for one in output] == [f"n{number}" for number in range(20)]
    for one in output:
        answer = openai.types.Completion.model_validate(one["response"]["body"])
        assert answer.choices[0].text == "abc"
    [bad] = [json.loads(text) for text in client.files.content(batch.error_file_id).text.splitlines()]
    assert bad["response"]["status_code"] == 400 and bad["response"]["body"]["error"]["param"] == "n"
    assert made.id in [one.id for one in client.batches.list(limit=1)]
    assert {file.id, batch.output_file_id, batch.error_file_id} <= {one.id for one in client.files.list()}
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(made.id)
    assert small.counts("batch_lines_total") == {"true": 20, "false": 1}


def test_openai_s_client_sees_why_a_file_is_none(small: Service) -> None:
    client = small.client
    file = client.files.create(file=("in.jsonl", b"{\n"), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    batch = ended(client, made.id)
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
    assert (batch.errors.data[0].line, batch.errors.data[0].code) == (1, "invalid_json_line")


def test_a_killed_gateway_s_batch_goes_on_where_it_was(model_dir: Path, folder: Path) -> None:
    engine, store = f"unix:{folder}/e.sock", folder / "batches" / "batches.sqlite3"
    options = ("--batch-dir", str(folder / "batches"), "--batch-lines-in-flight", "4")
    names = [f"n{number}" for number in range(40)]
    with scripted_engine(Script(step_ms=5), listen=engine):
        with gateway_process(model_dir, [engine], *options) as (url, gateway):
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=5)
            content = b"".join(line(name, prompt="the sea", max_tokens=30) for name in names)
            file = client.files.create(file=("in.jsonl", content), purpose="batch")
            made = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
            wait_until(lambda: _completed(client, made.id) >= 8, 15)
            gateway.kill()
            gateway.wait()
        with contextlib.closing(sqlite3.connect(store)) as database, database:
            before = dict(database.execute("SELECT number, line FROM results"))
            database.execute("UPDATE batches SET lease_until = 0")  # as if its ten seconds were over
        assert 8 <= len(before) < 40
        with gateway_process(model_dir, [engine], *options) as (url, gateway):
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=5)
            batch = ended(client, made.id)
            assert batch.status == "completed" and _completed(client, made.id) == 40
            assert batch.output_file_id is not None
            output = client.files.content(batch.output_file_id).content.splitlines(keepends=True)
            assert [json.loads(text)["custom_id"] for text in output] == names
            assert {number: output[number - 1] for number in before} == before, "what was done is not done again"
            assert gateway.stop() == 0


def _completed(client: openai.OpenAI, id: str) -> int:
    counts = client.batches.retrieve(id).request_counts
    return 0 if counts is None else counts.completed


def test_shoal_batch_against_the_service(small: Service, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(line("a", prompt="xyz") + b'{"messages": [{"role": "user", "content": "xyz"}]}\n')
    done = shoal("batch", str(source), str(target), "--url", small.url)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "2 answered, 0 failed" in done.stderr
    found = {one["custom_id"]: one["response"]["body"] for one in map(json.loads, target.read_text().splitlines())}
    assert found["a"]["choices"][0]["text"] == "abc"
    assert found["line-2"]["choices"][0]["message"]["content"] == "abc"
