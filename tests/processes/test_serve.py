"""A whole service under its supervisor: how it starts, ends, and what it leaves behind."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from shoal.controller.launchers.folder import runtime_folder
from tests.support.processes import alive, descendants, running, wait_until
from tests.support.serve import Serving, complete, serve, states

pytestmark = pytest.mark.torch


def test_two_replicas_both_take_work_and_an_orderly_end_leaves_nothing_behind(model: Path) -> None:
    with serve(model, "--replicas", "2") as service:
        assert states(service) == ["serving", "serving"]

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
        order = [service.process.text.find(f"{name}.stopped") for name in ("gateway", "engine", "controller")]
        assert -1 not in order and order == sorted(order)


def test_a_killed_supervisor_takes_its_children_along_and_the_next_one_cleans_up(model: Path) -> None:
    with serve(model) as service:
        family = descendants(service.process.pid)
        folder = service.folder
        service.process.kill(signal.SIGKILL)
        wait_until(lambda: not alive(family), 20)
        assert not list(folder.glob("*.sock"))
        with runtime_folder():
            assert not folder.exists()


def test_a_start_that_cannot_succeed_ends_with_the_cause(service: Serving) -> None:
    command = [*service.process.popen.args]  # type: ignore[misc]
    command[command.index("--port") + 1] = service.url.rpartition(":")[2]
    with running(command) as second:
        assert second.wait(60) == 1
        assert "the service did not start: gateway-0: exit status" in second.text
        assert not alive(descendants(second.pid))
