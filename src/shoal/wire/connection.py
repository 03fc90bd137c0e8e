"""One authenticated connection between two processes, and how to dial one; `listener.py` is the other side.

A connection never makes its owner wait: `send` hands bytes to the kernel or to a bounded outbox. Whoever falls behind
by more than OUTBOX_BYTES or OUTBOX_NS is disconnected; what it was owed is made good by reconnecting, not by memory.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import cast

import msgspec

from shoal.wire import address as addresses
from shoal.wire import codec, handshake
from shoal.wire.messages import MAX_FRAME_BYTES, Challenge, Hello, Message, Rejected, Role, Welcome

OUTBOX_BYTES = 1 << 20  # unsent bytes beyond which the next message closes the connection
OUTBOX_S = 2.0  # a byte unsent for this long closes it too
HANDSHAKE_S = 5.0
UNACKNOWLEDGED_S = 10.0  # after that a host that vanished without a word counts as gone
_INBOX_HIGH, _INBOX_LOW = 1024, 256  # undelivered messages at which reading pauses and goes on


class Cause(StrEnum):
    """Why a connection ended. The values are the labels of the counters."""

    LOCAL = "local"  # this side closed it
    EOF = "eof"  # the peer closed it or died
    OVERSIZED = "oversized"
    MALFORMED = "malformed"  # no msgpack, unknown type, wrong schema
    OUTBOX = "outbox"  # the peer did not read
    UNTRUSTED = "untrusted"  # handshake refused, by either side
    SILENT = "silent"  # no handshake within its limit
    CROWDED = "crowded"  # too many strangers at once


class ConnectionClosed(ConnectionError):
    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause


class Connection(asyncio.Protocol):
    """Made by `dial` and `listen`; of the methods of asyncio.Protocol, only the event loop calls any."""

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        on_open: Callable[[Connection], None] | None = None,
    ) -> None:
        self.peer: Hello | Welcome  # set by the handshake
        self.name = "stranger"  # of the peer, for logs
        self.on_writable: Callable[[], None] | None = None
        self._reader = codec.FrameReader(decoder, max_frame_bytes)
        self._on_open = on_open
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._inbox: deque[Message] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._reading = True
        self._writable = True
        self._written = 0  # bytes handed to the transport
        self._stall: asyncio.TimerHandle | None = None
        self._end: ConnectionClosed | None = None
        self._lost = asyncio.Event()

    # -- what its owner uses -------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._end is not None

    @property
    def end(self) -> ConnectionClosed | None:
        """Why it closed; None while it is open."""
        return self._end

    @property
    def writable(self) -> bool:
        """Nothing is waiting to be sent. A sender with much to say merges until then; `on_writable` says when."""
        return self._writable and self._end is None

    def send(self, message: Message) -> None:
        """Never blocks. After the connection closed, messages vanish: `receive` tells the owner."""
        if self._end is not None:
            return
        unsent = self._transport.get_write_buffer_size()
        if unsent > OUTBOX_BYTES:
            self._finish(Cause.OUTBOX, f"{unsent} bytes unsent, the limit is {OUTBOX_BYTES}", abort=True)
            return
        frame = codec.encode(message)
        self._written += len(frame)
        self._transport.write(frame)

    async def receive(self) -> Message:
        """The next message, in order. Raises ConnectionClosed after the last. One caller at a time."""
        while not self._inbox:
            if self._end is not None:
                raise self._end
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message = self._inbox.popleft()
        if not self._reading and len(self._inbox) <= _INBOX_LOW and self._end is None:
            self._reading = True
            self._transport.resume_reading()
        return message

    def close(self, cause: Cause = Cause.LOCAL, detail: str = "closed here") -> None:
        """Sends what is in the outbox, within its limits, and drops what was not received yet."""
        self._finish(cause, detail, abort=False)
        self._inbox.clear()

    async def wait_lost(self, limit_s: float) -> None:
        """Until the socket is gone; it is cut at the limit."""
        try:
            async with asyncio.timeout(limit_s):
                await self._lost.wait()
        except TimeoutError:
            self._transport.abort()

    def trust(self, peer: Hello | Welcome) -> None:
        """The handshake is over: frames may have their full size from here on."""
        self.peer = peer
        self.name = peer.name if isinstance(peer, Hello) else "listener"
        self._reader.max_frame_bytes = MAX_FRAME_BYTES

    # -- what the event loop calls -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self._transport.set_write_buffer_limits(high=0)
        sock = transport.get_extra_info("socket")
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNACKNOWLEDGED_S * 1000))
        if self._on_open is not None:
            self._on_open(self)

    def data_received(self, data: bytes) -> None:
        if self._end is not None:
            return
        messages: list[Message] = []
        try:
            self._reader.feed(data, messages)
        except codec.BadFrame as e:
            self._inbox.extend(messages)
            self._finish(Cause(e.kind), str(e), abort=True)
            return
        self._inbox.extend(messages)
        if self._reading and len(self._inbox) > _INBOX_HIGH:
            self._reading = False
            self._transport.pause_reading()
        self._wake()

    def pause_writing(self) -> None:
        self._writable = False
        self._stall = self._loop.call_later(OUTBOX_S, self._check_stall, self._written)

    def resume_writing(self) -> None:
        self._writable = True
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        if self.on_writable is not None and self._end is None:
            self.on_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(Cause.EOF, str(exc) if exc else "the peer closed the connection", abort=False)
        if self._stall is not None:
            self._stall.cancel()
        self._lost.set()

    def _check_stall(self, written: int) -> None:
        """`written` bytes had been handed over when the outbox was last looked at; the oldest must be gone by now."""
        self._stall = None
        if self._written - self._transport.get_write_buffer_size() < written:
            self._finish(Cause.OUTBOX, f"the peer did not read for {OUTBOX_S:g} s", abort=True)
            self._transport.abort()
        elif not self._writable:
            self._stall = self._loop.call_later(OUTBOX_S, self._check_stall, self._written)

    def _finish(self, cause: Cause, detail: str, *, abort: bool) -> None:
        """The first cause stays."""
        if self._end is not None:
            return
        self._end = ConnectionClosed(cause, detail)
        if abort:
            self._transport.abort()
        else:
            self._transport.close()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def dial(
    address: str,
    *,
    role: Role,
    name: str,
    incarnation: str,
    session: int,
    secret: bytes,
    timeout_s: float = HANDSHAKE_S,
) -> Connection:
    """Raises ConnectionClosed (the other side is not one of us, or gave up), OSError (nobody listens, no such name),
    TimeoutError, ValueError (address, secret)."""
    where = addresses.parse(address)
    addresses.check(where, secret)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        if isinstance(where, addresses.UnixAddress):
            _, connection = await loop.create_unix_connection(lambda: Connection(codec.to_dialler), str(where.path))
        else:
            _, connection = await loop.create_connection(lambda: Connection(codec.to_dialler), where.host, where.port)
        try:
            asked = await connection.receive()
            if not isinstance(asked, Challenge):
                raise _untrusted(connection, "the listener did not begin with a challenge")
            if why := handshake.unspeakable(asked):
                raise _untrusted(connection, why)
            hello = handshake.hello(
                asked, secret=secret, role=role, name=name, incarnation=incarnation, session=session
            )
            connection.send(hello)
            answer = await connection.receive()
            if not isinstance(answer, Welcome | Rejected):
                raise _untrusted(connection, f"a {type(answer).__name__} instead of a welcome")
            if why := handshake.distrust(asked, hello, answer, secret=secret):
                raise _untrusted(connection, why)
            assert isinstance(answer, Welcome)
            connection.trust(answer)
            return connection
        except BaseException:
            connection.close()
            raise


def _untrusted(connection: Connection, why: str) -> ConnectionClosed:
    connection.close(Cause.UNTRUSTED, why)
    return ConnectionClosed(Cause.UNTRUSTED, why)
