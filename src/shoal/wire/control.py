"""An engine's or a gateway's standing connection to the controller, made again for as long as the process lives.

The controller is on nobody's request path: while it is away the owner works on with what it was last told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable

from shoal.fleet.view import ReplicaRole
from shoal.wire.connection import Connection, ConnectionClosed, dial
from shoal.wire.messages import Assign, Members, Register, Report, Role

REPORT_S = 0.5
RECONNECT_S = 1.0  # longest pause between two tries; drawn by chance, so that a fleet does not return in one moment
_FIRST_PAUSE_S = 0.1
_SILENCE_S = 10.0  # gateways hear from the controller every 2 s; one that is silent may have stopped
_TOGETHER_S = 3.0

log = logging.getLogger("shoal.wire")


class ControlLink:
    """Registers, then reports every REPORT_S. `run` goes on until it is cancelled.

    `register` and `report` are asked for the current message each time; `on_members` gets every list (gateways),
    `on_role` every role that is assigned (engines).
    """

    def __init__(
        self,
        address: str,
        *,
        role: Role,
        name: str,
        incarnation: str,
        secret: bytes,
        register: Callable[[], Register],
        report: Callable[[], Report],
        on_members: Callable[[Members], None] | None = None,
        on_role: Callable[[ReplicaRole], None] | None = None,
    ) -> None:
        self.connected = False
        self._address = address
        self._role = role
        self._name = name
        self._incarnation = incarnation
        self._secret = secret
        self._register = register
        self._report = report
        self._on_members = on_members
        self._on_role = on_role
        self._session = 0
        self._connection: Connection | None = None
        self._last_trouble = ""
        self._met = False  # connected at least once
        self._began_s = time.monotonic()

    async def run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            pause_s = min(2 * pause_s, RECONNECT_S)
            try:
                await self._one_connection()
            except (ConnectionClosed, OSError, TimeoutError) as e:
                self._trouble(str(e) or type(e).__name__)
            finally:
                if self.connected:
                    pause_s = _FIRST_PAUSE_S
                self.connected = False
                self._connection = None
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    def registration_changed(self) -> None:
        """Says so at once where the controller is there; a later connection begins with it anyway."""
        if self._connection is not None:
            self._connection.send(self._register())
            self._connection.send(self._report())

    async def _one_connection(self) -> None:
        self._session += 1
        connection = await dial(
            self._address,
            role=self._role,
            name=self._name,
            incarnation=self._incarnation,
            session=self._session,
            secret=self._secret,
        )
        reporting = asyncio.create_task(self._keep_reporting(connection))
        try:
            connection.send(self._register())
            self._connection = connection
            self.connected = self._met = True
            self._last_trouble = ""
            log.info("control.connected", {"controller": self._address})
            while True:
                async with asyncio.timeout(None if self._on_members is None else _SILENCE_S):
                    message = await connection.receive()
                if isinstance(message, Members) and self._on_members is not None:
                    self._on_members(message)
                elif isinstance(message, Assign) and self._on_role is not None:
                    self._on_role(message.role)
        finally:
            reporting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reporting
            connection.close()

    async def _keep_reporting(self, connection: Connection) -> None:
        try:
            while not connection.closed:
                connection.send(self._report())
                await asyncio.sleep(REPORT_S)
        finally:
            connection.close()  # a report that cannot be made must not look like a silent process

    def _trouble(self, what: str) -> None:
        """One line per kind of trouble: a controller that stays away must not fill the log. None at the beginning:
        processes that start together wait for each other."""
        starting = not self._met and time.monotonic() - self._began_s < _TOGETHER_S
        if what != self._last_trouble and not starting:
            self._last_trouble = what
            log.warning("control.unreachable", {"controller": self._address, "detail": what})
