"""The load driver against shoal itself: gateway, wire, engine process; only the model is scripted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from client import Target
from driver import run, schedule
from shoal.workload.arrivals import Arrivals, ClosedLoop, OpenLoop
from shoal.workload.lengths import Mix, Uniform
from tests.support.gateways import MODEL, service
from tests.support.scripted import Script
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.processes

MIX = Mix(Uniform(24, 0.5), Uniform(12, 0.5))


def test_what_the_driver_counts_is_what_the_service_counted(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    with service(model, Script(step_ms=1.0), Script(step_ms=1.0)) as shoal:
        target = Target(url=shoal.url, model=MODEL, timeout_s=20.0)
        kinds: tuple[Arrivals, ...] = (OpenLoop(100.0), ClosedLoop(4))
        loads = [
            schedule(arrivals, MIX, 30, seed=seed, vocab_size=259, warm_up=1) for seed, arrivals in enumerate(kinds)
        ]
        found = [asyncio.run(run(target, load)) for load in loads]
        assert [result.errors() for result in found] == [{}, {}]
        sent = [request for load in loads for request in (*load.requests, *load.warm_up)]
        asked = sum(request.output_tokens for request in sent)
        generated = sum(shoal.engine_count("generation_tokens_total", number) for number in range(2))
        assert generated == asked
        assert shoal.counts("requests_received_total")[""] == len(sent) == 62
    for result, load in zip(found, loads, strict=True):
        figures = result.figures()
        assert figures["prompt_tokens"] == sum(len(request.prompt) for request in load.requests)
        assert figures["output_tokens"] == sum(request.output_tokens for request in load.requests)
        assert all("tokens" not in reason for reason in result.invalid())
