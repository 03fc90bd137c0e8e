"""`shoal batch`: every line answered once, whatever the service does and however often it is interrupted."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from shoal.cli import batch
from shoal.gateway.batches import pauses
from tests.support.command import shoal_here
from tests.support.processes import wait_until


class Service:
    """Answers a request with its prompt in capitals. What it does to a prompt first is listed in `before`."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[str] = []
        self.headers: list[Any] = []
        self.before: dict[str, list[web.Response]] = {}
        self.hanging: set[str] = set()
        self.at_once = self.most_at_once = 0

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        self.asked.append(prompt)
        self.headers.append(request.headers)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(0.002)
            if self.before.get(prompt):
                return self.before[prompt].pop(0)
            if prompt in self.hanging:
                await asyncio.sleep(60)
            return web.json_response({"text": prompt.upper(), "model": body["model"], "path": request.path})
        finally:
            self.at_once -= 1


@pytest.fixture
def service() -> Iterator[Service]:
    with serving() as made:
        yield made


@contextmanager
def serving() -> Iterator[Service]:
    service, loop = Service(), asyncio.new_event_loop()

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "first"}]})

    app = web.Application()
    posts = [web.post(f"/v1/{path}", service.answer) for path in ("completions", "chat/completions")]
    app.add_routes([web.get("/v1/models", models), *posts])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    loop.run_until_complete(runner.setup())
    loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
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


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses are short; each is noted with what the service asked for."""
    noted: list[float] = []

    def pause_s(tries: int, at_least_s: float = 0.0) -> float:
        noted.append(at_least_s)
        return 0.01

    monkeypatch.setattr(pauses, "pause_s", pause_s)
    return noted


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "in.jsonl"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def write(path: Path, *lines: Any) -> None:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))


def read(path: Path) -> dict[str, Any]:
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    found = {one["custom_id"]: one for one in lines}
    assert len(found) == len(lines)
    return found


def prompts(*names: str) -> list[dict[str, str]]:
    return [{"custom_id": name, "prompt": name} for name in names]


def run(service: Service, source: Path, target: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    return shoal_here("batch", str(source), str(target), "--url", service.url, *options, **env)


def test_lines_of_every_kind(service: Service, source: Path, target: Path) -> None:
    write(
        source,
        {"prompt": "one", "temperature": 0},
        "",
        {"messages": [{"role": "user", "content": "two"}], "model": "other"},
        {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "three"}},
    )
    done = run(service, source, target, SHOAL_API_KEY="a-key,another")
    assert (done.returncode, done.stdout) == (0, "")
    assert "3 answered, 0 failed" in done.stderr and "a-key" not in done.stderr
    bodies = {name: one["response"]["body"] for name, one in read(target).items()}
    assert bodies == {
        "line-1": {"text": "ONE", "model": "first", "path": "/v1/completions"},
        "line-3": {"text": "TWO", "model": "other", "path": "/v1/chat/completions"},
        "x": {"text": "THREE", "model": "m", "path": "/v1/completions"},
    }
    for one in read(target).values():
        assert one["id"].startswith("batch_req_") and one["response"]["status_code"] == 200 and one["error"] is None
    assert {(each["x-shoal-class"], each["Authorization"]) for each in service.headers} == {("batch", "Bearer a-key")}
    assert not (target.parent / "out.errors.jsonl").exists()


def test_it_goes_on_where_it_was(service: Service, source: Path, target: Path) -> None:
    write(source, *prompts("a", "b", "c"))
    run(service, source, target)
    whole = target.read_bytes()
    write(source, *prompts("a", "b", "c", "d"))
    first_two = b"".join(whole.splitlines(keepends=True)[:2])
    for cut in (len(first_two), len(first_two) + 1, len(first_two) + 30, len(whole) - 1):
        target.write_bytes(whole[:cut])
        service.asked.clear()
        done = run(service, source, target)
        assert done.returncode == 0 and "2 were done before" in done.stderr
        assert set(read(target)) == {"a", "b", "c", "d"} and len(service.asked) == 2
    service.asked.clear()
    assert run(service, source, target).returncode == 0 and service.asked == []


def test_what_failed_is_beside_it_and_is_tried_again(service: Service, source: Path, target: Path) -> None:
    write(source, *prompts("good", "bad"))
    service.before["bad"] = [web.json_response({"error": {"message": "no"}}, status=400)]
    done = run(service, source, target)
    errors = target.parent / "out.errors.jsonl"
    assert done.returncode == 1 and "1 answered, 1 failed" in done.stderr and str(errors) in done.stderr
    assert set(read(target)) == {"good"}
    assert read(errors)["bad"]["response"]["status_code"] == 400
    assert read(errors)["bad"]["response"]["body"] == {"error": {"message": "no"}}
    done = run(service, source, target)
    assert done.returncode == 0 and set(read(target)) == {"good", "bad"} and not errors.exists()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "invalid_json_line"),
        ("[1]", "invalid_json_line"),
        ("[" * 100_000, "invalid_json_line"),
        ('{"custom_id": 5, "prompt": "x"}', "invalid_json_line"),
        ('{"a": 1}', "invalid_line"),
        ('{"prompt": "x", "messages": []}', "invalid_line"),
        ('{"custom_id": "ok", "prompt": "again"}', "duplicate_custom_id"),
        ('{"url": "http://elsewhere/", "body": {}}', "invalid_url"),
        ('{"url": "/v1/completions", "method": "GET", "body": {}}', "invalid_url"),
        ('{"prompt": "' + "x" * (5 << 20) + '"}', "line_too_long"),
    ],
)
def test_a_line_that_is_no_request_costs_that_line_only(
    service: Service, source: Path, target: Path, text: str, code: str
) -> None:
    write(source, *prompts("ok"), text, *prompts("last"))
    assert run(service, source, target).returncode == 1
    assert set(read(target)) == {"ok", "last"} and sorted(service.asked) == ["last", "ok"]
    [error] = read(target.parent / "out.errors.jsonl").values()
    assert error["error"]["code"] == code and "line 2: " in error["error"]["message"] and error["response"] is None


def test_not_now_is_asked_again_when_the_service_says(
    service: Service, source: Path, target: Path, quick: list[float]
) -> None:
    write(source, *prompts("a"))
    service.before["a"] = [
        *(web.json_response({}, status=429, headers={"retry-after": "7"}) for _ in range(5)),
        *(web.Response(status=503, text="busy") for _ in range(5)),
    ]
    assert run(service, source, target).returncode == 0
    assert service.asked == ["a"] * 11 and quick == [7.0] * 5 + [0.0] * 5


def test_a_request_at_which_the_service_fails_is_not_sent_for_ever(
    service: Service, source: Path, target: Path, quick: list[float]
) -> None:
    write(source, *prompts("a", "b"))
    service.before["a"] = [web.Response(status=502, text="<html>\nbad gateway") for _ in range(9)]
    service.before["b"] = [web.Response(status=200, text="data: not for us\n\n"), web.Response(status=500)]
    done = run(service, source, target)
    assert done.returncode == 1 and Counter(service.asked) == {"a": batch.MAX_TRIES, "b": 3}
    error = read(target.parent / "out.errors.jsonl")["a"]["response"]
    assert error["status_code"] == 502 and "bad gateway" in error["body"]["error"]["message"]
    assert set(read(target)) == {"b"}


def test_a_key_that_is_not_accepted_ends_it_at_once(service: Service, source: Path, target: Path) -> None:
    write(source, *prompts(*(f"n{number}" for number in range(50))))
    service.before["n0"] = [web.json_response({"error": {"message": "not that class"}}, status=403)]
    done = run(service, source, target, "--concurrency", "1")
    assert done.returncode == 1 and "not that class" in done.stderr and service.asked == ["n0"]


def test_a_service_that_is_gone_is_given_up(
    service: Service, source: Path, target: Path, quick: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(source, *prompts("a"))
    done = shoal_here("batch", str(source), str(target), "--url", "http://127.0.0.1:1")
    assert done.returncode == 1 and "is `shoal serve` running?" in done.stderr
    monkeypatch.setattr(batch, "GIVE_UP_S", 0.05)
    done = shoal_here("batch", str(source), str(target), "--url", "http://127.0.0.1:1", "--model", "m")
    assert done.returncode == 1 and "has not answered" in done.stderr and "goes on from there" in done.stderr


def test_so_many_requests_at_once(service: Service, source: Path, target: Path) -> None:
    write(source, *prompts(*(f"n{number}" for number in range(60))))
    assert run(service, source, target, "--concurrency", "5").returncode == 0
    assert service.most_at_once == 5 and len(read(target)) == 60


def test_files_that_are_something_else_are_left_alone(service: Service, source: Path, target: Path) -> None:
    write(source, *prompts("a"))
    for content in ("notes of mine", '{"prompt": "x"}\n', "\n"):
        target.write_text(content)
        done = run(service, source, target)
        assert done.returncode == 1 and "choose another file" in done.stderr
        assert target.read_text() == content
    done = run(service, source, source)
    assert done.returncode == 2 and "both input and output" in done.stderr
    errors = source.parent / "out.errors.jsonl"
    write(errors, *prompts("a"))
    assert run(service, errors, target).returncode == 2 and errors.exists()
    assert run(service, source.parent / "nowhere", target).returncode == 2


def test_two_do_not_write_one_file(service: Service, source: Path, target: Path) -> None:
    from shoal.cli.batch_files import Results

    write(source, *prompts("a"))
    with Results(target):
        done = run(service, source, target)
    assert done.returncode == 1 and "another process" in done.stderr


@pytest.mark.processes
def test_ctrl_c_keeps_what_is_done(service: Service, source: Path, target: Path) -> None:
    write(source, *prompts(*(f"n{number}" for number in range(20))))
    service.hanging = {f"n{number}" for number in range(8, 20)}
    command = [sys.executable, "-m", "shoal.cli", "batch", str(source), str(target), "--url", service.url]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ}, text=True)
    try:
        wait_until(lambda: target.exists() and target.read_bytes().count(b"\n") == 8, 20)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 130 and "8 answered" in told and "goes on from here" in told
    assert "Traceback" not in told
    service.hanging.clear()
    service.asked.clear()
    assert run(service, source, target).returncode == 0
    assert len(read(target)) == 20 and len(service.asked) == 12
