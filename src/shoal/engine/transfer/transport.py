"""What all ways of moving bytes between engines have in common: one reads, from a window of memory that another lends.

    owner:  Memory ─► register ─► door (bytes, told to whoever may read) ... withdraw
    reader: open(door, a Memory of its own) ─► Reader: read, read, ... ─► poll, poll, ... ─► close

Nobody writes into memory that is not its own, so what comes late cannot land where it is not awaited. A reader copies
each range to the same offset of its own memory. All of this is called on threads beside the steps.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

PIECE_BYTES = 2 << 20  # most of one read, unless one layer of one block is larger
NUM_PLACES = 4  # pieces in a window: one is filled and one is read while others are on their way
WINDOW_BYTES = NUM_PLACES * PIECE_BYTES
POLL_S = 0.05  # most that one poll waits


def place_of(number: int) -> int:
    """Offset of a piece in the windows of both sides. Places are used in turn."""
    return number % NUM_PLACES * PIECE_BYTES


class TransportError(ConnectionError):
    """The other side is gone, cannot be reached this way, or answers nonsense: nothing more will come."""


class Memory:
    """Zeros in a file without a name: it ends with the last process that has it open, however that one ended."""

    def __init__(self, num_bytes: int = WINDOW_BYTES) -> None:
        self.fd = os.memfd_create("shoal-window", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, num_bytes)
            self.view = memoryview(mmap.mmap(self.fd, num_bytes))
        except BaseException:
            os.close(self.fd)
            raise
        self.num_bytes = num_bytes
        self.address: int = np.frombuffer(self.view, np.uint8).ctypes.data

    def close(self) -> None:
        """The mapping ends with the last view of it that somebody still holds."""
        os.close(self.fd)
        del self.view


class Reader(Protocol):
    """One side's way into another's memory. One thread polls; `read` may be called on another one beside it."""

    def read(self, offset: int, num_bytes: int) -> None:
        """Asks for a range; returns at once. Ranges come one after the other in the order they were asked for."""
        ...

    def poll(self) -> bool:
        """Whether the oldest range that was not reported yet is there; waits for POLL_S at most. Raises
        TransportError."""
        ...

    def close(self) -> bool:
        """Nothing lands in the reader's memory any more. False: something still may; let nobody else use it."""
        ...


class Transport(Protocol):
    name: str

    def register(self, memory: Memory) -> bytes:
        """Lets others read it. Returns the door to it: whoever has that may come in, until `withdraw`. Raises
        TransportError."""
        ...

    def withdraw(self, memory: Memory) -> None:
        """Whoever reads it is cut off, where that can be done."""
        ...

    def open(self, door: bytes, target: Memory, limit_s: float) -> Reader:
        """Raises TransportError: there is no way to this memory, or not within the limit."""
        ...

    def close(self) -> None: ...


class Pacer:
    """Spreads bytes over time, for any number of threads: what is moved is asked for here first."""

    def __init__(self, max_bytes_per_s: int = 0, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """`max_bytes_per_s`: 0 is as fast as it goes."""
        self._max_bytes_per_s = max_bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._free_ns = 0  # when all that was asked for so far has had its time

    def delay_s(self, num_bytes: int) -> float:
        """How long to wait before these bytes are moved."""
        if not self._max_bytes_per_s:
            return 0.0
        with self._lock:
            now_ns = self._clock()
            start_ns = max(now_ns, self._free_ns)
            self._free_ns = start_ns + num_bytes * 1_000_000_000 // self._max_bytes_per_s
        return (start_ns - now_ns) / 1e9
