"""Servers under test as trees of real processes: paused and ended whole, whatever they do."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from client import Target
from peers import server as peers_server
from peers.server import Server, free_port
from tests.bench.server import serving
from tests.support.processes import wait_until

pytestmark = pytest.mark.processes

NOBODY = Target(url="http://127.0.0.1:9", model="tiny")

# A process that starts another in a session of its own, which starts a third.
FAMILY = """
import os, signal, subprocess, sys, time
code, mark, depth = sys.argv[1:]
if int(depth):
    subprocess.Popen([sys.executable, "-c", code, code, mark, str(int(depth) - 1)], start_new_session=True)
{then}
time.sleep(600)
"""


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """What of a failed test is still there afterwards is ended here."""
    path = tmp_path / "log"
    yield path
    for process in family(path):
        process.kill()


def start(log: Path, then: str = "", depth: int = 2, target: Target = NOBODY) -> Server:
    code = FAMILY.format(then=then)
    return Server("fish", [sys.executable, "-c", code, code, str(log), str(depth)], {}, target, log)


def family(log: Path) -> list[psutil.Process]:
    """Those that run with the log's path among their arguments, the first started first."""
    found = psutil.process_iter(["cmdline", "create_time", "status"])
    mine = [process for process in found if str(log) in (process.info["cmdline"] or ())]
    return sorted(
        (process for process in mine if process.info["status"] != psutil.STATUS_ZOMBIE),
        key=lambda process: (process.info["create_time"], process.pid),
    )


def statuses(log: Path) -> set[str]:
    return {process.status() for process in family(log)}


def test_all_are_paused_resumed_and_ended(log: Path) -> None:
    server = start(log)
    wait_until(lambda: len(family(log)) == 3)
    server.pause()
    wait_until(lambda: statuses(log) == {psutil.STATUS_STOPPED})
    assert server.memory(1 << 30).processes == 3
    server.resume()
    wait_until(lambda: psutil.STATUS_STOPPED not in statuses(log))
    server.end()
    assert family(log) == []


def test_what_is_paused_or_deaf_is_ended_too(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_server, "END_LIMIT_S", 0.2)
    server = start(log, then="signal.signal(signal.SIGTERM, signal.SIG_IGN); os.write(1, b'deaf ')")
    wait_until(lambda: log.read_text().count("deaf") == 3)
    server.pause()
    server.end()
    assert family(log) == []
    server.end()  # no harm


def test_children_whose_parent_has_ended_still_belong(log: Path) -> None:
    server = start(log)
    wait_until(lambda: len(family(log)) == 3)
    server.pause()
    server.resume()
    root, *others = family(log)
    root.kill()
    wait_until(lambda: root not in family(log))
    server.pause()
    wait_until(lambda: {process.status() for process in others} == {psutil.STATUS_STOPPED})
    server.end()
    assert family(log) == []


def test_a_process_that_keeps_starting_others_is_caught(log: Path) -> None:
    """As fast as they can be started: one that is made while its parent is being stopped must not be missed."""
    server = start(log, then="for _ in range(300): os.fork() or time.sleep(600)", depth=0)
    wait_until(lambda: len(family(log)) >= 4)
    server.pause()
    wait_until(lambda: statuses(log) == {psutil.STATUS_STOPPED}, 2.0)
    server.kill()
    assert family(log) == []


async def test_it_is_asked_until_it_answers(log: Path) -> None:
    port = free_port()
    server = start(log, target=Target(url=f"http://127.0.0.1:{port}", model="tiny"))
    try:
        waiting = asyncio.create_task(server.until_it_answers(30.0))
        await asyncio.sleep(0)
        async with serving(port) as fake:
            assert 0 < await waiting < 30
        assert fake.bodies[-1]["max_tokens"] == 1
    finally:
        server.end()


async def test_a_server_that_ends_or_never_answers_is_not_waited_for(log: Path) -> None:
    server = Server("fish", [sys.executable, "-c", "print('no water'); raise SystemExit(3)"], {}, NOBODY, log)
    with pytest.raises(SystemExit, match="fish ended with status 3:\nno water"):
        await server.until_it_answers(30.0)
    server = start(log)
    try:
        with pytest.raises(SystemExit, match=r"fish did not answer within 0.01 s \(connect"):
            await server.until_it_answers(0.01)
    finally:
        server.end()
    assert family(log) == []
