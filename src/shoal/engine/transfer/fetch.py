"""The side that lacks blocks: it asks another engine for them, reads them, and uses none before its digest was checked.

    dial ─► Ask ─► Offer ─► Piece, Piece, ... (each: read ─► check ─► place ─► Taken) ─► Release

The event loop speaks with the owner; one thread per fetch reads, checks and places. Whatever goes wrong ends the fetch:
what is good by then is told, as the number of blocks from the first on, and the rest is for the caller to compute.
When a fetch was told, nothing of it touches the caller's blocks any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from shoal.engine.transfer.arrival import Arrival, Place
from shoal.engine.transfer.transport import NUM_PLACES, PIECE_BYTES, Memory, Pacer, Transport
from shoal.wire.connection import Connection, ConnectionClosed, dial
from shoal.wire.messages import Ask, Declined, KeepAlive, Message, Offer, Piece, Release, Role, Taken, Welcome

MAX_FETCHES = 4  # at one time; others wait, and their limit runs. Each has a thread and a window
RENEW_S = 1.0
TOO_LATE = "it took longer than its limit"

log = logging.getLogger("shoal.engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to fetch from whom."""

    number: int  # names it in Fetched
    address: str  # where the owner lends
    incarnation: str  # of the owner; whoever else answers there is not asked
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Fetched:
    number: int
    num_good: int  # blocks from the first on that are whole and in their places
    num_bytes: int  # that were placed
    busy_ns: int  # from the start to here, without the wait for other fetches
    way: str  # the transport; empty where it did not come to that
    why: str  # there are no more good ones; empty: all that was asked for came
    corrupt: bool  # a digest was wrong


Tell = Callable[[Fetched], None]


class _Ended(Exception):
    """Why a fetch ends early."""


