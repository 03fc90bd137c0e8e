"""A supervised child: started again by the rules, parked in a crash loop with the cause, stopped for certain."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest

from shoal.controller.launchers.child import Child
from shoal.fleet import lifecycle
from shoal.fleet.lifecycle import Life
from shoal.wire.messages import Supervised
from tests.support.processes import alive
from tests.support.wires import until

pytestmark = pytest.mark.processes


class Watched:
    def __init__(self, code: str) -> None:
        self.lines: list[str] = []
        self.reports: list[Supervised] = []
        self.child = Child(
            "engine-0",
            [sys.executable, "-c", code],
            env=dict(os.environ),
            inherit=[],
            say=lambda name, line: self.lines.append(line),
            changed=lambda: self.reports.append(self.child.report()),
        )

    @property
    def pid(self) -> int:
        return self.child.report().pid


@asynccontextmanager
async def supervised(code: str, monkeypatch: pytest.MonkeyPatch, first_wait_ms: float = 1) -> AsyncIterator[Watched]:
    monkeypatch.setattr(lifecycle, "FIRST_WAIT_NS", int(first_wait_ms * 1e6))
    watched = Watched(code)
    life = asyncio.create_task(watched.child.run())
    try:
        yield watched
    finally:
        watched.child.kill()
        await watched.child.stop(5)
        await asyncio.wait_for(life, 5)


async def test_five_deaths_in_a_row_park_it_and_the_cause_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "print('loading'); print('ValueError: no such tensor', flush=True); raise SystemExit(3)"
    async with supervised(code, monkeypatch) as watched:
        await until(lambda: watched.child.state is Life.PARKED, 20)
        report = watched.child.report()
        assert (report.state, report.restarts, report.pid) == ("parked", 4, 0)
        assert report.cause == "exit status 3: ValueError: no such tensor"
        assert watched.lines.count("loading") == 5
        assert "so it stays down" in watched.lines[-1]
    assert watched.child.state is Life.STOPPED


async def test_it_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised("raise SystemExit(1)", monkeypatch, 20) as watched:
        await until(lambda: watched.child.state is Life.PARKED, 20)
        waits = [line.rpartition("starts again in ")[2] for line in watched.lines if "again in" in line]
        assert waits == ["0.02 s", "0.04 s", "0.08 s", "0.16 s"]


async def test_a_killed_child_comes_back_with_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised("print('up', flush=True); import time; time.sleep(600)", monkeypatch) as watched:
        await until(lambda: "up" in watched.lines)
        first = watched.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: watched.lines.count("up") == 2)
        assert watched.pid not in (0, first)
        report = watched.child.report()
        assert (report.state, report.restarts, report.cause) == ("running", 1, "killed by SIGKILL")
        assert [r.state for r in watched.reports[:3]] == ["running", "backing_off", "running"]


async def test_stop_is_orderly_where_the_child_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import signal, time\n"
        "def end(*_): print('bye', flush=True); raise SystemExit(0)\n"
        "signal.signal(signal.SIGTERM, end); print('up', flush=True); time.sleep(600)"
    )
    async with supervised(code, monkeypatch) as watched:
        await until(lambda: "up" in watched.lines)
        await watched.child.stop(10)
        assert watched.lines[-1] == "bye"
        assert watched.child.state is Life.STOPPED


async def test_a_deaf_child_is_killed_with_what_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('child', p.pid, flush=True); time.sleep(600)"
    )
    async with supervised(code, monkeypatch) as watched:
        await until(lambda: watched.lines)
        family = [psutil.Process(watched.pid), psutil.Process(int(watched.lines[0].split()[1]))]
        await watched.child.stop(0.1)
        assert watched.child.state is Life.STOPPED
        await until(lambda: not alive(family))


async def test_a_stop_during_the_back_off_needs_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised("raise SystemExit(1)", monkeypatch, 600_000) as watched:
        await until(lambda: watched.child.state is Life.BACKING_OFF)
        await asyncio.wait_for(watched.child.stop(1), 1)
        assert watched.child.state is Life.STOPPED


async def test_output_of_any_kind_passes_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys; sys.stdout.buffer.write(b'\\xff\\xfe no text\\n\\n' + b'x' * 100_000 + b'\\nlast'); "
        "sys.stdout.flush(); import os; os._exit(0)"
    )
    async with supervised(code, monkeypatch, 600_000) as watched:
        await until(lambda: watched.child.state is Life.BACKING_OFF)
        lines = [line for line in watched.lines if "again in" not in line]
        assert "no text" in lines[0]
        assert lines[-1] == "last"
        assert all(len(line) <= 16 << 10 for line in lines)  # longer ones are cut
        assert watched.child.cause == "exit status 0: last"


async def test_a_program_that_does_not_exist_is_a_cause_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    async with supervised("", monkeypatch, 600_000) as watched:
        await until(lambda: watched.child.state is Life.BACKING_OFF)
        assert watched.child.cause.startswith("exit status 127: cannot be started")
