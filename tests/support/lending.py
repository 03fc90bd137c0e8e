"""Engines that lend and fetch blocks, without models: blocks whose bytes follow from their keys.

As a program it is an owner: `python -m tests.support.lending ADDRESS TRANSPORT` lends every block that is asked for.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from shoal.engine.transfer.fetch import Fetched, Fetcher, Order
from shoal.engine.transfer.lend import Lender
from shoal.engine.transfer.nixl import Nixl
from shoal.engine.transfer.shm import Shm
from shoal.engine.transfer.tcp import Tcp
from shoal.engine.transfer.transport import Transport
from shoal.wire.messages import EngineInfo
from tests.support.wires import SECRET

NUM_LAYERS = 6
LAYER_BYTES = 61_440
BLOCK_BYTES = NUM_LAYERS * LAYER_BYTES
ROOT = b"root of the keys"
OWNER = "incarnation of the owner"
INFO = EngineInfo(model="m", model_digest="d", hash_root=ROOT, hash_block_tokens=16, max_model_len=1024, vocab_size=269)
LIMIT_S = 10.0


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


@lru_cache(128)
def block_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


class FakeStore:
    """Holds blocks 0 to `num_held` - 1; block n has key n. With a gate, each take waits for a permit."""

    num_layers = NUM_LAYERS
    block_bytes = BLOCK_BYTES

    def __init__(self, num_held: int = 1 << 30, *, gated: bool = False) -> None:
        self.num_held = num_held
        self.pins: dict[int, Callable[[Sequence[int]], None]] = {}
        self.num_pins = 0
        self.answers = True  # whether `pin` tells at once
        self.taken: list[tuple[int, int]] = []
        self.known: dict[int, bytes] = {}  # digests from before
        self.fails = False
        self.permits = threading.Semaphore(0)
        self.gated = gated

    def pin(self, lease: int, keys: Sequence[bytes], tell: Callable[[Sequence[int]], None]) -> None:
        assert lease not in self.pins
        self.pins[lease] = tell
        self.num_pins += 1
        numbers = [int.from_bytes(key, "big") for key in keys]
        held = [number for number in numbers if number < self.num_held]
        if self.answers:
            tell(held[: next((place for place, n in enumerate(numbers) if n >= self.num_held), len(numbers))])

    def unpin(self, lease: int) -> None:
        del self.pins[lease]

    def take(self, block: int, first_layer: int, target: memoryview) -> bytes | None:
        assert not self.gated or self.permits.acquire(timeout=LIMIT_S)
        if self.fails:
            raise OSError("the memory is gone")
        self.taken.append((block, first_layer))
        start = first_layer * LAYER_BYTES
        target[:] = block_of(block)[start : start + len(target)].data
        return self.known.get(block)


class Destination:
    """Where fetched blocks go, and what was told in the end."""

    def __init__(self, num_blocks: int, *, gated: bool = False) -> None:
        self.bytes_bX = np.zeros((num_blocks, BLOCK_BYTES), np.uint8)
        self.placed: list[tuple[int, int]] = []
        self.outcome: Fetched | None = None
        self.told = asyncio.Event()
        self.gate = threading.Event()
        if not gated:
            self.gate.set()

    def place(self, index: int, first_layer: int, layers: memoryview) -> None:
        assert self.outcome is None, "placed after the end"
        assert self.gate.wait(LIMIT_S)
        self.placed.append((index, first_layer))
        start = first_layer * LAYER_BYTES
        self.bytes_bX[index, start : start + len(layers)] = np.frombuffer(layers, np.uint8)

    def tell(self, outcome: Fetched) -> None:
        assert self.outcome is None, "told twice"
        self.outcome = outcome
        self.told.set()

    async def end(self) -> Fetched:
        async with asyncio.timeout(LIMIT_S):
            await self.told.wait()
        assert self.outcome is not None
        return self.outcome

    def check(self, numbers: Sequence[int]) -> None:
        """What is said to be good is, and nothing that was placed is wrong."""
        assert self.outcome is not None
        good = {index for index, _ in self.placed} | set(range(self.outcome.num_good))
        for index in good:
            written = np.flatnonzero(self.bytes_bX[index])
            whole = index < self.outcome.num_good
            upto = BLOCK_BYTES if whole else (0 if not len(written) else int(written[-1]) + 1)
            assert np.array_equal(self.bytes_bX[index, :upto], block_of(numbers[index])[:upto]), f"block {index}"


@asynccontextmanager
async def lending(
    store: FakeStore, transports: Sequence[Transport] | None = None, **settings: Any
) -> AsyncIterator[Lender]:
    ours = [Shm(), Tcp()] if transports is None else transports
    lender = Lender(store, ours, **settings)
    await lender.listen("tcp:127.0.0.1:0", secret=SECRET, incarnation=OWNER, info=INFO)
    try:
        yield lender
    finally:
        assert await lender.close(LIMIT_S)
        for transport in ours if transports is None else ():
            transport.close()
    assert not store.pins, "blocks stay pinned"


@asynccontextmanager
async def fetching(transports: Sequence[Transport] | None = None, **settings: Any) -> AsyncIterator[Fetcher]:
    ours = [Shm(), Tcp()] if transports is None else transports
    fetcher = Fetcher(
        ours,
        **{
            "name": "borrower",
            "incarnation": "of the borrower",
            "secret": SECRET,
            "hash_root": ROOT,
            "num_layers": NUM_LAYERS,
            "block_bytes": BLOCK_BYTES,
            **settings,
        },
    )
    try:
        yield fetcher
    finally:
        assert await fetcher.close(LIMIT_S)
        for transport in ours if transports is None else ():
            transport.close()


def order(address: str, numbers: Sequence[int] = (), **fields: Any) -> Order:
    keys = tuple(key_of(number) for number in numbers)
    return Order(**{"number": 7, "address": address, "incarnation": OWNER, "keys": keys, **fields})


async def fetch(
    fetcher: Fetcher, lender: Lender, numbers: Sequence[int], limit_s: float = LIMIT_S, **fields: Any
) -> tuple[Fetched, Destination]:
    """One fetch to its end; what came is right."""
    destination = Destination(len(numbers))
    wanted = order(lender.listener.address, numbers, **fields)
    fetcher.start(wanted, destination.place, limit_s, destination.tell)
    outcome = await destination.end()
    destination.check(numbers)
    assert outcome.number == 7
    return outcome, destination


async def _own(address: str, transport: str) -> None:
    made: dict[str, Callable[[], Transport]] = {"shm": Shm, "tcp": Tcp, "nixl": lambda: Nixl("owner")}
    lender = Lender(FakeStore(), [made[transport]()])
    await lender.listen(address, secret=SECRET, incarnation=OWNER, info=INFO)
    print(f"lends at {lender.listener.address}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_own(*sys.argv[1:]))
