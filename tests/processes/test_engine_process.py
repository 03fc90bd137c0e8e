"""A real engine process with a scripted runner: how it starts, fails, drains and ends."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from shoal.core.request import Finish, RequestSpec
from shoal.wire import lifeline
from shoal.wire.connection import Cause, Connection, ConnectionClosed
from shoal.wire.messages import Frame, KeepAlive, Submit, Update
from tests.support.processes import Process, alive, listening, running, scripted_engine, socket_folder, wait_until
from tests.support.scripted import Fault, Rule, Script
from tests.support.wires import connect, next_of

pytestmark = pytest.mark.processes

ENDLESS = Script(rules=(Rule(tokens=(5,), then=5),), step_ms=5)


def submit(id: str, max_tokens: int = 20, prompt: tuple[int, ...] = (1, 2, 3)) -> Submit:
    return Submit(specs=(RequestSpec(id=id, prompt=prompt, max_tokens=max_tokens),))


async def collect(connection: Connection) -> tuple[list[Update], ConnectionClosed | None]:
    """Updates until a stream ends or the connection does."""
    updates: list[Update] = []
    try:
        while not any(u.ending for u in updates):
            frame = await next_of(connection, Frame, 20)
            assert isinstance(frame, Frame)
            updates += frame.updates
    except ConnectionClosed as e:
        return updates, e
    return updates, None


async def keep_alive(connection: Connection) -> None:
    while not connection.closed:
        connection.send(KeepAlive())
        await asyncio.sleep(1.0)


async def test_a_crash_in_a_step_tells_every_stream_and_ends_the_process_with_status_1() -> None:
    with socket_folder() as folder:
        script = Script(rules=(Rule(tokens=(5,), then=5, fault="crash", at=5),))
        with scripted_engine(script, listen=f"unix:{folder}/e.sock") as engine:
            gateway = await connect(f"unix:{folder}/e.sock")
            gateway.send(submit("a"))
            updates, end = await collect(gateway)
            assert end is None
            assert sum(len(u.tokens) for u in updates) == 5
            assert updates[-1].ending is not None and updates[-1].ending.reason is Finish.ERROR
            assert await asyncio.to_thread(engine.wait) == 1
            assert "scripted crash" in engine.text
        assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "at", "cause"),
    [
        ("reset", 5, Cause.EOF),
        ("half_frame", 5, Cause.EOF),
        ("silent_end", 5, Cause.MALFORMED),
        ("reset", 0, Cause.EOF),
        ("kill", 5, Cause.EOF),
    ],
)
async def test_api_12_an_engine_that_cuts_an_answer_short_never_looks_like_a_finish(
    fault: Fault, at: int, cause: Cause
) -> None:
    with socket_folder() as folder:
        script = Script(rules=(Rule(tokens=(5,), then=5, fault=fault, at=at),))
        with scripted_engine(script, listen=f"unix:{folder}/e.sock"):
            gateway = await connect(f"unix:{folder}/e.sock")
            gateway.send(submit("a"))
            updates, end = await collect(gateway)
            num_tokens = sum(len(u.tokens) for u in updates)
            assert num_tokens == at or (fault == "kill" and num_tokens < at)  # a kill may overtake what is on its way
            assert not any(u.ending for u in updates)
            assert end is not None and end.cause is cause


async def test_api_12_a_request_that_the_engine_aborts_itself_ends_as_aborted() -> None:
    with socket_folder() as folder:
        script = Script(rules=(Rule(tokens=(5,), then=5, fault="abort", at=5),))
        with scripted_engine(script, listen=f"unix:{folder}/e.sock") as engine:
            gateway = await connect(f"unix:{folder}/e.sock")
            gateway.send(submit("a"))
            updates, _ = await collect(gateway)
            assert updates[-1].ending is not None and updates[-1].ending.reason is Finish.ABORT
            gateway.close()
            assert await asyncio.to_thread(engine.stop) == 0


async def test_a_hanging_step_turns_the_engine_unready_while_it_still_speaks() -> None:
    with socket_folder() as folder:
        script = Script(rules=(Rule(prompt=(9,), fault="hang", at=1), Rule()))
        with scripted_engine(script, listen=f"unix:{folder}/e.sock") as engine:
            gateway = await connect(f"unix:{folder}/e.sock")
            gateway.send(submit("a", prompt=(9,)))
            steps = set()
            async with asyncio.timeout(10):
                while (frame := await next_of(gateway, Frame)) and frame.ready:  # type: ignore[attr-defined]
                    steps.add(frame.view.step)  # type: ignore[attr-defined]
            assert max(steps) == frame.view.step == 1  # type: ignore[attr-defined]
            engine.kill(signal.SIGTERM)  # and it can still be stopped
            assert await asyncio.to_thread(engine.wait, 20) == 0


async def test_sigterm_lets_running_streams_finish_and_refuses_new_ones() -> None:
    with socket_folder() as folder:
        with scripted_engine(ENDLESS, listen=f"unix:{folder}/e.sock") as engine:
            gateway = await connect(f"unix:{folder}/e.sock")
            gateway.send(submit("a", 100))
            await next_of(gateway, Frame)
            engine.kill(signal.SIGTERM)
            updates: list[Update] = []
            refused = []
            async with asyncio.timeout(20):
                while not any(u.ending for u in updates):
                    frame = await gateway.receive()
                    assert isinstance(frame, Frame)
                    updates += frame.updates
                    refused += frame.refused
                    if not frame.ready and not refused:
                        gateway.send(submit("b"))
            assert sum(len(u.tokens) for u in updates) >= 98
            assert updates[-1].ending is not None and updates[-1].ending.reason is Finish.LENGTH
            assert [(r.id, r.reason) for r in refused[:1]] == [("b", "draining")]
            assert await asyncio.to_thread(engine.wait) == 0
        assert list(folder.iterdir()) == []


async def test_streams_that_do_not_finish_in_time_are_told_why() -> None:
    with socket_folder() as folder:
        script = Script(rules=ENDLESS.rules, step_ms=5, max_model_len=100_000, num_blocks=10_000)
        with scripted_engine(script, listen=f"unix:{folder}/e.sock") as engine:
            gateway = await connect(f"unix:{folder}/e.sock")
            gateway.send(submit("a", 90_000))
            await next_of(gateway, Frame)
            engine.kill(signal.SIGTERM)
            keeping = asyncio.create_task(keep_alive(gateway))
            updates, end = await collect(gateway)
            keeping.cancel()
            assert end is None and updates[-1].ending is not None
            assert updates[-1].ending.reason is Finish.ERROR
            assert updates[-1].ending.message == "the engine is shutting down"
            assert await asyncio.to_thread(engine.wait) == 0


def test_a_signal_while_loading_ends_it_at_once() -> None:
    with socket_folder() as folder:
        path = folder / "script.json"
        path.write_text('{"load_ms": 60000}')
        command = [sys.executable, "-m", "tests.support.scripted_engine", "--listen", f"unix:{folder}/e.sock"]
        with running([*command, "--script", str(path), "--controller", f"unix:{folder}/c.sock"]) as engine:
            engine.wait_line("control.unreachable")
            begin = time.monotonic()
            assert engine.stop(10) == 0
            assert time.monotonic() - begin < 5
            assert not (folder / "e.sock").exists()


def test_everything_but_the_runner_imports_without_torch() -> None:
    code = "import sys, shoal.engine.main, shoal.controller.main; assert 'torch' not in sys.modules"
    engine = Process([sys.executable, "-c", code])
    assert engine.wait() == 0, engine.text


def test_it_listens_on_its_socket_and_on_loopback_only() -> None:
    with socket_folder() as folder, scripted_engine(listen=f"unix:{folder}/e.sock") as engine:
        found = listening(engine.pid)
        assert f"{folder}/e.sock" in found
        assert all(where.startswith(("127.0.0.1:", "/")) for where in found)


def test_the_metrics_show_the_view() -> None:
    with socket_folder() as folder, scripted_engine(listen=f"unix:{folder}/e.sock") as engine:
        url = engine.wait_line(r"metrics=(\S+)").group(1)

        async def work() -> None:
            gateway = await connect(f"unix:{folder}/e.sock")
            gateway.send(submit("a", 7))
            await collect(gateway)
            gateway.close()

        asyncio.run(work())
        with urllib.request.urlopen(url, timeout=5) as answer:
            text = answer.read().decode()
        numbers = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert float(numbers["shoal:generation_tokens_total"]) == 7
        assert float(numbers["shoal:prompt_tokens_total"]) == 3
        assert float(numbers["shoal:num_requests_running"]) == 0
        assert float(numbers["shoal:iteration_tokens_total_count"]) == 7
        assert float(numbers["shoal:kv_cache_usage_perc"]) == 0
        assert float(numbers["shoal:ready"]) == 1
        assert 'shoal:step_time_seconds_count{kind="decode"}' in numbers


def test_a_process_ends_when_its_supervisor_is_killed() -> None:
    """The supervisor is a process of its own, so that it can be killed without a word."""
    with socket_folder() as folder:
        code = f"""
