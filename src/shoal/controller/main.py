"""The controller process: the registry behind the wire and behind a status page."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import time
from collections.abc import Iterator

import uvicorn
import uvloop

from shoal.controller.app import Pages, make_app
from shoal.controller.config import ControllerConfig
from shoal.controller.hub import Hub
from shoal.controller.metrics import ControllerCollector
from shoal.controller.registry import Registry
from shoal.telemetry import logs
from shoal.telemetry.metrics import new_registry
from shoal.wire import address, lifeline

_HTTP_END_S = 1  # open answers get this long at the end

_BACKLOG = 128

log = logging.getLogger("shoal.controller")


def run(config: ControllerConfig, *, name: str, listen: str) -> None:
    """Serves until SIGTERM. Raises ValueError for a status page or, without a good secret, a `listen` that other hosts
    could reach, OSError for an address that is taken."""
    logs.setup(name)
    lifeline.watch()
    if not address.is_loopback(config.host):
        raise ValueError(f"controller.host is {config.host}: the status page is for this machine only, use 127.0.0.1")
    secret = os.environ.get("SHOAL_SECRET", "").encode()
    address.configured("--listen", listen, secret)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, listen, secret))


async def _serve(config: ControllerConfig, listen: str, secret: bytes) -> None:
    hub = Hub(Registry(first_version=time.time_ns()))
    await hub.listen(listen, secret=secret, incarnation=secrets.token_hex(8))
    page = address.bind_tcp(config.host, config.port, option="--controller-port")
    page.listen(_BACKLOG)  # from here on connections wait for the server instead of being refused
    url = address.http_url(*page.getsockname()[:2])
    server = _page_server(hub, url)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, setattr, server, "should_exit", True)
    keeping = asyncio.create_task(hub.run())
    log.info("controller.serving", {"address": hub.listener.address, "page": url})
    try:
        await server.serve(sockets=[page])
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
        await hub.close()
        log.info("controller.stopped")


def _page_server(hub: Hub, url: str) -> uvicorn.Server:
    metrics = new_registry()
    metrics.register(ControllerCollector(hub))
    config = uvicorn.Config(
        make_app(Pages(hub.registry, metrics, url)),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=_HTTP_END_S,
        limit_concurrency=64,
        http="h11",  # limits the size of a request's head; speed is no concern here
        ws="none",
    )
    return _Server(config)


class _Server(uvicorn.Server):
    """The signals are the process's, not the page's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
