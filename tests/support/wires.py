"""Wire peers for tests: a listener that records, raw sockets, frames written by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec

from shoal.core.plan import View
from shoal.wire.connection import Connection, ConnectionClosed, dial
from shoal.wire.listener import Listener, listen
from shoal.wire.messages import Hello, Message, Role

T = TypeVar("T")
SECRET = b"a secret of the tests"
LIMIT_S = 5.0  # for what comes at once
VIEW = View(step=0, num_running=0, num_waiting=0, waiting_tokens=0, free_blocks=1, cached_blocks=0, total_blocks=1)


@asynccontextmanager
async def listening(
    handler: Callable[[Connection], Awaitable[None]],
    address: str = "tcp:127.0.0.1:0",
    admit: Callable[[Hello], str | None] | None = None,
) -> AsyncIterator[Listener]:
    listener = await listen(
        address, secret=SECRET, incarnation="listener", welcome=lambda: None, handler=handler, admit=admit
    )
    try:
        yield listener
    finally:
        await listener.close()


async def connect(
    address: str,
    *,
    name: str = "gateway-0",
    session: int = 1,
    incarnation: str = "first",
    role: Role = Role.GATEWAY,
    secret: bytes = SECRET,
) -> Connection:
    return await dial(address, role=role, name=name, incarnation=incarnation, session=session, secret=secret)


async def raw(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A bare socket to a listener; its challenge has not been read."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        return await asyncio.open_unix_connection(rest)
    host, _, port = rest.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def read_frame(reader: asyncio.StreamReader) -> dict[str, object]:
    """One frame, undecoded but for msgpack."""
    async with asyncio.timeout(LIMIT_S):
        length = int.from_bytes(await reader.readexactly(4), "big")
        value: dict[str, object] = msgspec.msgpack.decode(await reader.readexactly(length))
    return value


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


async def swallow(connection: Connection) -> None:
    """A handler that reads and never answers."""
    while True:
        await connection.receive()


async def next_of(connection: Connection, kind: type[Message], limit_s: float = LIMIT_S) -> Message:
    async with asyncio.timeout(limit_s):
        while not isinstance(message := await connection.receive(), kind):
            pass
    return message


async def end_of(connection: Connection, limit_s: float = LIMIT_S) -> ConnectionClosed:
    """How it ends; what still arrives before is dropped."""
    async with asyncio.timeout(limit_s):
        while True:
            try:
                await connection.receive()
            except ConnectionClosed as e:
                return e


async def eventually(look: Callable[[], Awaitable[T]], limit_s: float = 8.0) -> T:
    """The first true value that `look` finds, or the limit is a failure."""
    async with asyncio.timeout(limit_s):
        while not (found := await look()):  # noqa: ASYNC110 (what is looked at tells nobody)
            await asyncio.sleep(0.01)
    return found


async def until(look: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """The condition holds, or the limit is a failure."""
    async with asyncio.timeout(limit_s):
        while not look():  # noqa: ASYNC110 (what is looked at tells nobody)
            await asyncio.sleep(0.005)
