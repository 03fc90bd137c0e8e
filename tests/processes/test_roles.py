"""One engine computes prompts, another decodes: real engines, roles set while they serve. Clients read whole texts."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.support.serve import Serving
from tests.support.streams import Stream, assign, metric, running
from tests.support.wires import until

pytestmark = pytest.mark.torch

NUM_STREAMS, NUM_TOKENS = 4, 600


def ask(service: Serving, model: Path, subject: str) -> tuple[list[Stream], list[asyncio.Task[str]]]:
    """With prompts of about 1,500 tokens."""
    streams = [Stream(subject, number) for number in range(NUM_STREAMS)]
    for stream in streams:
        stream.prompt *= 10
    return streams, [asyncio.create_task(stream.run(service.url, model.name, NUM_TOKENS)) for stream in streams]


async def test_prompts_go_to_one_engine_and_their_answers_on_to_the_other(pair: Serving, model: Path) -> None:
    await assign(pair, model.name, "prefill", "decode")
    _, tasks = ask(pair, model, "one")
    found = await asyncio.gather(*tasks)
    assert metric(pair, "split_requests", decision="split", reason="pays") == NUM_STREAMS
    assert metric(pair, "request_migrations", outcome="migrated") == NUM_STREAMS
    await assign(pair, model.name, "both", "both")
    _, tasks = ask(pair, model, "one")
    assert found == await asyncio.gather(*tasks)
    assert metric(pair, "split_requests", decision="split") == NUM_STREAMS
    assert metric(pair, "request_failure") == 0


@pytest.mark.parametrize("killed", [0, 1])
async def test_when_a_half_is_killed_the_other_does_the_whole(pair: Serving, model: Path, killed: int) -> None:
    await until(lambda: len(running(pair)) == 2 and not any(running(pair).values()), 40)
    await assign(pair, model.name, "prefill", "decode")
    streams, tasks = ask(pair, model, f"kill {killed}")
    await until(lambda: all(stream.events for stream in streams), 20)
    os.kill(pair.pid(f"engine-{killed}"), signal.SIGKILL)
    found = await asyncio.gather(*tasks)
    assert {stream.usage["completion_tokens"] for stream in streams} == {NUM_TOKENS}
    await until(lambda: len(running(pair)) == 2, 40)
    _, tasks = ask(pair, model, f"kill {killed}")
    assert found == await asyncio.gather(*tasks)
    assert metric(pair, "request_failure") == 0
