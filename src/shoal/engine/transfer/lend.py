"""The side that has blocks: it lends them to other engines, which read them from a window, filled piece by piece.

    Ask ─► pin ─► Offer ─► Piece, Piece, ... ◄─ Taken, Taken, ... ◄─ Release ─► unpin

One connection is one lease. It ends with the connection, with Release, or when nothing was heard for LEASE_S; then
nobody reads the blocks any more and they are given back.

The event loop hears and speaks; one thread of the lender's own owns all leases, and copies and digests. What it is to
do comes as jobs, in their order, one piece a job, so that leases take turns.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shoal.engine.transfer.digest import digest
from shoal.engine.transfer.lease import Lease, Range, cut_piece
from shoal.engine.transfer.transport import NUM_PLACES, PIECE_BYTES, Memory, Pacer, Transport, TransportError, place_of
from shoal.fleet import health
from shoal.wire.connection import Cause, Connection
from shoal.wire.listener import Listener, listen
from shoal.wire.messages import (
    Ask,
    Declined,
    EngineInfo,
    Hello,
    KeepAlive,
    Message,
    Offer,
    Part,
    Piece,
    Release,
    Role,
    Taken,
)

LEASE_S = health.LEASE_NS / 1e9
MAX_LEASES = 4  # at one time; each has a window
MAX_LINE = 64  # connections that wait for one to end, for as long as they like
MAX_KEYS = 1 << 16  # of one Ask

log = logging.getLogger("shoal.engine")


class Store(Protocol):
    """The engine whose blocks are lent."""

    num_layers: int
    block_bytes: int

    def pin(self, lease: int, keys: Sequence[bytes], tell: Callable[[Sequence[int]], None]) -> None:
        """Keeps what is held of `keys`, from the first on, where it is and as it is, until `unpin(lease)`.

        Returns at once. `tell` is called with those blocks, from any thread and at any later time.
        """
        ...

    def unpin(self, lease: int) -> None:
        """Once for each `pin`, also before its `tell` was called, which then need not be."""
        ...

    def take(self, block: int, first_layer: int, target: memoryview) -> bytes | None:
        """Copies layers of a pinned block, as many as the target has room for, on the lender's thread. Returns their
        digest where it was known before, so that a fault since then is noticed by the reader."""
        ...


class Lender:
    """`transports` belong to the caller, as does what the store does in its methods."""

    def __init__(
        self,
        store: Store,
        transports: Sequence[Transport],
        *,
        max_leases: int = MAX_LEASES,
        max_bytes_per_s: int = 0,
    ) -> None:
        """`max_bytes_per_s`: of all leases together; 0 is as fast as it goes. Raises ValueError: layers too large."""
        self._layer_bytes = store.block_bytes // store.num_layers
        if self._layer_bytes > PIECE_BYTES:
            raise ValueError(f"a layer of a block has {self._layer_bytes} bytes, a piece at most {PIECE_BYTES}")
        self.listener: Listener
        self.lent_bytes = 0
        self._store = store
        self._transports = transports
        self._pacer = Pacer(max_bytes_per_s)
        self._max_leases = max_leases
        self._num_asked = 0  # leases so far
        self._num_open = 0  # the thread's, as the line
        self._line: deque[tuple[Lease, Ask]] = deque()
        self._memories: list[Memory] = []  # of leases that are over
        self._jobs: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop
        self._incarnation = ""
        self._thread = threading.Thread(target=self._run, name="lends", daemon=True)

    # -- on the event loop ---------------------------------------------------------------------------------------------

    async def listen(self, address: str, *, secret: bytes, incarnation: str, info: EngineInfo) -> None:
        """Raises ValueError (address, secret), OSError (taken)."""
        self._loop = asyncio.get_running_loop()
        self._incarnation = incarnation
        self.listener = await listen(
            address,
            secret=secret,
            incarnation=incarnation,
            welcome=lambda: info,
            handler=self._serve,
            admit=lambda hello: None if hello.role is Role.ENGINE else f"blocks are for engines, not a {hello.role}",
        )
        self._thread.start()

    async def close(self, limit_s: float) -> bool:
        """Ends every lease. False: the thread is still in a copy."""
        await self.listener.close(limit_s)
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join, limit_s)
        return not self._thread.is_alive()

    def post(self, work: Callable[..., None], *arguments: Any) -> None:
        """A job for the lender's thread."""
        self._jobs.put((work, arguments))

    async def _serve(self, connection: Connection) -> None:
        try:
            ask = await _hear(connection)
        except TimeoutError:
            connection.close(Cause.SILENT, f"no question within {LEASE_S:g} s")
            return
        if not isinstance(ask, Ask) or not 0 < len(ask.keys) <= MAX_KEYS:
            connection.close(Cause.MALFORMED, "no question that can be answered")
            return
        if ask.incarnation != self._incarnation:
            connection.send(Declined(reason="the engine that was asked is gone, another one is here"))
            return
        self._num_asked += 1
        lease = Lease(self._num_asked, connection)
        self.post(self._begin, lease, ask)
        try:
            await self._keep(lease)
        except TimeoutError:
            assert isinstance(connection.peer, Hello)
            log.warning("peers.lease_expired", {"peer": connection.name, "session": connection.peer.session})
        finally:
            lease.over = True
            self.post(self._end, lease)

    async def _keep(self, lease: Lease) -> None:
        while True:
            match await _hear(lease.connection):
                case Taken(number=number):
                    self.post(self._taken, lease, number)
                case KeepAlive():
                    pass
                case Release():
                    return
                case message:
                    lease.connection.close(Cause.MALFORMED, f"a {type(message).__name__} from whoever borrows")

    # -- the lender's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, arguments = job
            try:
                work(*arguments)
            except Exception:
                log.exception("peers.lending_failed")
                for lease in arguments:
                    if isinstance(lease, Lease):
                        self._cut(lease, "the blocks cannot be read")
        for memory in self._memories:
            memory.close()

    def _begin(self, lease: Lease, ask: Ask) -> None:
        if lease.over:
            return
        if self._num_open >= self._max_leases:
            if len(self._line) < MAX_LINE:
                self._line.append((lease, ask))
            else:
                self._cut(lease, "too many others borrow blocks")
            return
        self._num_open += 1
        lease.open = True
        lease.pinned = True
        self._store.pin(lease.number, ask.keys, lambda blocks: self.post(self._pinned, lease, tuple(blocks)))

    def _pinned(self, lease: Lease, blocks: Sequence[int]) -> None:
        if lease.over:
            return
        if not blocks:
            self._cut(lease, "none of these blocks is here any more")
            return
        lease.parts.extend(Range(number, block, 0, self._store.num_layers) for number, block in enumerate(blocks))
        self._offer(lease)

    def _offer(self, lease: Lease) -> None:
        lease.memory = memory = self._memories.pop() if self._memories else Memory()
        doors = {}
        for transport in self._transports:
            try:
                doors[transport.name] = transport.register(memory)
            except TransportError as e:
                log.warning("peers.no_door", {"transport": transport.name, "detail": str(e)})
        self._say(lease, Offer(num_layers=self._store.num_layers, block_bytes=self._store.block_bytes, doors=doors))
        self._fill(lease)

    def _taken(self, lease: Lease, number: int) -> None:
        if number != lease.num_taken or number >= lease.num_sent:
            self._cut(lease, f"piece {number} was not due")
            return
        lease.num_taken += 1
        self._fill(lease)

    def _fill(self, lease: Lease) -> None:
        """Sends the next piece, where there is one and room for it, at its time."""
        full = lease.num_sent - lease.num_taken >= NUM_PLACES
        if lease.over or lease.memory is None or full or lease.waiting or lease.last_sent:
            return
        ranges = cut_piece(lease.parts, self._layer_bytes)
        delay_s = self._pacer.delay_s(sum(part.num_layers for part in ranges) * self._layer_bytes)
        lease.waiting = True
        if delay_s:
            self._on_loop(self._loop.call_later, delay_s, self.post, self._send, lease, ranges)
        else:
            self.post(self._send, lease, ranges)

    def _send(self, lease: Lease, ranges: Sequence[Range]) -> None:
        lease.waiting = False
        if lease.over or lease.memory is None:
            return
        offset = place_of(lease.num_sent)
        parts = []
        for number, block, first_layer, num_layers in ranges:
            end = offset + num_layers * self._layer_bytes
            target = lease.memory.view[offset:end]
            known = self._store.take(block, first_layer, target)
            parts.append(Part(number, first_layer, num_layers, known or digest(target)))
            self.lent_bytes += end - offset
            offset = end
        lease.last_sent = not lease.parts
        self._say(lease, Piece(number=lease.num_sent, parts=tuple(parts), last=lease.last_sent))
        lease.num_sent += 1
        self._fill(lease)

    def _end(self, lease: Lease) -> None:
        self._num_open -= lease.open
        if lease.memory is not None:
            for transport in self._transports:
                transport.withdraw(lease.memory)
            self._memories.append(lease.memory)
            lease.memory = None
        if lease.pinned:
            self._store.unpin(lease.number)
        num_free = self._max_leases - self._num_open
        while self._line and num_free > 0:
            waiting, ask = self._line.popleft()
            if not waiting.over:
                self.post(self._begin, waiting, ask)
                num_free -= 1

    def _cut(self, lease: Lease, reason: str) -> None:
        """The handler hears of it, and ends the lease."""
        self._say(lease, Declined(reason=reason))
        self._on_loop(lease.connection.close)

    def _say(self, lease: Lease, message: Message) -> None:
        self._on_loop(lease.connection.send, message)

    def _on_loop(self, call: Callable[..., Any], *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)


async def _hear(connection: Connection) -> Message:
    async with asyncio.timeout(LEASE_S):
        return await connection.receive()