import os, subprocess, sys, time
r, w = os.pipe()
env = dict(os.environ, {lifeline.VARIABLE}=str(r))
args = [sys.executable, "-m", "tests.support.scripted_engine", "--listen", "unix:{folder}/e.sock"]
print("child", subprocess.Popen(args, env=env, pass_fds=[r]).pid, flush=True)
time.sleep(600)
"""
        with running([sys.executable, "-c", code]) as supervisor:
            child = psutil.Process(int(supervisor.wait_line(r"child (\d+)").group(1)))
            supervisor.wait_line(r"engine\.serving")
            supervisor.kill(signal.SIGKILL)
            wait_until(lambda: not alive([child]), 10)
            assert list(folder.iterdir()) == []


def test_a_taken_or_open_address_ends_the_start_with_the_reason() -> None:
    with socket_folder() as folder:
        path = Path(folder) / "open" / "e.sock"
        path.parent.mkdir()
        path.parent.chmod(0o777)
        engine = Process([sys.executable, "-m", "tests.support.scripted_engine", "--listen", f"unix:{path}"])
        assert engine.wait() != 0
        assert "open to other users" in engine.text
    environment = {"SHOAL_SECRET": ""}
    engine = Process(
        [sys.executable, "-m", "tests.support.scripted_engine", "--listen", "tcp:127.0.0.1:0"], environment
    )
    assert engine.wait() != 0
    assert "empty shared secret" in engine.text
