"""Carries out the copies of plans (KvOp) on one thread beside the steps, one after the other in their order.
Those with the disk are handed on to it (storage.py), and done whenever they are.

A copy goes in pieces, each one call that holds no lock of Python's and keeps one core busy at most; where a rate is
given, the thread sleeps between pieces, so that computing is not short of memory bandwidth.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from shoal.core.plan import Copied, KvOp

PIECE_BYTES = 4 << 20  # most of one call, unless one block alone is larger
MEASURED_BYTES = 16 << 20
MEASURE_NS = 100_000_000  # longest time of each direction, but for its last block

Tell = Callable[[Copied | Exception], None]


class Host(Protocol):
    """transfer.host.HostBlocks"""

    num_blocks: int
    num_device_blocks: int
    block_bytes: int

    def copy(self, *, out: bool, device_block: int, host_block: int, count: int) -> list[int]: ...


class Disk(Protocol):
    """transfer.storage.Storage"""

    def start(self, op: KvOp, tell: Tell) -> None: ...

    def close(self, limit_s: float) -> None: ...


class Copier:
    """Implements the Copier protocol of loop.py. Its thread begins with the first copy and ends with `close`."""

    def __init__(self, host: Host, *, max_bytes_per_s: int = 0, disk: Disk | None = None) -> None:
        """`max_bytes_per_s`: 0 is as fast as it goes."""
        self._host = host
        self._disk = disk
        self._max_bytes_per_s = max_bytes_per_s
        self._ops: queue.SimpleQueue[tuple[KvOp, Tell] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, op: KvOp, tell: Tell) -> None:
        """In the end `tell` gets the copy that is done, or why none will be done any more, on the copier's thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="copies", daemon=True)
            self._thread.start()
        self._ops.put((op, tell))

    def close(self, limit_s: float) -> bool:
        """Gives up what is not done. False: the piece under way did not end within the limit."""
        end_s = time.monotonic() + limit_s
        self._closing.set()
        self._ops.put(None)
        if self._thread is not None:
            self._thread.join(limit_s)
        if self._disk is not None:
            self._disk.close(max(0.0, end_s - time.monotonic()))
        return self._thread is None or not self._thread.is_alive()

    def measure(self) -> float:
        """Bytes per second of copies such as plans ask for. Leaves the device's blocks as they are.

        Before the first copy, with no step in flight.
        """
        host = self._host
        count = min(host.num_blocks, host.num_device_blocks, max(1, MEASURED_BYTES // host.block_bytes))
        host.copy(out=True, device_block=0, host_block=0, count=count)  # the first touch of a page takes longer
        num_blocks = spent_ns = 0
        for out in (True, False):
            began_ns = time.perf_counter_ns()
            for block in range(count):
                spent_ns += self._copy(KvOp(0, "", out, (block,), (block,)))[0]
                num_blocks += 1
                if time.perf_counter_ns() - began_ns > MEASURE_NS:
                    break
        return num_blocks * host.block_bytes / spent_ns * 1e9

    def _run(self) -> None:
        while (asked := self._ops.get()) is not None:
            op, tell = asked
            if op.disk:
                assert self._disk is not None, "a disk was planned with, but there is none"
                self._disk.start(op, tell)
                continue
            try:
                busy_ns, bad = self._copy(op)
            except Exception as error:
                tell(error)
                return
            if self._closing.is_set():
                return
            tell(Copied(op.number, busy_ns, bad))

    def _copy(self, op: KvOp) -> tuple[int, tuple[int, ...]]:
        """How long it took, in ns, with the pauses between its pieces; which blocks came back with another content."""
        began_ns = time.perf_counter_ns()
        num_done, bad = 0, []
        for device_block, host_block, count in pieces(op, max(1, PIECE_BYTES // self._host.block_bytes)):
            if self._closing.is_set():
                break
            found = self._host.copy(out=op.out, device_block=device_block, host_block=host_block, count=count)
            bad += [num_done + place for place in found]
            num_done += count
            if self._max_bytes_per_s:
                due_s = num_done * self._host.block_bytes / self._max_bytes_per_s
                self._closing.wait(max(0.0, due_s - (time.perf_counter_ns() - began_ns) / 1e9))
        return time.perf_counter_ns() - began_ns, tuple(bad)


def pieces(op: KvOp, most: int) -> Iterator[tuple[int, int, int]]:
    """First block on the device, first block on the host and how many lie side by side here and there, up to `most`."""
    pairs = list(zip(op.device_blocks, op.host_blocks, strict=True))
    first = 0
    for place in range(1, len(pairs) + 1):
        device_block, host_block = pairs[first]
        count = place - first
        if place == len(pairs) or count == most or pairs[place] != (device_block + count, host_block + count):
            yield device_block, host_block, count
            first = place
