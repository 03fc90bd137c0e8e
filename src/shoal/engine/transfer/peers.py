"""What an engine lends to others and fetches from them, between the step loop and the device's blocks.

step thread:  plan ─► fetch ─► Fetcher ─► blocks of the device ─► told
              Lender ─► pin ─► inbox ─► Scheduler.lend ─► blocks stay ─► read from the device ─► unpin
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from shoal.core.plan import Brought, Fetch
from shoal.engine.transfer.fetch import TOO_LATE, Fetched, Fetcher, Order
from shoal.engine.transfer.lend import Lender
from shoal.engine.transfer.shm import Shm
from shoal.engine.transfer.tcp import Tcp
from shoal.engine.transfer.transport import Transport
from shoal.wire import address as addresses
from shoal.wire.messages import EngineInfo


class Blocks(Protocol):
    """transfer.wire_form.WireForm"""

    num_layers: int
    block_bytes: int

    def take(self, block: int, first_layer: int, target: memoryview) -> None: ...

    def put(self, block: int, first_layer: int, source: memoryview) -> None: ...


class Leases(Protocol):
    """loop.StepLoop"""

    def lend(self, lease: int, keys: Sequence[bytes], tell: Callable[[Sequence[int]], None]) -> None: ...

    def unlend(self, lease: int) -> None: ...


class _Lent:
    """lend.Store: prefix blocks of the device."""

    def __init__(self, blocks: Blocks, leases: Leases) -> None:
        self.num_layers = blocks.num_layers
        self.block_bytes = blocks.block_bytes
        self._blocks = blocks
        self._leases = leases

    def pin(self, lease: int, keys: Sequence[bytes], tell: Callable[[Sequence[int]], None]) -> None:
        self._leases.lend(lease, keys, tell)

    def unpin(self, lease: int) -> None:
        self._leases.unlend(lease)

    def take(self, block: int, first_layer: int, target: memoryview) -> bytes | None:
        self._blocks.take(block, first_layer, target)
        return None


class Peers:
    """Implements the Peers protocol of loop.py. Nothing is fetched or lent before `open`."""

    def __init__(
        self,
        blocks: Blocks,
        address: str,
        transports: Sequence[Transport] | None = None,
        *,
        max_bytes_per_s: int = 0,
    ) -> None:
        """`address`: where it lends, "tcp:host:port" or "unix:/path". Without `transports`: shared memory where it
        leads to the other engine, else TCP. `max_bytes_per_s`: lent, and fetched; 0 is as fast as it goes. Raises
        ValueError for an address that is none."""
        where = addresses.parse(address)
        host = where.host if isinstance(where, addresses.TcpAddress) else "127.0.0.1"
        self.fetched_blocks = self.fetched_bytes = 0  # bytes are counted as they come
        self.failed: Counter[str] = Counter()  # fetches that did not bring all, by reason
        self._blocks = blocks
        self._address = address
        self._transports: Sequence[Transport] = [Shm(), Tcp(host)] if transports is None else transports
        self._max_bytes_per_s = max_bytes_per_s
        self._counting = threading.Lock()
        self._fetcher: Fetcher
        self._lender: Lender | None = None

    @property
    def lent_bytes(self) -> int:
        return 0 if self._lender is None else self._lender.lent_bytes

    async def open(self, leases: Leases, *, name: str, incarnation: str, secret: bytes, info: EngineInfo) -> str:
        """The address at which it lends from here on. Raises ValueError (layers too large, secret), OSError (taken)."""
        self._fetcher = Fetcher(
            self._transports,
            name=name,
            incarnation=incarnation,
            secret=secret,
            hash_root=info.hash_root,
            num_layers=self._blocks.num_layers,
            block_bytes=self._blocks.block_bytes,
            max_bytes_per_s=self._max_bytes_per_s,
        )
        lender = Lender(_Lent(self._blocks, leases), self._transports, max_bytes_per_s=self._max_bytes_per_s)
        await lender.listen(self._address, secret=secret, incarnation=incarnation, info=info)
        self._lender = lender
        return lender.listener.address

    def fetch(self, fetch: Fetch, tell: Callable[[Brought], None]) -> None:
        """From any thread; `tell` is called on the event loop."""

        def place(index: int, first_layer: int, layers: memoryview) -> None:
            self._blocks.put(fetch.blocks[index], first_layer, layers)
            with self._counting:
                self.fetched_bytes += len(layers)

        def told(fetched: Fetched) -> None:
            self._count(fetched)
            tell(Brought(fetch.number, fetched.num_good, fetched.busy_ns))

        order = Order(number=fetch.number, address=fetch.address, incarnation=fetch.incarnation, keys=fetch.keys)
        self._fetcher.start(order, place, fetch.limit_ns / 1e9, told)

    def _count(self, fetched: Fetched) -> None:
        self.fetched_blocks += fetched.num_good
        if fetched.why:
            late = fetched.why == TOO_LATE
            self.failed["corrupt" if fetched.corrupt else "late" if late else "lost"] += 1

    async def close(self, limit_s: float) -> bool:
        """False: a thread is still in a copy from or to the device's blocks."""
        if self._lender is None:
            return True
        fetched = await self._fetcher.close(limit_s)
        lent = await self._lender.close(limit_s)
        for transport in self._transports:
            transport.close()
        return fetched and lent
