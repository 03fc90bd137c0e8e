"""A peer that does not read is disconnected; a peer that reads slowly is not."""

from __future__ import annotations

import asyncio

import pytest

from shoal.wire import connection as wire
from shoal.wire.connection import Cause, Connection, ConnectionClosed
from shoal.wire.messages import Announce, KeepAlive
from tests.support.wires import connect, listening, swallow, until

BIG = Announce(what="x" * 100_000, predicted_ns=0)


async def _with_deaf_peer(act: object) -> ConnectionClosed:
    """`act(connection)` runs on the listener's side; the peer has stopped reading. How the connection ended."""
    ended: asyncio.Future[ConnectionClosed] = asyncio.get_running_loop().create_future()

    async def handler(connection: Connection) -> None:
        try:
            await act(connection)  # type: ignore[operator]
            await connection.receive()
        except ConnectionClosed as e:
            ended.set_result(e)
            raise

    async with listening(handler) as listener:
        peer = await connect(listener.address)
        peer._transport.pause_reading()
        try:
            return await asyncio.wait_for(ended, 10)
        finally:
            peer.close()


async def test_over_a_megabyte_unsent_closes() -> None:
    async def act(connection: Connection) -> None:
        for _ in range(200):
            connection.send(BIG)
        assert connection.closed

    end = await _with_deaf_peer(act)
    assert end.cause is Cause.OUTBOX and "bytes unsent" in str(end)


async def test_two_seconds_unsent_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "OUTBOX_S", 0.05)
    monkeypatch.setattr(wire, "OUTBOX_BYTES", 1 << 30)

    async def act(connection: Connection) -> None:
        for _ in range(200):  # more than socket buffers hold
            connection.send(BIG)
        assert not connection.writable

    end = await _with_deaf_peer(act)
    assert end.cause is Cause.OUTBOX and "did not read" in str(end)


async def test_a_closing_connection_does_not_wait_for_a_deaf_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "OUTBOX_S", 0.05)
    monkeypatch.setattr(wire, "OUTBOX_BYTES", 1 << 30)

    async def handler(connection: Connection) -> None:
        for _ in range(200):
            connection.send(BIG)

    async with listening(handler) as listener:
        peer = await connect(listener.address)
        peer._transport.pause_reading()
        await until(lambda: listener.ended)
        await asyncio.wait_for(listener.close(), 5)
        peer.close()


async def test_the_owner_is_told_when_it_may_send_again() -> None:
    told = asyncio.Event()

    async def handler(connection: Connection) -> None:
        connection.on_writable = told.set
        while connection.writable:
            connection.send(BIG)
        await swallow(connection)

    async with listening(handler) as listener:
        peer = await connect(listener.address)
        async with asyncio.timeout(5):
            while not told.is_set():
                await peer.receive()
        peer.close()


async def test_reading_pauses_where_the_owner_does_not_receive() -> None:
    gate = asyncio.Event()
    count = 0

    async def handler(connection: Connection) -> None:
        nonlocal count
        await gate.wait()
        while True:
            await connection.receive()
            count += 1

    num = 400_000
    async with listening(handler) as listener:
        peer = await connect(listener.address)
        sent = 0
        async with asyncio.timeout(20):
            while sent < num and peer.writable:  # until the receiver's buffers are full
                peer.send(KeepAlive())
                sent += 1
                if sent % 1000 == 0:
                    await asyncio.sleep(0)
            assert not peer.writable, "the receiver took everything into memory"
            gate.set()
            await until(lambda: count == sent, 20)
        peer.close()


async def test_what_is_sent_after_the_end_vanishes() -> None:
    async with listening(swallow) as listener:
        peer = await connect(listener.address)
        peer.close()
        peer.send(KeepAlive())
        with pytest.raises(ConnectionClosed, match="local"):
            await peer.receive()
