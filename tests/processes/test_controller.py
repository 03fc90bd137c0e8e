"""A real controller process: who it lists, what its pages say, and what is left of it after a kill."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import prometheus_client
import pytest
from rich.console import Console

from shoal.cli import status
from shoal.controller.app import ACTIONS, ROUTES, Access, Pages, make_app
from shoal.controller.registry import Registry
from shoal.core.request import RequestSpec
from shoal.wire.control import ControlLink
from shoal.wire.messages import Frame, Hello, Members, Register, Replica, Report, Role, Submit, Supervised
from tests.support.command import shoal, shoal_here
from tests.support.processes import Process, running, scripted_engine, socket_folder, wait_until
from tests.support.scripted import Script
from tests.support.wires import SECRET, connect, next_of, until

pytestmark = pytest.mark.processes


@contextmanager
def controller(folder: Path, port: int = 0) -> Iterator[tuple[Process, str]]:
    """The process and the URL of its status page."""
    command = [sys.executable, "-m", "shoal.cli", "controller", "--listen", f"unix:{folder}/c.sock"]
    with running([*command, "--controller-port", str(port)]) as process:
        yield process, process.wait_line(r"controller\.serving .*page=(\S+)").group(1)


def get(url: str, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=5)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()
    finally:
        connection.close()


def replicas(url: str) -> dict[str, str]:
    try:
        return {r["name"]: r["state"] for r in status.fetch(url)["replicas"]}
    except OSError:
        return {}


def test_engines_are_listed_while_they_load_and_when_they_serve() -> None:
    with socket_folder() as folder, controller(folder) as (_, url):
        at = f"unix:{folder}/c.sock"
        with scripted_engine(Script(load_ms=500), listen=f"unix:{folder}/e.sock", controller=at) as engine:
            assert wait_until(lambda: replicas(url)) == {"engine-0": "serving"}
            assert "control.connected" in engine.text
            found = status.fetch(url)["replicas"][0]
            assert (found["pid"], found["model"], found["address"]) == (engine.pid, "scripted", f"unix:{folder}/e.sock")
            assert wait_until(lambda: status.fetch(url)["replicas"][0]["view"])["total_blocks"] == 1024
            targets = json.loads(get(url, "/targets")[2])
            assert {t["labels"]["component"] for t in targets} == {"engine", "controller"}
            for target in targets:
                answer = get(f"http://{target['targets'][0]}", target["labels"]["__metrics_path__"])
                assert answer[0] == 200 and "shoal:" in answer[2]
            assert engine.stop() == 0


def test_gateways_get_the_list_on_every_change_and_every_two_seconds() -> None:
    lists: list[Members] = []

    async def follow(folder: Path) -> None:
        link = ControlLink(
            f"unix:{folder}/c.sock",
            role=Role.GATEWAY,
            name="gateway-0",
            incarnation="g",
            secret=SECRET,
            register=lambda: Register(pid=1, url="http://127.0.0.1:1"),
            report=lambda: Report(gateway={"queue": {"m": 1.0}}),
            on_members=lists.append,
        )
        task = asyncio.create_task(link.run())
        await until(lambda: any(r.state == "serving" for m in lists for r in m.replicas), 20)
        heard = len(lists)
        await until(lambda: len(lists) > heard, 3)
        versions = [m.version for m in lists]
        assert versions == sorted(versions)
        task.cancel()

    with (
        socket_folder() as folder,
        controller(folder) as (_, url),
        scripted_engine(listen=f"unix:{folder}/e.sock", controller=f"unix:{folder}/c.sock"),
    ):
        asyncio.run(follow(folder))
        gateway = status.fetch(url)["gateways"][0]
        assert (gateway["url"], gateway["report"]) == ("http://127.0.0.1:1", {"queue": {"m": 1.0}})


async def test_f5_after_a_kill_traffic_flows_and_the_registry_is_rebuilt_within_three_seconds() -> None:
    with socket_folder() as folder:
        at = f"unix:{folder}/c.sock"
        with controller(folder) as (process, url):
            port = urlsplit(url).port or 0
            with (
                scripted_engine(Script(step_ms=5), listen=f"unix:{folder}/0.sock", name="engine-0", controller=at),
                scripted_engine(listen=f"unix:{folder}/1.sock", name="engine-1", controller=at),
            ):
                await until(lambda: len(replicas(url)) == 2)
                gateway = await connect(f"unix:{folder}/0.sock")
                gateway.send(Submit(specs=(RequestSpec(id="a", prompt=(1, 2), max_tokens=600),)))
                await next_of(gateway, Frame)
                process.kill(signal.SIGKILL)
                process.wait()
                num_tokens, ended = 0, False
                while not ended:  # about three seconds of tokens without a controller
                    frame = await next_of(gateway, Frame)
                    assert isinstance(frame, Frame)
                    num_tokens += sum(len(u.tokens) for u in frame.updates)
                    ended = any(u.ending for u in frame.updates)
                assert num_tokens > 590
                with controller(folder, port) as (_, again):
                    begin = time.monotonic()
                    await until(lambda: set(replicas(again)) == {"engine-0", "engine-1"})
                    assert time.monotonic() - begin <= 3.0
                gateway.close()


def roles(url: str) -> dict[str, str]:
    try:
        return {r["name"]: r["role"] for r in status.fetch(url)["replicas"]}
    except OSError:
        return {}


def test_a_role_is_set_without_a_restart_and_outlives_engine_and_controller() -> None:
    lists: list[Members] = []

    async def follow(folder: Path, wanted: str) -> None:
        link = ControlLink(
            f"unix:{folder}/c.sock",
            role=Role.GATEWAY,
            name="gateway-0",
            incarnation="g",
            secret=SECRET,
            register=lambda: Register(pid=1),
            report=Report,
            on_members=lists.append,
        )
        lists.clear()
        task = asyncio.create_task(link.run())
        await until(lambda: bool(lists) and [r.role for r in lists[-1].replicas] == [wanted], 5)
        task.cancel()

    def engine(folder: Path) -> AbstractContextManager[Process]:
        return scripted_engine(listen=f"unix:{folder}/e.sock", controller=f"unix:{folder}/c.sock")

    with socket_folder() as folder, controller(folder) as (process, url), engine(folder) as first:
        wait_until(lambda: roles(url) == {"engine-0": "both"})
        done = shoal_here("role", "engine-0", "prefill", "--url", url)
        assert (done.returncode, done.stdout) == (0, "engine-0: prefill\n")
        assert roles(url) == {"engine-0": "prefill"}
        first.wait_line(r"engine\.role .*role=prefill")
        asyncio.run(follow(folder, "prefill"))
        assert "prefill" in shoal_here("status", "--url", url).stdout
        process.kill(signal.SIGKILL)
        process.wait()
        with controller(folder, urlsplit(url).port or 0):
            wait_until(lambda: roles(url) == {"engine-0": "prefill"})
            first.kill(signal.SIGKILL)
            first.wait()
            with engine(folder):
                asyncio.run(follow(folder, "both"))  # only the engine that was killed had known
                assert shoal_here("role", "engine-0", "decode", "--url", url).returncode == 0
            with engine(folder) as third:
                third.wait_line(r"engine\.role .*role=decode")
                asyncio.run(follow(folder, "decode"))


def test_what_cannot_be_set_is_named_with_what_can() -> None:
    with socket_folder() as folder, controller(folder) as (_, url):
        done = shoal_here("role", "engine-0", "fast", "--url", url)
        assert done.returncode == 2 and "role is 'fast'; allowed: both, prefill, decode" in done.stderr
        done = shoal_here("role", "engine-7", "decode", "--url", url)
        assert done.returncode == 1 and "there is no replica 'engine-7'; listed: none" in done.stderr
        assert get(url, "/role?replica=engine-0&role=fast", "POST")[::2] == (
            400,
            "role is 'fast'; allowed: both, prefill, decode\n",
        )
        done = shoal_here("role", "engine-0", "decode", "--url", "http://127.0.0.1:1")
        assert done.returncode == 1 and "is shoal running?" in done.stderr


def test_only_the_user_who_runs_the_service_sets_a_role_and_no_web_page() -> None:
    path = "/role?replica=engine-0&role=decode"
    with socket_folder() as folder, controller(folder) as (_, url):
        assert get(url, path, "POST")[0] == 404, "it may, but there is no such replica"
        assert get(url, path)[0] == 405
        assert get(url, path, "POST", origin="http://127.0.0.1:8001")[0] == 403
        assert get(url, path, "POST", host="shoal.example.org")[0] == 403
        if os.geteuid() != 0:
            pytest.skip("another user's connection takes root to make")
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=5)
        os.seteuid(65534)
        try:
            connection.connect()
        finally:
            os.seteuid(0)
        try:
            connection.request("POST", path)
            assert connection.getresponse().status == 403
        finally:
            connection.close()


def test_a_controller_that_stops_leaves_no_socket() -> None:
    with socket_folder() as folder, controller(folder) as (process, _):
        assert process.stop() == 0
        assert list(folder.iterdir()) == []


def test_the_page_is_for_this_machine_only() -> None:
    command = [sys.executable, "-m", "shoal.cli", "controller", "--listen", "tcp:127.0.0.1:0"]
    process = Process([*command, "--controller-host", "0.0.0.0"])
    assert process.wait() != 0
    assert "this machine only" in process.text


# -- pages -------------------------------------------------------------------------------------------------------------

EVIL = "<script>alert(1)</script>"


def filled() -> Registry:
    registry = Registry()
    for role, register in (
        (Role.ENGINE, Register(pid=1, replica=Replica(name=EVIL, incarnation="i", address="unix:/x", state="loading"))),
        (Role.GATEWAY, Register(pid=2, url=f"http://x/{EVIL}")),
        (
            Role.SUPERVISOR,
            Register(pid=3, processes=(Supervised(name="engine-0", state="parked", restarts=4, cause=f"exit {EVIL}"),)),
        ),
    ):
        hello = Hello(protocol=1, role=role, name=EVIL, incarnation="i", session=1, nonce=b"", proof=b"")
        assert registry.register(hello, register, 0) is None
    return registry


async def ask(
    path: str, method: str = "GET", host: str = "127.0.0.1:8001", client: str = "127.0.0.1"
) -> tuple[int, dict[str, str], str]:
    app = make_app(Pages(filled(), prometheus_client.CollectorRegistry(), "http://127.0.0.1:8001"))
    sent: list[dict[str, object]] = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(b"host", host.encode())],
        "client": (client, 1),
        "query_string": b"",
    }
    await app(scope, None, send)  # type: ignore[arg-type]
    headers = {k.decode(): v.decode() for k, v in sent[0]["headers"]}  # type: ignore[attr-defined]
    body = b"".join(m.get("body", b"") for m in sent[1:])  # type: ignore[misc]
    return sent[0]["status"], headers, body.decode()  # type: ignore[return-value]


async def test_sec_04_every_route_has_a_class_and_answers_by_it() -> None:
    assert {(r.path, r.access) for r in ROUTES} == {
        ("/health", Access.PUBLIC),
        ("/", Access.INTERNAL),
        ("/style.css", Access.INTERNAL),
        ("/status", Access.INTERNAL),
        ("/targets", Access.INTERNAL),
        ("/metrics", Access.INTERNAL),
    }
    for route in ROUTES:
        closed = 200 if route.access is Access.PUBLIC else 403
        assert (await ask(route.path))[0] == 200
        assert (await ask(route.path, host="localhost:8001"))[0] == 200
        assert (await ask(route.path, host="[::1]:8001"))[0] == 200
        assert (await ask(route.path, host="shoal.example.org"))[0] == closed
        assert (await ask(route.path, host=""))[0] == closed
        assert (await ask(route.path, client="10.0.0.7"))[0] == closed
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
            assert (await ask(route.path, method))[0] == 405
    assert {(a.path, a.access) for a in ACTIONS} == {("/role", Access.OWNER)}
    for method in ("GET", "HEAD", "POST", "PUT", "OPTIONS"):
        assert (await ask("/role", method))[0] == 403, "no connection of which the kernel knows whose it is"


@pytest.mark.parametrize(
    "path", ["//status", "/status/", "/STATUS", "/status;x=1", "/../status", "/%2e%2e/status", "/docs", "/static/x"]
)
async def test_sec_04_other_spellings_of_a_path_are_not_found(path: str) -> None:
    assert (await ask(path))[0] == 404


async def test_what_processes_say_of_themselves_is_escaped_on_a_page_without_scripts() -> None:
    code, headers, body = await ask("/")
    assert code == 200
    assert "<script" not in body and "&lt;script&gt;" in body
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "parked" in body and "exit" in body
    assert (await ask("/status"))[1]["content-type"] == "application/json"


async def test_the_terminal_shows_the_same() -> None:
    console = Console(width=160, file=io.StringIO())
    console.print(status.tables(json.loads((await ask("/status"))[2])))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for word in ("loading", "parked", "http://x/", "exit"):
        assert word in text


def test_the_default_model_fits_80_columns_and_fewer_columns_cut_nothing_off() -> None:
    view = {"num_running": 64, "num_waiting": 1024, "step": 123456, "total_blocks": 9, "free_blocks": 0}
    replica = {"name": "engine-0", "state": "serving", "connected": True, "uptime_s": 7000, "pid": 31550}
    replica |= {"role": "both", "model": "smollm2-135m", "view": view | {"cached_blocks": 0}}
    shown = {}
    for width in (60, 80):
        console = Console(width=width, file=io.StringIO(), force_terminal=True)
        console.print(status.tables({"replicas": [replica], "gateways": [], "processes": []}))
        shown[width] = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(word in shown[80] for word in ("engine-0", "smollm2-135m", "123456", "117 min", "31550"))
    assert "…" not in shown[60]


def test_a_port_that_is_taken_is_named_with_the_option_that_chooses_another() -> None:
    with socket_folder() as folder, controller(folder) as (_, url):
        port = str(urlsplit(url).port)
        done = shoal(
            "controller", "--listen", f"unix:{folder}/2.sock", "--controller-port", port, SHOAL_SECRET="x" * 32
        )
    assert done.returncode == 1
    assert f"Address already in use: 127.0.0.1:{port} (--controller-port chooses another port)" in done.stderr


def test_the_address_of_something_else_is_called_that() -> None:
    with socket_folder() as folder, controller(folder) as (_, url):
        done = shoal_here("status", "--url", f"{url}/elsewhere")
    assert done.returncode == 1
    assert "answers 404: it is no status page" in done.stderr and "is shoal running?" not in done.stderr


@pytest.mark.parametrize("url", ["file:///etc/passwd", "127.0.0.1:8001"])
def test_only_http_is_fetched(url: str) -> None:
    with pytest.raises(ValueError, match="no http URL"):
        status.fetch(url)
