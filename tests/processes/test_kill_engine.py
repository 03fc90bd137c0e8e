"""`kill -9` of processes under a running service: what clients see, and how it comes back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.support.processes import alive, descendants, listening, running, wait_until
from tests.support.serve import Serving, ready, serve
from tests.support.tiny_model import make_tiny_model
from tests.support.wires import until

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a context so long that a stream outlives the test's first look at it."""
    return make_tiny_model(tmp_path_factory.mktemp("model"), max_position=16384)


@pytest.fixture
def service(model: Path) -> Iterator[Serving]:
    with serve(model) as serving:
        yield serving


class Stream:
    """One streamed completion, read to its end."""

    def __init__(self) -> None:
        self.status = 0
        self.events: list[dict[str, Any]] = []
        self.begun = asyncio.Event()

    async def run(self, url: str, model: str) -> None:
        body = {"model": model, "prompt": "abc", "max_tokens": 12000, "stream": True, "ignore_eos": True}
        limit = aiohttp.ClientTimeout(total=60)
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            session.post(url + "/v1/completions", json=body) as answer,
        ):
            self.status = answer.status
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    self.events.append(json.loads(line[6:]))
                    self.begun.set()

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [event["error"] for event in self.events if "error" in event]

    @property
    def finish_reasons(self) -> set[str]:
        choices = [choice for event in self.events for choice in event.get("choices", ())]
        return {choice["finish_reason"] for choice in choices if choice.get("finish_reason")}


async def complete(url: str, model: str) -> int:
    body = {"model": model, "prompt": "abc", "max_tokens": 3}
    async with aiohttp.ClientSession() as session, session.post(url + "/v1/completions", json=body) as answer:
        await answer.read()
        return answer.status


async def test_a_killed_engine_costs_each_stream_one_error_event_and_comes_back(service: Serving, model: Path) -> None:
    streams = [Stream() for _ in range(3)]
    tasks = [asyncio.create_task(stream.run(service.url, model.name)) for stream in streams]
    async with asyncio.timeout(20):
        for stream in streams:
            await stream.begun.wait()
    assert await ready(service.url) == 200
    os.kill(service.pid("engine-0"), signal.SIGKILL)
    begin = time.monotonic()
    while await ready(service.url) == 200:
        assert time.monotonic() - begin < 1.0, "/ready stayed green"
    await asyncio.wait_for(asyncio.gather(*tasks), 10)
    for stream in streams:
        assert stream.status == 200
        assert len(stream.errors) == 1
        assert "error" in stream.events[-1], "something followed the error"
        assert not stream.finish_reasons
    assert await complete(service.url, model.name) == 503
    while await ready(service.url) != 200:
        assert time.monotonic() - begin < 30.0, "the engine did not come back"
        await asyncio.sleep(0.05)
    assert await complete(service.url, model.name) == 200
    assert service.restarts("engine-0") == 1
    assert "killed by SIGKILL" in service.process.text


async def test_a_killed_controller_is_nobodys_business_and_comes_back(service: Serving, model: Path) -> None:
    stream = Stream()
    task = asyncio.create_task(stream.run(service.url, model.name))
    await asyncio.wait_for(stream.begun.wait(), 20)
    os.kill(service.pid("controller"), signal.SIGKILL)
    begin = time.monotonic()
    while len(stream.events) < 200 or time.monotonic() - begin < 0.5:
        assert await ready(service.url) == 200
        assert await complete(service.url, model.name) == 200
    await until(lambda: _states(service) == ["serving"], 20)
    await until(lambda: [g["url"] for g in service.status()["gateways"]] == [service.url])
    assert not stream.errors
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_killed_gateway_comes_back_at_the_same_address(service: Serving, model: Path) -> None:
    stream = Stream()
    task = asyncio.create_task(stream.run(service.url, model.name))
    await asyncio.wait_for(stream.begun.wait(), 20)
    os.kill(service.pid("gateway-0"), signal.SIGKILL)
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: service.status()["replicas"][0]["view"]["num_running"] == 0, 5)  # no work for the gone
    begin = time.monotonic()
    while await ready(service.url) != 200:
        assert time.monotonic() - begin < 20.0
        await asyncio.sleep(0.05)
    assert await complete(service.url, model.name) == 200


def _states(service: Serving) -> list[str]:
    try:
        return [r["state"] for r in service.status()["replicas"]]
    except OSError:
        return []


def test_two_replicas_both_take_work_and_an_orderly_end_leaves_nothing_behind(model: Path) -> None:
    before = set(Path(tempfile.gettempdir()).glob("shoal-*"))
    with serve(model, "--replicas", "2") as service:
        assert _states(service) == ["serving", "serving"]

        async def work() -> list[int]:
            return await asyncio.gather(*(complete(service.url, model.name) for _ in range(16)))

        assert set(asyncio.run(work())) == {200}
        wait_until(lambda: all(r["view"]["generation_tokens"] > 0 for r in service.status()["replicas"]))
        family = descendants(service.process.pid)
        assert len(family) == 4
        folder = service.folder
        assert folder.stat().st_mode & 0o077 == 0
        service.process.kill(signal.SIGINT)
        assert service.process.wait(30) == 0
        assert not alive(family)
        assert not folder.exists()
    assert set(Path(tempfile.gettempdir()).glob("shoal-*")) <= before
    order = [service.process.text.find(f"{name}.stopped") for name in ("gateway", "engine", "controller")]
    assert -1 not in order and order == sorted(order)


def test_a_killed_supervisor_takes_its_children_along_and_the_next_one_cleans_up(model: Path) -> None:
    with serve(model) as service:
        family = descendants(service.process.pid)
        folder = service.folder
        service.process.kill(signal.SIGKILL)
        wait_until(lambda: not alive(family), 20)
        assert not list(folder.glob("*.sock"))
    with serve(model):
        assert not folder.exists()


def test_sec_01_a_default_start_listens_on_loopback_and_private_sockets_only(service: Serving) -> None:
    family = [psutil.Process(service.process.pid), *descendants(service.process.pid)]
    found = [where for process in family for where in listening(process.pid)]
    assert len(found) >= 6  # API, page, three metrics ports, two sockets
    for where in found:
        if where.startswith("/"):
            assert Path(where).lstat().st_mode & 0o777 == 0o600
            assert Path(where).parent.stat().st_mode & 0o777 == 0o700
        else:
            assert where.startswith("127.0.0.1:"), where


def test_a_start_that_cannot_succeed_ends_with_the_cause(model: Path) -> None:
    with serve(model) as service:
        port = service.url.rpartition(":")[2]
        command = [*service.process.popen.args]  # type: ignore[misc]
        command[command.index("--port") + 1] = port
        with running(command) as second:
            assert second.wait(60) == 1
            assert "the service did not start: gateway-0: exit status" in second.text
