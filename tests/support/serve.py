"""A whole service, started as a person starts it: `shoal serve` on a small random model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from shoal.cli import status
from tests.support.processes import Process, running, wait_until

START_S = 90.0


@dataclass(frozen=True)
class Serving:
    process: Process
    url: str  # the API
    status_url: str

    @property
    def folder(self) -> Path:
        """The runtime folder."""
        return Path(self.process.wait_line(r"controller\.serving address=unix:(\S+)/controller\.sock").group(1))

    def status(self) -> dict[str, Any]:
        return status.fetch(self.status_url)

    def pid(self, name: str) -> int:
        """Of a child that runs: never 0, which would mean the test's own process group."""
        pid: int = wait_until(lambda: self._supervised(name).get("pid", 0), 20)
        return pid

    def restarts(self, name: str) -> int:
        restarts: int = wait_until(lambda: self._supervised(name), 20)["restarts"]
        return restarts

    def _supervised(self, name: str) -> dict[str, Any]:
        """Empty until the supervisor has told the controller."""
        found: dict[str, Any] = next((p for p in self.status()["processes"] if p["name"] == name), {})
        return found


@contextmanager
def serve(model: Path, *options: str) -> Iterator[Serving]:
    """Ready. Killed with everything at the end, where the test has not stopped it."""
    command = [sys.executable, "-m", "shoal.cli", "serve", str(model), "--port", "0", "--controller-port", "0"]
    with running([*command, "--dtype", "float32", "--kv-cache-bytes", str(64 << 20), *options]) as process:
        url = process.wait_line(r"API +(http://\S+)/v1", START_S).group(1)
        page = process.wait_line(r"status page +(http://\S+)").group(1)
        yield Serving(process, url, page)


async def ready(url: str) -> int:
    """The status that /ready answers, 0 where nobody does."""
    try:
        async with aiohttp.ClientSession() as session, session.get(url + "/ready") as answer:
            return answer.status
    except aiohttp.ClientError:
        return 0


async def complete(url: str, model: str) -> int:
    """The status of one short completion."""
    body = {"model": model, "prompt": "abc", "max_tokens": 3}
    async with aiohttp.ClientSession() as session, session.post(url + "/v1/completions", json=body) as answer:
        await answer.read()
        return answer.status


def states(service: Serving) -> list[str]:
    """Of the engines, as the controller lists them; empty where it does not answer."""
    try:
        return [replica["state"] for replica in service.status()["replicas"]]
    except OSError:
        return []
