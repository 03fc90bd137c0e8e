"""Streams that change their replica, since theirs ends or is killed. Clients read one whole text."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.serve import Serving, serve
from tests.support.wires import until

pytestmark = pytest.mark.torch

NUM_TOKENS, NUM_STREAMS = 2000, 4
LIMIT_S = 60.0


class Stream:
    def __init__(self, subject: str, number: int) -> None:
        self.prompt = f"{number} of {subject} and then " * 9
        self.seed = number
        self.text = ""
        self.events: list[dict[str, Any]] = []
        self.usage: dict[str, Any] = {}

    async def run(self, url: str, model: str, num_tokens: int = NUM_TOKENS) -> str:
        body = {
            "model": model, "prompt": self.prompt, "max_tokens": num_tokens, "stream": True,
            "ignore_eos": True, "temperature": 0.9, "seed": self.seed, "stream_options": {"include_usage": True},
        }  # fmt: skip
        limit = aiohttp.ClientTimeout(total=LIMIT_S)
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            session.post(url + "/v1/completions", json=body) as answer,
        ):
            assert answer.status == 200
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    self.events.append(event)
                    self.text += "".join(choice["text"] for choice in event.get("choices", ()))
        assert not [event for event in self.events if "error" in event]
        self.usage = self.events[-1]["usage"]
        return self.text


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[Serving]:
    with serve(model, "--replicas", "2") as service:
        yield service


def running(service: Serving) -> dict[str, int]:
    """Requests that run, by replica."""
    views = {replica["name"]: replica["view"] for replica in service.status()["replicas"]}
    return {name: view["num_running"] for name, view in views.items() if view}


def metric(service: Serving, name: str, **labels: str) -> float:
    (gateway,) = service.status()["gateways"]
    with urlopen(gateway["metrics"], timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples = [sample for family in families for sample in family.samples if sample.name == f"shoal:{name}_total"]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


async def disturbed(service: Serving, model: Path, number: int) -> None:
    """Streams, and the same ones undisturbed: the texts are equal. The replica with most of them gets the signal."""
    await until(lambda: list(running(service).values()) == [0, 0], 40)
    streams = [Stream(str(number), n) for n in range(NUM_STREAMS)]
    tasks = [asyncio.create_task(stream.run(service.url, model.name)) for stream in streams]
    await until(lambda: all(s.events for s in streams) and sum(running(service).values()) == NUM_STREAMS, 20)
    busiest = max(running(service).items(), key=lambda item: item[1])[0]
    os.kill(service.pid(busiest), number)
    texts = await asyncio.gather(*tasks)
    assert {stream.usage["completion_tokens"] for stream in streams} == {NUM_TOKENS}
    cached = {stream.usage["prompt_tokens_details"]["cached_tokens"] for stream in streams}
    assert cached == {0}, "what was found at the next replica is not the client's saving"
    await until(lambda: list(running(service).values()) == [0, 0], 40)
    again = [Stream(str(number), n) for n in range(NUM_STREAMS)]
    assert texts == await asyncio.gather(*(stream.run(service.url, model.name) for stream in again))


async def test_streams_leave_a_replica_that_ends_and_their_texts_are_the_same(pair: Serving, model: Path) -> None:
    moved = metric(pair, "request_moves", outcome="moved")
    replayed = metric(pair, "request_replays")
    await disturbed(pair, model, signal.SIGTERM)
    assert metric(pair, "request_moves", outcome="moved") > moved
    assert metric(pair, "request_replays") == replayed
    assert metric(pair, "request_failure") == 0


async def test_streams_of_a_killed_replica_go_on_at_another_and_their_texts_are_the_same(
    pair: Serving, model: Path
) -> None:
    replayed = metric(pair, "request_replays")
    await disturbed(pair, model, signal.SIGKILL)
    assert metric(pair, "request_replays") > replayed
    assert metric(pair, "request_failure") == 0
