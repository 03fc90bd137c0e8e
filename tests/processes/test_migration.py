"""Streams that change their replica, since theirs ends or is killed. Clients read one whole text."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serve import Serving, serve
from tests.support.streams import Stream, engine_metric, metric, running
from tests.support.tiny_model import make_tiny_model
from tests.support.wires import until

pytestmark = pytest.mark.torch

NUM_TOKENS, NUM_STREAMS = 1000, 4


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


RATE = str(1 << 20)  # bytes/s of what is fetched: a migration takes seconds


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, Path]]:
    """Three engines with much KV a token, and little bandwidth for it."""
    folder = tmp_path_factory.mktemp("large") / "large"
    model = make_tiny_model(folder, num_layers=8, num_heads=4, num_kv_heads=4, head_dim=32, max_position=8192)
    with serve(model, "--replicas", "3", "--peer-max-bytes-per-s", RATE) as service:
        yield service, model


@pytest.mark.parametrize("killed", ["source", "target"])
async def test_one_end_of_a_migration_is_killed_in_the_middle(slow: tuple[Serving, Path], killed: str) -> None:
    """Its replica is told to end; the stream is on its way to another one when either of them is killed."""
    service, model = slow
    await until(lambda: list(running(service).values()) == [0, 0, 0], 40)
    fetched = {name: engine_metric(service, name, "kv_fetched_bytes") for name in running(service)}
    migrated = metric(service, "request_migrations", outcome="migrated")
    stream, again = Stream(killed, 1), Stream(killed, 1)
    stream.prompt, again.prompt = stream.prompt * 8, again.prompt * 8
    task = asyncio.create_task(stream.run(service.url, model.name, NUM_TOKENS))
    await until(lambda: bool(stream.events) and sum(running(service).values()) == 1, 20)
    source = max(running(service).items(), key=lambda item: item[1])[0]
    os.kill(service.pid(source), signal.SIGTERM)

    def targets() -> list[str]:
        return [name for name, count in fetched.items() if engine_metric(service, name, "kv_fetched_bytes") > count]

    await until(lambda: bool(targets()), 20)
    assert metric(service, "request_migrations", outcome="migrated") == migrated
    os.kill(service.pid(source if killed == "source" else targets()[0]), signal.SIGKILL)
    text = await task
    assert stream.usage["completion_tokens"] == NUM_TOKENS
    assert metric(service, "request_failure") == 0
    await until(lambda: list(running(service).values()) == [0, 0, 0], 40)
    assert text == await again.run(service.url, model.name, NUM_TOKENS)
