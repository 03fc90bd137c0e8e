"""Joins the host tier's memory with the disk tier's store: carries out what plans ask of the disk (KvOp with `disk`).

    copier's thread ─ start ─► DiskBlocks ─ an outcome for each block ─► tell(Copied), with the last one

A block leaves the host's memory only if its digest is that of what the device gave, and enters it with the digest that
was checked in the store, so what changes anywhere on the way is noticed. Whatever goes wrong is a bad block, and nobody
waits longer than the store's limit.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from shoal.core.plan import Copied, Held, KvOp
from shoal.engine.transfer.disk import DiskBlocks
from shoal.engine.transfer.diskjobs import Outcome

if TYPE_CHECKING:  # importing it loads torch, which an engine does later
    from shoal.engine.transfer.host import HostBlocks

BELIEVED_BYTES_PER_S = 200e6  # of reads, where they could not be measured
MEASURED_BYTES = 16 << 20
MEASURE_NS = 100_000_000  # longest time of writing for that, and of reading, but for the last block

log = logging.getLogger("shoal.engine")


class _Move:
    def __init__(self, op: KvOp, tell: Callable[[Copied | Exception], None]) -> None:
        self.op = op
        self.tell = tell
        self.began_ns = time.perf_counter_ns()
        self.due = set(range(len(op.disk)))  # places of which nobody has heard
        self.bad: list[int] = []


class Storage:
    def __init__(
        self,
        host: HostBlocks,
        folder: Path,
        *,
        root: bytes,
        block_tokens: int,
        capacity_bytes: int,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """ValueError as of DiskBlocks."""
        self._host = host
        self._folder = folder
        self._errors = Counter({"memory": 0, "raised": 0})
        self._dropped: dict[bytes, None] = {}  # keys, until the next move is done
        self._lock = threading.Lock()  # of moves and of these; the store's own, if any, is taken first
        self._store = DiskBlocks(
            folder,
            root=root,
            block_tokens=block_tokens,
            block_bytes=host.block_bytes,
            capacity_bytes=capacity_bytes,
            dropped=self._drop,
            now_ns=now_ns,
        )

    @property
    def num_blocks(self) -> int:
        return self._store.num_blocks

    @property
    def num_bytes(self) -> int:
        return self._store.num_bytes

    @property
    def off(self) -> bool:
        return self._store.off

    def held(self) -> list[Held]:
        """What can be read."""
        return self._store.held()

    @property
    def errors(self) -> Mapping[str, int]:
        """By reason, those of the store included."""
        return {**self._store.errors, **self._errors}

    def measure(self) -> float:
        """Bytes per second of reading blocks from the folder's disk, past the system's memory where that can be done.

        Their file has no name. Takes as long as two times MEASURE_NS and what it takes to flush MEASURED_BYTES at most.
        """
        block = bytearray(os.urandom(self._host.block_bytes))
        try:
            with TemporaryFile(buffering=0, dir=self._folder) as file:
                size = _spent(lambda: file.write(block))[0]
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_DONTNEED)
                file.seek(0)
                num_bytes, spent_ns = _spent(lambda: file.readinto(block))
                return num_bytes / spent_ns * 1e9
        except OSError as error:
            log.warning("kv.disk_not_measured", {"error": str(error)})
            return BELIEVED_BYTES_PER_S

    def start(self, op: KvOp, tell: Callable[[Copied | Exception], None]) -> None:
        """Returns when all is in line. `tell` is called on any thread and must return at once."""
        move = _Move(op, tell)
        for place, held in enumerate(op.disk):
            try:
                self._ask(move, place, held)
            except Exception as error:
                self._count("raised", error)
                self._heard(move, place, Outcome(held.key, "raised"))

    def close(self, limit_s: float) -> None:
        """Gives up what is not done. A call into the disk that hangs is left behind; it touches nothing here."""
        self._store.close(limit_s)

    def _ask(self, move: _Move, place: int, held: Held) -> None:
        block = move.op.host_blocks[place]

        def hear(outcome: Outcome) -> None:
            if not outcome.reason and not move.op.out:
                self._host.filled(block, outcome.digest)
            self._heard(move, place, outcome)

        if not move.op.out:
            self._store.read(held.key, self._host.block(block), hear)
        elif self._host.is_sound(block):
            self._store.write(held.key, held.tokens, held.parent, self._host.block(block), hear)
        else:
            self._count("memory", "a block of the host tier has changed; it is not written")
            self._heard(move, place, Outcome(held.key, "memory"))

    def _heard(self, move: _Move, place: int, outcome: Outcome) -> None:
        with self._lock:
            if place not in move.due:
                return  # the call raised after it had told
            move.due.remove(place)
            if outcome.reason:
                move.bad.append(place)
            if outcome.reason == "absent":
                self._dropped[outcome.key] = None
            elif not outcome.reason:
                self._dropped.pop(outcome.key, None)  # it was before this
            if move.due:
                return
            dropped, self._dropped = tuple(self._dropped), {}
        busy_ns = time.perf_counter_ns() - move.began_ns
        move.tell(Copied(move.op.number, busy_ns, tuple(sorted(move.bad)), dropped))

    def _drop(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._dropped.update(dict.fromkeys(keys))

    def _count(self, reason: str, error: object) -> None:
        self._errors[reason] += 1
        log.warning("kv.disk_error", {"reason": reason, "error": str(error)})


def _spent(call: Callable[[], int]) -> tuple[int, int]:
    """Again and again, until nothing comes of it, it is enough or late: how many bytes, and ns."""
    began_ns, num_bytes = time.perf_counter_ns(), 0
    while num_bytes < MEASURED_BYTES and (count := call()):
        num_bytes += count
        if time.perf_counter_ns() - began_ns > MEASURE_NS:
            break
    return num_bytes, time.perf_counter_ns() - began_ns
