"""The side that is dialled: accepts connections, asks who is there, hands those that belong to us to a handler."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable

from shoal.wire import address as addresses
from shoal.wire import codec, handshake
from shoal.wire.connection import HANDSHAKE_S, OUTBOX_S, Cause, Connection, ConnectionClosed
from shoal.wire.messages import EngineInfo, Hello, Rejected

STRANGER_FRAME_BYTES = 64 << 10  # what a dialler may send before it has proved who it is
MAX_STRANGERS = 64  # connections in their handshake at one time
_LOG_S = 1.0  # between two lines about one cause: a stranger that tries for ever must not fill the log

log = logging.getLogger("shoal.wire")


class Listener:
    """Accepts connections until closed. `ended` counts how connections ended, by Cause."""

    def __init__(
        self,
        *,
        secret: bytes,
        incarnation: str,
        welcome: Callable[[], EngineInfo | None],
        handler: Callable[[Connection], Awaitable[None]],
        admit: Callable[[Hello], str | None] | None,
    ) -> None:
        self.address = ""
        self.ended: Counter[Cause] = Counter()
        self._secret = secret
        self._incarnation = incarnation
        self._welcome = welcome
        self._handler = handler
        self._admit = admit
        self._num_strangers = 0
        self._next_line_s: dict[Cause, float] = {}  # when a cause may be logged again
        self._tasks: dict[asyncio.Task[None], Connection] = {}
        self._server: asyncio.Server
        self._socket_file: tuple[str, int] | None = None  # path and inode

    async def close(self, limit_s: float = 2.0) -> None:
        """Stops accepting, closes every connection, waits for their handlers, removes the socket file."""
        self._server.close()
        self._remove_socket_file()
        for connection in self._tasks.values():
            connection.close(detail="the listener shuts down")
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=limit_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=limit_s)

    def _protocol(self) -> Connection:
        return Connection(codec.to_listener, STRANGER_FRAME_BYTES, on_open=self._opened)

    def _opened(self, connection: Connection) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(connection))
        self._tasks[task] = connection
        task.add_done_callback(self._tasks.pop)

    async def _serve(self, connection: Connection) -> None:
        try:
            if await self._introduce(connection):
                await self._handler(connection)
                connection.close(detail="served")
        except ConnectionClosed as e:
            connection.close(e.cause, str(e))
        except Exception:
            log.exception("wire.handler_failed", {"peer": connection.name})
            connection.close(detail="handler failed")
        finally:
            connection.close()
            self._count(connection)
            await connection.wait_lost(OUTBOX_S)

    async def _introduce(self, connection: Connection) -> bool:
        if self._num_strangers >= MAX_STRANGERS:
            connection.close(Cause.CROWDED, f"{MAX_STRANGERS} handshakes are under way")
            return False
        self._num_strangers += 1
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                asked = handshake.challenge()
                connection.send(asked)
                hello = await connection.receive()
        except TimeoutError:
            connection.close(Cause.SILENT, f"no hello within {HANDSHAKE_S:g} s")
            return False
        finally:
            self._num_strangers -= 1
        if not isinstance(hello, Hello):
            why: str | None = f"a {type(hello).__name__} instead of a hello"
        else:
            why = handshake.refusal(asked, hello, secret=self._secret)
            if why is None and self._admit is not None:
                why = self._admit(hello)
        if why is not None:
            connection.send(Rejected(reason=why))
            connection.close(Cause.UNTRUSTED, why)
            return False
        assert isinstance(hello, Hello)
        connection.trust(hello)
        connection.send(
            handshake.welcome(asked, hello, secret=self._secret, incarnation=self._incarnation, engine=self._welcome())
        )
        return True

    def _count(self, connection: Connection) -> None:
        end = connection.end
        assert end is not None
        self.ended[end.cause] += 1
        now_s = asyncio.get_running_loop().time()
        if end.cause in (Cause.LOCAL, Cause.EOF) or now_s < self._next_line_s.get(end.cause, 0.0):
            return
        self._next_line_s[end.cause] = now_s + _LOG_S
        fields = {"peer": connection.name, "cause": end.cause, "detail": str(end), "so_far": self.ended[end.cause]}
        log.warning("wire.disconnected", fields)

    def _remove_socket_file(self) -> None:
        """Only the file this listener made: a successor may have put its own there."""
        if self._socket_file is not None:
            path, inode = self._socket_file
            with contextlib.suppress(FileNotFoundError):
                if os.lstat(path).st_ino == inode:
                    os.unlink(path)


async def listen(
    address: str,
    *,
    secret: bytes,
    incarnation: str,
    welcome: Callable[[], EngineInfo | None],
    handler: Callable[[Connection], Awaitable[None]],
    admit: Callable[[Hello], str | None] | None = None,
) -> Listener:
    """`handler` owns one connection, which is closed when it returns; ConnectionClosed may pass through it.

    `admit` may turn an authenticated dialler away with a reason. Raises ValueError (address, secret), OSError
    (taken, no such name).
    """
    where = addresses.parse(address)
    addresses.check(where, secret)
    sock = addresses.bind(where)
    listener = Listener(secret=secret, incarnation=incarnation, welcome=welcome, handler=handler, admit=admit)
    loop = asyncio.get_running_loop()
    if isinstance(where, addresses.UnixAddress):
        listener._socket_file = (str(where.path), where.path.lstat().st_ino)
        listener._server = await loop.create_unix_server(listener._protocol, sock=sock)
        listener.address = str(where)
    else:
        listener._server = await loop.create_server(listener._protocol, sock=sock)
        listener.address = str(addresses.TcpAddress(where.host, _port(sock)))
    return listener


def _port(sock: socket.socket) -> int:
    port: int = sock.getsockname()[1]
    return port
