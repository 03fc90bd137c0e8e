"""One engine process: load on the step thread, then serve, until a signal, a failure or the supervisor's end.

registered as loading ─► build (weights, warm-up) ─► loop turns ─► listen ─► registered as serving ─► drain ─► exit
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import uvloop

from shoal.engine.loop import Copier, Runner, StepLoop, Turn
from shoal.engine.metrics import DiskTier, EngineCollector, StepMetrics
from shoal.engine.parallel.layout import Layout
from shoal.engine.server import Server
from shoal.engine.transfer.peers import Peers
from shoal.fleet.view import ReplicaRole
from shoal.telemetry.journal import Planner
from shoal.telemetry.metrics import Exporter, new_registry
from shoal.wire.control import ControlLink
from shoal.wire.messages import EngineInfo, Register, Replica, Report, Role

DRAIN_S = 5.0  # what running streams get to finish after SIGTERM
_END_S = 2.0  # what a step under way gets before the process leaves without it

log = logging.getLogger("shoal.engine")


class Ranks(Protocol):
    """parallel.group.Group"""

    layout: Layout
    moved_bytes: Callable[[], int]
    stage_ns: Callable[[], Sequence[int]]

    def watch(self, on_failure: Callable[[Exception], None]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What makes one engine different from another."""

    runner: Runner
    scheduler: Planner
    info: EngineInfo
    copier: Copier | None = None  # where there is a host tier
    disk: DiskTier | None = None  # where there is one
    peers: Peers | None = None  # where blocks are fetched from other engines, and lent
    group: Ranks | None = None  # where there are other ranks
    costs: Callable[[], tuple[float, ...]] = tuple
    closing: Callable[[], None] = field(default=lambda: None)  # called when no step can run any more; ends the others


def calm_collector() -> None:
    """Rarer garbage collections, that look at less: one of all objects stops a step for up to 100 ms.

    What is loaded by now stays, so none looks at it again. The scheduler makes no cycles: plans, events and requests
    go when nobody names them, and what is left to collect are the few of asyncio and of exceptions.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)


def run(engine: Engine) -> int:
    """Returns the exit status: 0 after a signal, 1 after a failure."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(engine.run())
    if engine.stuck:
        logging.shutdown()
        os._exit(code)  # the interpreter would wait for, or crash under, a thread that is inside a kernel
    return code


