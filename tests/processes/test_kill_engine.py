"""`kill -9` of processes under a running service: what clients see, and how it comes back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.serve import Serving, complete, ready, states
from tests.support.wires import until

pytestmark = pytest.mark.torch


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


async def until_ready(service: Serving) -> None:
    """The service is shared: another test may have killed a part of it."""
    end_s = time.monotonic() + 40
    while await ready(service.url) != 200 or states(service) != ["serving"]:
        assert time.monotonic() < end_s, "the service did not recover"
        await asyncio.sleep(0.05)


async def test_a_killed_engine_costs_each_stream_one_error_event_and_comes_back(service: Serving, model: Path) -> None:
    await until_ready(service)
    restarts = service.restarts("engine-0")
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
    assert service.restarts("engine-0") == restarts + 1
    assert "killed by SIGKILL" in service.process.text


async def test_a_killed_controller_is_nobodys_business_and_comes_back(service: Serving, model: Path) -> None:
    await until_ready(service)
    stream = Stream()
    task = asyncio.create_task(stream.run(service.url, model.name))
    await asyncio.wait_for(stream.begun.wait(), 20)
    os.kill(service.pid("controller"), signal.SIGKILL)
    begin = time.monotonic()
    while len(stream.events) < 200 or time.monotonic() - begin < 0.5:
        assert await ready(service.url) == 200
        assert await complete(service.url, model.name) == 200
    await until(lambda: states(service) == ["serving"], 20)
    await until(lambda: [g["url"] for g in service.status()["gateways"]] == [service.url])
    assert not stream.errors
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_killed_gateway_comes_back_at_the_same_address(service: Serving, model: Path) -> None:
    await until_ready(service)
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
