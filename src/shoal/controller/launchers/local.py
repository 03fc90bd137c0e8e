"""One machine's supervisor: starts controller, engines and gateway as its children, keeps them alive, stops them.

Start: controller, then engines and gateway together. Stop: gateway, engines, controller, so that nobody asks a peer
that has gone. A child that ends before the service was ever ready ends the start: the next try would end the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from shoal.controller.launchers.child import Child
from shoal.controller.launchers.folder import runtime_folder
from shoal.controller.registry import SERVING
from shoal.telemetry import logs
from shoal.wire import address, lifeline
from shoal.wire.control import ControlLink
from shoal.wire.messages import Register, Report, Role

START_S = 1800.0  # a service that is not ready by then will not be
_POLL_S = 0.1
_GATEWAY_STOP_S, _ENGINE_STOP_S, _CONTROLLER_STOP_S = 15.0, 12.0, 5.0


@dataclass(frozen=True, slots=True)
class Service:
    """Where a ready service is."""

    url: str  # the API
    status_url: str


def run(
    config_yaml: str,
    *,
    api: tuple[str, int],
    page: tuple[str, int],
    num_replicas: int,
    on_ready: Callable[[Service], None],
) -> int:
    """Serves until SIGINT, SIGTERM or SIGHUP. Exit status: 0 after a signal, 1 where the start failed.

    `config_yaml` is the whole configuration, for the children; `api` and `page`: host and port of the gateway and of
    the status page, port 0 any free one. `on_ready` is called once.
    """
    logs.setup("supervisor")
    with runtime_folder() as folder, _lifeline() as inherited:
        supervisor = _Supervisor(config_yaml, api, page, num_replicas, folder, inherited)
        return asyncio.run(supervisor.run(on_ready))


@contextlib.contextmanager
def _lifeline() -> Iterator[int]:
    """The end that children inherit; the other one closes with this process."""
    read_end, write_end = os.pipe()
    try:
        yield read_end
    finally:
        os.close(write_end)
        os.close(read_end)


class _Supervisor:
    def __init__(
        self,
        config_yaml: str,
        api: tuple[str, int],
        page: tuple[str, int],
        num_replicas: int,
        folder: Path,
        inherited: int,
    ) -> None:
        self._folder = folder
        self._inherited = inherited
        self._secret = secrets.token_hex(32)
        self._num_replicas = num_replicas
        (api_host, api_port), (page_host, page_port) = api, page
        api_port = api_port or _free_port(api_host)
        page_port = page_port or _free_port(page_host)
        self._service = Service(_url(api_host, api_port), _url(page_host, page_port))
        self._config_file = folder / "config.yaml"
        self._config_file.touch(mode=0o600)
        self._config_file.write_text(config_yaml, "utf-8")
        control = ["--controller", self._address("controller")]
        self._controller = self._child(
            "controller", "controller", ["--listen", self._address("controller"), "--controller-port", str(page_port)]
        )
        self._engines = [
            self._child(name, "engine", ["--listen", self._address(name), *control])
            for name in (f"engine-{n}" for n in range(self._num_replicas))
        ]
        self._gateway = self._child("gateway-0", "gateway", ["--port", str(api_port), *control])
        self._signals = 0
        self._stop = asyncio.Event()
        self._link = ControlLink(
            self._address("controller"),
            role=Role.SUPERVISOR,
            name="supervisor",
            incarnation=secrets.token_hex(8),
            secret=self._secret.encode(),
            register=lambda: Register(pid=os.getpid(), processes=tuple(child.report() for child in self._children)),
            report=Report,
        )

    @property
    def _children(self) -> list[Child]:
        return [self._controller, *self._engines, self._gateway]

    async def run(self, on_ready: Callable[[Service], None]) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        self._say("shoal", f"starting controller, {self._num_replicas} engine(s) and gateway")
        lives = [asyncio.create_task(child.run()) for child in self._children]
        linked = asyncio.create_task(self._link.run())
        try:
            if not await self._ready():
                return 0 if self._signals else 1
            on_ready(self._service)
            await self._stop.wait()
            return 0
        finally:
            await self._shut_down(linked)
            await asyncio.gather(*lives, linked, return_exceptions=True)

    async def _ready(self) -> bool:
        """False: a signal came, or a child ended, or it took too long."""
        trouble = [asyncio.create_task(child.died.wait()) for child in self._children]
        waits = [asyncio.create_task(self._stop.wait()), asyncio.create_task(self._until_serving()), *trouble]
        try:
            done, _ = await asyncio.wait(waits, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if waits[1] in done:
            return True
        for child in self._children:
            if child.cause:
                self._say("shoal", f"the service did not start: {child.name}: {child.cause}")
        if not done:
            self._say("shoal", f"the service was not ready within {START_S:g} s")
        return False

    async def _until_serving(self) -> bool:
        """Every engine is listed as serving, and the gateway says that it can take work."""
        limit = aiohttp.ClientTimeout(total=2.0)
        async with aiohttp.ClientSession(timeout=limit) as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError, KeyError, ValueError):
                    async with session.get(self._service.status_url + "/status") as answer:
                        states = [replica["state"] for replica in (await answer.json())["replicas"]]
                    if states.count(SERVING) == self._num_replicas:
                        async with session.get(self._service.url + "/ready") as answer:
                            if answer.status == 200:
                                return True
                await asyncio.sleep(_POLL_S)

    async def _shut_down(self, linked: asyncio.Task[None]) -> None:
        self._say("shoal", "stopping")
        await self._gateway.stop(_GATEWAY_STOP_S)
        await asyncio.gather(*(engine.stop(_ENGINE_STOP_S) for engine in self._engines))
        linked.cancel()
        await self._controller.stop(_CONTROLLER_STOP_S)

    def _on_signal(self) -> None:
        """The first asks for an orderly end, the second ends at once."""
        self._signals += 1
        self._stop.set()
        if self._signals > 1:
            for child in self._children:
                child.kill()

    def _child(self, name: str, command: str, options: list[str]) -> Child:
        env = {**os.environ, "SHOAL_SECRET": self._secret, lifeline.VARIABLE: str(self._inherited)}
        if command != "gateway":
            env.pop("SHOAL_API_KEY", None)
        return Child(
            name,
            [sys.executable, "-m", "shoal.cli", command, "--config", str(self._config_file), "--name", name, *options],
            env=env,
            inherit=[self._inherited],
            say=self._say,
            changed=lambda: self._link.registration_changed(),
        )

    def _address(self, name: str) -> str:
        return f"unix:{self._folder / name}.sock"

    @staticmethod
    def _say(name: str, line: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads any more: the service goes on
            logs.write_line(sys.stderr, f"{name:<10} | {logs.escape(line)}")


def _url(host: str, port: int) -> str:
    """As a client on this machine reaches it."""
    return address.http_url({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)


def _free_port(host: str) -> int:
    """Chosen here, not by the child, so that a restarted child comes back to the same one."""
    with address.bind_tcp(host, 0) as sock:
        port: int = sock.getsockname()[1]
        return port