class Fetcher:
    """Made on the event loop. `transports` belong to the caller; the first one that leads to the owner is used."""

    def __init__(
        self,
        transports: Sequence[Transport],
        *,
        name: str,
        incarnation: str,
        secret: bytes,
        hash_root: bytes,
        num_layers: int,
        block_bytes: int,
        max_bytes_per_s: int = 0,
    ) -> None:
        """`max_bytes_per_s`: of all fetches together; 0 is as fast as it goes."""
        self._transports = transports
        self._name = name
        self._incarnation = incarnation
        self._secret = secret
        self._hash_root = hash_root
        self._num_layers = num_layers
        self._block_bytes = block_bytes
        self._pacer = Pacer(max_bytes_per_s)
        self._loop = asyncio.get_running_loop()
        self._free = asyncio.Semaphore(MAX_FETCHES)
        self._threads = ThreadPoolExecutor(MAX_FETCHES, thread_name_prefix="fetch")
        self._memories: list[Memory] = []  # that no fetch uses now
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_sessions = 0

    def start(self, order: Order, place: Place, limit_s: float, tell: Tell) -> None:
        """Returns at once; from any thread. In the end `tell` is called on the event loop, at the limit at the latest
        but for the piece under way, unless the fetcher is closed before.

        `place(index, first_layer, bytes)` is called on a thread of the fetcher's, for each block whose digest was
        right, in any number of parts, layers in their order; it must be done with the bytes when it returns.
        """
        self._loop.call_soon_threadsafe(self._launch, order, place, time.monotonic() + limit_s, tell)

    async def close(self, limit_s: float) -> bool:
        """Gives up what is not done; it is not told. False: a thread is still in a copy."""
        for task in self._tasks:
            task.cancel()
        late: set[asyncio.Task[None]] = set()
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=limit_s)
        self._threads.shutdown(wait=not late)
        for memory in self._memories:
            memory.close()
        self._memories.clear()
        return not late

    def _launch(self, order: Order, place: Place, due_s: float, tell: Tell) -> None:
        task = self._loop.create_task(self._fetch(order, place, due_s, tell))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fetch(self, order: Order, place: Place, due_s: float, tell: Tell) -> None:
        arrival = Arrival(len(order.keys), self._num_layers, self._block_bytes, place)
        began_ns = time.monotonic_ns()
        try:
            async with asyncio.timeout(due_s - time.monotonic()), self._free:
                began_ns = time.monotonic_ns()
                connection = await self._dial(order)
                try:
                    await self._converse(order, connection, arrival)
                finally:
                    connection.send(Release())
                    connection.close()
        except TimeoutError:
            arrival.give_up(TOO_LATE)
        except (_Ended, ConnectionClosed, OSError, ValueError) as e:
            arrival.give_up(str(e) or type(e).__name__)
        except Exception as e:
            log.exception("peers.fetch_failed", {"peer": order.address})
            arrival.give_up(type(e).__name__)
        if arrival.why:
            fields = {"peer": order.address, "blocks": arrival.num_good, "detail": arrival.why}
            log.warning("peers.corrupt" if arrival.corrupt else "peers.fetch_ended_early", fields)
        busy_ns = time.monotonic_ns() - began_ns
        tell(
            Fetched(
                order.number, arrival.num_good, arrival.num_bytes, busy_ns, arrival.way, arrival.why, arrival.corrupt
            )
        )

    async def _dial(self, order: Order) -> Connection:
        self._num_sessions += 1
        connection = await dial(
            order.address,
            role=Role.ENGINE,
            name=self._name,
            incarnation=self._incarnation,
            session=self._num_sessions,
            secret=self._secret,
        )
        owner = connection.peer
        assert isinstance(owner, Welcome)
        why = ""
        if owner.incarnation != order.incarnation:
            why = "the engine that was asked is gone, another one is there"
        elif owner.engine is None or owner.engine.hash_root != self._hash_root:
            why = "its KV is of another model, number format or block size"
        if why:
            connection.close()
            raise _Ended(why)
        return connection

    async def _converse(self, order: Order, connection: Connection, arrival: Arrival) -> None:
        """Until all came or no more will."""
        connection.send(Ask(incarnation=order.incarnation, keys=order.keys))
        offer = await _hear(connection)
        if not isinstance(offer, Offer):
            raise _Ended(f"declined: {offer.reason[:200]}" if isinstance(offer, Declined) else "no offer came")
        if (offer.num_layers, offer.block_bytes) != (self._num_layers, self._block_bytes):
            raise _Ended("its blocks are laid out in another way")
        memory = self._memories.pop() if self._memories else Memory()
        moving = self._loop.run_in_executor(
            self._threads,
            arrival.run,
            self._transports,
            offer.doors,
            memory,
            lambda number: self._say(connection, Taken(number=number)),
        )
        listening = asyncio.create_task(self._listen(connection, arrival))
        try:
            await asyncio.shield(moving)
        finally:
            listening.cancel()
            arrival.stop()
            await moving  # a poll and a copy at most: from then on nobody touches what the caller has
            await asyncio.gather(listening, return_exceptions=True)
            if arrival.quiet:
                self._memories.append(memory)
            else:
                memory.close()
        if arrival.num_good < len(order.keys):
            arrival.give_up("the rest is not there any more")

    def _say(self, connection: Connection, message: Message) -> None:
        """From a thread."""
        self._loop.call_soon_threadsafe(connection.send, message)

    async def _listen(self, connection: Connection, arrival: Arrival) -> None:
        """Hands every piece that is announced to the thread, at its time; the end of the connection too."""
        try:
            for number in range(1 << 62):
                piece = await _hear(connection)
                if isinstance(piece, Declined):
                    raise _Ended(f"withdrawn: {piece.reason[:200]}")
                if not isinstance(piece, Piece) or piece.number != number:
                    raise _Ended("what came is not the next piece")
                if number - arrival.num_taken >= NUM_PLACES:
                    raise _Ended("a piece came before there was room for it")
                num_bytes = arrival.expect(piece)
                if num_bytes is None or num_bytes > PIECE_BYTES:
                    raise _Ended("a piece holds what was not asked for")
                await _pause(connection, self._pacer.delay_s(num_bytes))
                arrival.put(piece)
                if piece.last:
                    with contextlib.suppress(ConnectionClosed):
                        await _hear(connection)  # nothing more comes; the lease is kept while the rest is read
                    return
        except (_Ended, ConnectionClosed) as e:
            arrival.no_more(str(e))


async def _hear(connection: Connection) -> Message:
    """The next message; says that this side is alive meanwhile."""
    while True:
        try:
            async with asyncio.timeout(RENEW_S):
                return await connection.receive()
        except TimeoutError:
            connection.send(KeepAlive())


async def _pause(connection: Connection, delay_s: float) -> None:
    while delay_s > 0:
        await asyncio.sleep(min(delay_s, RENEW_S))
        delay_s -= RENEW_S
        if delay_s > 0:
            connection.send(KeepAlive())
