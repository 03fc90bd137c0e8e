"""The gateway process: builds the parts, serves until a signal, then drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import secrets
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import uvicorn
import uvloop

from shoal.core.classes import ServiceClass
from shoal.core.request import Sampling
from shoal.fetch.home import shoal_home
from shoal.gateway import keyfile
from shoal.gateway.api import BATCH, Api
from shoal.gateway.app import App
from shoal.gateway.auth import Keys, check_bind
from shoal.gateway.batches.api import BatchApi
from shoal.gateway.batches.archive import Archive
from shoal.gateway.batches.runner import Runner
from shoal.gateway.batches.window import Window
from shoal.gateway.batches.work import Means
from shoal.gateway.config import GatewayConfig
from shoal.gateway.dispatch import Dispatcher
from shoal.gateway.http import IDLE_S, limited
from shoal.gateway.keyfile import KeyFile
from shoal.gateway.link import Identity
from shoal.gateway.metrics import Metrics
from shoal.gateway.params import advised_sampling
from shoal.gateway.prompts import Prompts
from shoal.gateway.replicas import Replicas
from shoal.gateway.routes import router
from shoal.gateway.tenants import Tenants
from shoal.gateway.text.template import ChatTemplate
from shoal.gateway.text.tokenizer import Tokenizer
from shoal.telemetry import logs
from shoal.telemetry.metrics import Exporter
from shoal.wire import address, lifeline
from shoal.wire.control import ControlLink
from shoal.wire.messages import Register, Report, Role

DRAIN_S = 5.0  # what running answers get to finish after SIGTERM
_END_S = 2  # what is left to say after that
_BACKLOG = 2048
_OTHER_FILES = 256  # open files beside the clients' connections

log = logging.getLogger("shoal.gateway")


def run(
    config: GatewayConfig,
    *,
    model_dir: Path,
    served_name: str,
    name: str,
    classes: Mapping[str, ServiceClass],
    controller: str = "",
    engines: tuple[str, ...] = (),
) -> None:
    """Serves until SIGTERM. Raises ValueError for a host that is open to others without a key, for a key file, an
    address or a secret that will not do, OSError for a port that is taken, TokenizerError or TemplateError for a model
    folder that cannot be used."""
    logs.setup(name)
    lifeline.watch()
    _allow_files(config.max_connections + _OTHER_FILES)
    keys, key_file = keyfile.load(config.key_file, classes)
    check_bind(config.host, keys)
    secret = os.environ.get("SHOAL_SECRET", "").encode()
    for engine in engines:
        address.configured("--engine", engine, secret)
    if controller:
        address.configured("--controller", controller, secret)
    gateway = Gateway(
        config,
        keys=keys,
        key_file=key_file,
        classes=classes,
        prompts=Prompts(Tokenizer.load(model_dir), ChatTemplate.load(model_dir)),
        advised=advised_sampling(model_dir),
        served_name=served_name,
        identity=Identity(name=name, incarnation=secrets.token_hex(8), secret=secret),
        controller=controller,
        engines=engines,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_until_signal(gateway, address.bind_tcp(config.host, config.port, option="--port")))


async def _until_signal(gateway: Gateway, sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, gateway.drain)
    if gateway.key_file is not None:
        loop.add_signal_handler(signal.SIGHUP, gateway.key_file.reread)
    exporter = Exporter(gateway.metrics.registry)
    try:
        await gateway.run(sock, exporter.url)
    finally:
        exporter.close()


class Gateway:
    def __init__(
        self,
        config: GatewayConfig,
        *,
        keys: Keys,
        key_file: KeyFile | None = None,
        classes: Mapping[str, ServiceClass],
        prompts: Prompts,
        advised: Sampling,
        served_name: str,
        identity: Identity,
        controller: str,
        engines: tuple[str, ...],
    ) -> None:
        self._identity = identity
        self._controller = controller
        self._keys = keys
        self.key_file = key_file
        self.tenants = Tenants()
        self.metrics = Metrics()
        self._replicas = Replicas(
            identity, static=engines, members_file=members_file(controller, identity.name) if controller else None
        )
        self._dispatcher = Dispatcher(
            self._replicas, prompts.tokenizer, self.metrics, classes, config.request_timeout_s
        )
        api = Api(
            model=served_name,
            advised=advised,
            prompts=prompts,
            dispatcher=self._dispatcher,
            metrics=self.metrics,
            max_body_bytes=config.max_body_bytes,
            classes=classes,
            tenants=self.tenants,
            started_s=int(time.time()),
        )
        self._archive = Archive(Path(config.batch_dir).expanduser() if config.batch_dir else shoal_home() / "batches")
        retention_s = config.file_retention_days * 86400.0
        means = Means(
            owner=secrets.token_hex(8),
            archive=self._archive,
            ask=api.line,
            window=Window(config.batch_lines_in_flight),
            now_s=time.time,
            max_body_bytes=config.max_body_bytes,
            retention_s=retention_s,
            count=lambda ok: self.metrics.batch_lines.labels(str(ok).lower()).inc(),
        )
        self._runner = Runner(means, served_name)
        batches = BatchApi(
            archive=self._archive,
            model=served_name,
            service_class=BATCH,
            classes=classes,
            wake=self._runner.wake,
            now_s=time.time,
            max_body_bytes=config.max_body_bytes,
            max_file_bytes=config.max_file_bytes,
            tenant_bytes=config.tenant_file_bytes,
            retention_s=retention_s,
        )
        app = App(router(api, batches), keys, self.metrics, request_log=config.request_log)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=limited(config.max_connections, config.max_connections_per_address),
                ws="none",
                lifespan="off",
                proxy_headers=False,
                server_header=False,
                access_log=False,
                log_config=None,
                backlog=_BACKLOG,
                timeout_keep_alive=int(IDLE_S),
                timeout_graceful_shutdown=int(DRAIN_S) + _END_S,
            )
        )

    async def run(self, sock: socket.socket, metrics_url: str = "") -> None:
        """Until `drain`. Owns the socket, bound and not yet listening."""
        sock.listen(_BACKLOG)  # from here on connections wait for the server instead of being refused
        url = address.http_url(*sock.getsockname()[:2])
        parts = (self._replicas.run(), self._dispatcher.run(), self._runner.run())
        tasks = [asyncio.create_task(part) for part in parts]
        if self.key_file is not None:
            tasks.append(asyncio.create_task(self.key_file.watch(self._keys)))
        if self._controller:
            tasks.append(asyncio.create_task(self._link(url, metrics_url).run()))
        for task in tasks:
            task.add_done_callback(self._part_ended)
        log.info("gateway.serving", {"url": url, "metrics": metrics_url})
        try:
            await self._server.serve(sockets=[sock])
        finally:
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            await self._archive.close()
            log.info("gateway.stopped")
        for end in ends:
            if isinstance(end, Exception):
                raise end

    def drain(self) -> None:
        """Nothing new begins; what runs gets DRAIN_S, then the truth."""
        if not self._dispatcher.draining:
            log.info("gateway.draining", {"requests": self._dispatcher.num_jobs})
            self._dispatcher.draining = True
            self._server.should_exit = True
            self._runner.stop()
            asyncio.get_running_loop().call_later(DRAIN_S, self._dispatcher.fail_all)

    def _part_ended(self, task: asyncio.Task[None]) -> None:
        """A part that fails takes the process along, and its supervisor starts a whole one."""
        if not task.cancelled() and task.exception() is not None:
            log.error("gateway.part_failed", {"part": task.get_name()}, exc_info=task.exception())
            self.drain()

    def _link(self, url: str, metrics_url: str) -> ControlLink:
        return ControlLink(
            self._controller,
            role=Role.GATEWAY,
            name=self._identity.name,
            incarnation=self._identity.incarnation,
            secret=self._identity.secret,
            register=lambda: Register(pid=os.getpid(), url=url, metrics=metrics_url),
            report=lambda: Report(gateway=self._report()),
            on_members=self._replicas.on_members,
        )

    def _report(self) -> dict[str, float | dict[str, float]]:
        """For the controller; the inner keys are service classes."""
        return {
            "requests_in_flight": self._dispatcher.num_jobs,
            "queued": {name: float(count) for name, count in self._dispatcher.queued().items()},
            "slo_attainment": self.metrics.attainment(),
        }


def members_file(controller: str, name: str) -> Path:
    """Where the last membership is kept: beside the controller's socket, else in the cache folder."""
    where = address.parse(controller)
    if isinstance(where, address.UnixAddress):
        return where.path.parent / f"{name}.members.json"
    folder = shoal_home() / "gateways"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / f"{name}.{where.host}.{where.port}.members.json"


def _allow_files(wanted: int) -> None:
    """The usual limit of 1024 open files is far below the connections allowed; what the system grants is taken."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    granted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < granted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (granted, hard))


class _Server(uvicorn.Server):
    """The signals are the process's, not the server's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
