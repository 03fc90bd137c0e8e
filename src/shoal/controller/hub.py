"""The controller's end of the wire: registrations come in, lists go out to gateways, roles to engines."""

from __future__ import annotations

import asyncio
import logging
import time

from shoal.controller.registry import Registry
from shoal.fleet import health
from shoal.fleet.view import ReplicaRole
from shoal.wire.connection import Cause, Connection
from shoal.wire.listener import Listener, listen
from shoal.wire.messages import Assign, Hello, Members, Message, Register, Report, Role

PUSH_S = 2.0  # longest time between two lists, also when nothing changed
_TICK_S = 0.25

log = logging.getLogger("shoal.controller")


class Hub:
    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.listener: Listener
        self._gateways: set[Connection] = set()
        self._engines: dict[Connection, ReplicaRole] = {}  # the role that each has, or was told last
        self._pushed_s = 0.0
        self._pushed_version = -1

    async def listen(self, address: str, *, secret: bytes, incarnation: str) -> None:
        self.listener = await listen(
            address,
            secret=secret,
            incarnation=incarnation,
            welcome=lambda: None,
            handler=self._serve,
            admit=self._refusal,
        )

    async def close(self) -> None:
        await self.listener.close()

    async def run(self) -> None:
        """Expires leases and repeats the list; until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            for name in self.registry.expire(time.monotonic_ns()):
                log.warning("controller.lease_expired", {"process": name})
            if self.registry.version != self._pushed_version or loop.time() - self._pushed_s >= PUSH_S:
                self._push()
            await asyncio.sleep(_TICK_S)

    def _refusal(self, hello: Hello) -> str | None:
        if hello.role is Role.CONTROLLER:
            return "a controller does not register with a controller"
        if self.registry.is_old(hello):
            return f"a newer session of {hello.name} is open"
        return None

    async def _serve(self, connection: Connection) -> None:
        hello = connection.peer
        assert isinstance(hello, Hello)
        try:
            while True:
                async with asyncio.timeout(health.LEASE_NS / 1e9):
                    message = await connection.receive()
                if not self._take(hello, connection, message):
                    return
        except TimeoutError:
            log.warning("controller.silent", {"process": hello.name})
        finally:
            self._gateways.discard(connection)
            self._engines.pop(connection, None)
            self.registry.disconnected(hello)

    def _take(self, hello: Hello, connection: Connection, message: Message) -> bool:
        """False: the connection is over."""
        now_ns = time.monotonic_ns()
        if isinstance(message, Register):
            known = self.registry.knows(hello)
            why = self.registry.register(hello, message, now_ns)
            if why is not None:
                connection.close(Cause.MALFORMED, why)
                return False
            if not known:
                log.info("controller.registered", {"process": hello.name, "role": hello.role, "pid": message.pid})
            if hello.role is Role.GATEWAY:
                self._gateways.add(connection)
                connection.send(self.registry.members())
            if message.replica is not None:
                self._engines[connection] = message.replica.role
                self._assign(connection)
            if self.registry.version != self._pushed_version:
                self._push()
            return True
        if isinstance(message, Report):
            return self.registry.report(hello, message, now_ns)
        connection.close(Cause.MALFORMED, f"a {type(message).__name__} is not for a controller")
        return False

    def _push(self) -> None:
        members: Members = self.registry.members()
        for connection in self._gateways:
            connection.send(members)
        for connection in self._engines:
            self._assign(connection)
        self._pushed_version = members.version
        self._pushed_s = asyncio.get_running_loop().time()

    def _assign(self, connection: Connection) -> None:
        """Tells an engine the role that was set here, where it has another one."""
        hello = connection.peer
        assert isinstance(hello, Hello)
        role = self.registry.role(hello.name)
        if role is not None and role is not self._engines[connection]:
            self._engines[connection] = role
            connection.send(Assign(role=role))
