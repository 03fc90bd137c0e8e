"""Streams that change their replica, since theirs ends or is killed. Clients read one whole text."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serve import Serving, serve
from tests.support.streams import Stream, metric, running
from tests.support.wires import until

pytestmark = pytest.mark.torch

NUM_TOKENS, NUM_STREAMS = 2000, 4


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[Serving]:
    with serve(model, "--replicas", "2") as service:
        yield service


async def disturbed(service: Serving, model: Path, number: int) -> None:
    """Streams, and the same ones undisturbed: the texts are equal. The replica with most of them gets the signal."""
    await until(lambda: list(running(service).values()) == [0, 0], 40)
    streams = [Stream(str(number), n) for n in range(NUM_STREAMS)]
    tasks = [asyncio.create_task(stream.run(service.url, model.name, NUM_TOKENS)) for stream in streams]
    await until(lambda: all(s.events for s in streams) and sum(running(service).values()) == NUM_STREAMS, 20)
    busiest = max(running(service).items(), key=lambda item: item[1])[0]
    os.kill(service.pid(busiest), number)
    texts = await asyncio.gather(*tasks)
    assert {stream.usage["completion_tokens"] for stream in streams} == {NUM_TOKENS}
    cached = {stream.usage["prompt_tokens_details"]["cached_tokens"] for stream in streams}
    assert cached == {0}, "what was found at the next replica is not the client's saving"
    await until(lambda: list(running(service).values()) == [0, 0], 40)
    again = [Stream(str(number), n) for n in range(NUM_STREAMS)]
    assert texts == await asyncio.gather(*(stream.run(service.url, model.name, NUM_TOKENS) for stream in again))


async def test_streams_leave_a_replica_that_ends_and_their_texts_are_the_same(pair: Serving, model: Path) -> None:
    moved = metric(pair, "request_migrations", outcome="migrated")
    replayed = metric(pair, "request_replays")
    await disturbed(pair, model, signal.SIGTERM)
    assert metric(pair, "request_migrations", outcome="migrated") > moved
    assert metric(pair, "request_replays") == replayed
    assert metric(pair, "request_failure") == 0


async def test_streams_of_a_killed_replica_go_on_at_another_and_their_texts_are_the_same(
    pair: Serving, model: Path
) -> None:
    replayed = metric(pair, "request_replays")
    await disturbed(pair, model, signal.SIGKILL)
    assert metric(pair, "request_replays") > replayed
    assert metric(pair, "request_failure") == 0