class Engine:
    """`build` runs on the step thread. `controller` may be empty: an engine of a fixed list. `role`: until the
    controller says otherwise.
    """

    def __init__(
        self,
        build: Callable[[], Parts],
        *,
        name: str,
        listen: str,
        controller: str,
        secret: bytes,
        role: ReplicaRole = ReplicaRole.BOTH,
    ) -> None:
        self.stuck = True  # the step thread has not ended
        self._build = build
        self._name = name
        self._listen = listen
        self._controller = controller
        self._secret = secret
        self._role = role
        self._incarnation = secrets.token_hex(8)
        self._registry = new_registry()
        self._step_metrics = StepMetrics(self._registry)
        self._metrics_url = ""
        self._server: Server | None = None
        self._steps: StepLoop | None = None
        self._address = ""
        self._turned = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop
        self._loaded: asyncio.Future[tuple[StepLoop, Parts]]
        self._ending: asyncio.Future[int]  # exit status: 0 a signal, 1 a failure

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._loaded = self._loop.create_future()
        self._ending = self._loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._end, 0)
        exporter = Exporter(self._registry)
        self._metrics_url = exporter.url
        link = self._link()
        tasks = [asyncio.create_task(self._watch())]
        if link is not None:
            tasks.append(asyncio.create_task(link.run()))
        for task in tasks:
            task.add_done_callback(self._part_ended)
        threading.Thread(target=self._step_thread, name="steps", daemon=True).start()
        try:
            news: list[asyncio.Future[Any]] = [self._loaded, self._ending]
            await asyncio.wait(news, return_when=asyncio.FIRST_COMPLETED)
            if not self._ending.done():
                await self._serve(link)
            return await self._ending
        finally:
            await self._shut_down()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            exporter.close()

    # -- the step thread -----------------------------------------------------------------------------------------------

    def _step_thread(self) -> None:
        try:
            parts = self._build()
            calm_collector()
            steps = StepLoop(
                parts.scheduler,
                parts.runner,
                copier=parts.copier,
                peers=parts.peers,
                publish=lambda turn: self._post(self._on_turn, turn),
                announce=lambda predicted_ns: self._post(self._on_announce, predicted_ns),
                failed=lambda error: self._post(self._end, 1),
            )
        except Exception as e:
            known = isinstance(e, ValueError | OSError)  # something that the user can change: the message says it
            log.error("engine.load_failed", {"error": str(e) or type(e).__name__}, exc_info=not known)
            self._post(self._end, 1)
            return
        if parts.group is not None:
            parts.group.watch(steps.fail)
        self._post(self._on_loaded, (steps, parts))
        steps.run()

    def _post(self, callback: Callable[..., object], argument: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(callback, argument)

    # -- the event loop ------------------------------------------------------------------------------------------------

    def _on_loaded(self, loaded: tuple[StepLoop, Parts]) -> None:
        self._steps = loaded[0]
        if not self._loaded.done():
            self._loaded.set_result(loaded)

    def _on_turn(self, turn: Turn) -> None:
        self._step_metrics.observe(turn)
        if self._server is not None:
            self._server.on_turn(turn)
        self._turned.set()

    def _on_announce(self, predicted_ns: int) -> None:
        if self._server is not None:
            self._server.on_announce(predicted_ns)

    def _end(self, code: int) -> None:
        if not self._ending.done():
            self._ending.set_result(code)

    def _part_ended(self, task: asyncio.Task[None]) -> None:
        """These tasks end only by cancellation; one that fails takes the process along."""
        if not task.cancelled() and task.exception() is not None:
            log.error("engine.part_failed", exc_info=task.exception())
            self._end(1)

    async def _watch(self) -> None:
        """A step that never returns cannot end the process itself."""
        while True:
            await asyncio.sleep(1.0)
            if self._steps is not None and self._steps.stuck():
                log.error("engine.stuck", {"streams": self._steps.num_streams})
                self._end(1)

    async def _serve(self, link: ControlLink | None) -> None:
        steps, parts = self._loaded.result()
        info = parts.info
        if parts.peers is not None:
            address = await parts.peers.open(
                steps, name=self._name, incarnation=self._incarnation, secret=self._secret, info=info
            )
            info = msgspec.structs.replace(info, peers=address)
        server = Server(steps, parts.scheduler.view(), info=info, costs=parts.costs)
        await server.listen(self._listen, secret=self._secret, incarnation=self._incarnation)
        self._server = server
        self._address = server.listener.address
        self._registry.register(EngineCollector(server, parts.disk, parts.peers, parts.group))
        if link is not None:
            link.registration_changed()
        log.info("engine.serving", {"address": self._address, "metrics": self._metrics_url})

    async def _shut_down(self) -> None:
        """New requests are refused, running ones get the grace or the truth, then the sockets close."""
        steps, server = self._steps, self._server
        if steps is None:
            return
        if server is not None:
            if self._ending.done() and self._ending.result() == 0 and steps.turning():
                server.drain()
                log.info("engine.draining", {"streams": steps.num_streams})
                await self._until_idle(steps, DRAIN_S)
                steps.end_all("the engine is shutting down")
                await self._until_idle(steps, _END_S)
            await server.close()
        parts = self._loaded.result()[1]
        still = parts.peers is None or await parts.peers.close(_END_S)
        self.stuck = not await asyncio.to_thread(steps.stop, _END_S)
        if not self.stuck:
            await asyncio.to_thread(parts.closing)
        self.stuck |= not still
        log.info("engine.stopped", {"stuck": self.stuck})

    async def _until_idle(self, steps: StepLoop, limit_s: float) -> None:
        """Until no stream is left, or the limit; every turn that ends a stream wakes this up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while steps.num_streams:
                    self._turned.clear()
                    await self._turned.wait()

    # -- what the controller is told -----------------------------------------------------------------------------------

    def _link(self) -> ControlLink | None:
        if not self._controller:
            return None

        def assigned(role: ReplicaRole) -> None:
            log.info("engine.role", {"role": role})
            self._role = role
            link.registration_changed()

        link = ControlLink(
            self._controller,
            role=Role.ENGINE,
            name=self._name,
            incarnation=self._incarnation,
            secret=self._secret,
            register=self._registration,
            report=lambda: Report(view=self._server.view if self._server is not None else None),
            on_role=assigned,
        )
        return link

    def _registration(self) -> Register:
        server = self._server
        replica = Replica(
            name=self._name,
            incarnation=self._incarnation,
            address=self._address,
            state="loading" if server is None else "serving",
            info=server.info if server is not None else None,
            pid=os.getpid(),
            metrics=self._metrics_url,
            role=self._role,
        )
        return Register(pid=os.getpid(), metrics=self._metrics_url, replica=replica)
