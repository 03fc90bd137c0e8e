"""Streamed completions of a running service, read to their end, and what its processes say of themselves."""

from __future__ import annotations

import json
from typing import Any
from urllib.request import urlopen

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from shoal.cli import role
from tests.support.serve import Serving, complete

LIMIT_S = 120.0


class Stream:
    def __init__(self, subject: str, number: int) -> None:
        self.prompt = f"{number} of {subject} and then " * 9
        self.seed = number
        self.text = ""
        self.events: list[dict[str, Any]] = []
        self.usage: dict[str, Any] = {}

    async def run(self, url: str, model: str, num_tokens: int) -> str:
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
        assert not (errors := [event for event in self.events if "error" in event]), errors
        self.usage = self.events[-1]["usage"]
        return self.text


def running(service: Serving) -> dict[str, int]:
    """Requests that run, by replica."""
    views = {replica["name"]: replica["view"] for replica in service.status()["replicas"]}
    return {name: view["num_running"] for name, view in views.items() if view}


def metric(service: Serving, name: str, **labels: str) -> float:
    """A counter of the gateway's, summed over the labels that are not given."""
    (gateway,) = service.status()["gateways"]
    return _counter(gateway["metrics"], name, labels)


def engine_metric(service: Serving, engine: str, name: str) -> float:
    """A counter of an engine's; 0 while it is not there."""
    return sum(_counter(each["metrics"], name, {}) for each in service.status()["replicas"] if each["name"] == engine)


def _counter(url: str, name: str, labels: dict[str, str]) -> float:
    with urlopen(url, timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples = [sample for family in families for sample in family.samples if sample.name == f"shoal:{name}_total"]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


async def assign(service: Serving, model: str, *roles: str) -> None:
    """Until the gateway goes by them: it has the controller's list within a moment."""
    for number, each in enumerate(roles):
        role.post(service.status_url, f"engine-{number}", each)
    while True:
        before = metric(service, "split_requests")
        assert await complete(service.url, model) == 200
        if (metric(service, "split_requests") > before) == (set(roles) != {"both"}):
            return
