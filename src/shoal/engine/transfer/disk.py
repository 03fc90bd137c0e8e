"""The disk tier: keeps KV blocks by their prefix keys, in one file of bounded size, and finds them after a restart.

    write(), read(), forget() ──► diskjobs.py ──► two threads ──► diskfile.py
             │                    in line            │            what the bytes mean
             └─ diskindex.py: what is where          └──► tell(Outcome)

A caller never waits: what cannot be queued is refused, and what takes longer than a limit is given up. Bytes go through
a buffer of the thread's own, and the caller's is touched only for one copy in memory, if the outcome is still awaited
then: a call into the disk that comes back late finds nothing of the caller's to write to.

No error leaves this file. Whatever goes wrong is an outcome with a reason, which means: compute it again.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal.engine.transfer.breaker import RETRY_NS, Breaker, State
from shoal.engine.transfer.digest import Block, digest
from shoal.engine.transfer.diskfile import BlockFile, Damaged, Layout
from shoal.engine.transfer.diskindex import DiskIndex, Entry, Held
from shoal.engine.transfer.diskjobs import Job, Jobs, Outcome, Phase, Tell

log = logging.getLogger(__name__)

NUM_THREADS = 2
MOST_READS = 256  # in line
MOST_WRITES = 64
LIMIT_NS = 1_000_000_000  # of a read or a write, from the call on

ERRORS = ("missing", "cut", "corrupt", "foreign", "full", "slow", "io")
_DISTRUST = {"missing", "cut", "corrupt", "foreign"}  # errors of what the file holds, not of the disk under it


class DiskBlocks:
    """`dropped` gets keys that cannot be read any more, each after the outcome that said it was written (or after the
    start, if it was there) and before any later outcome of that key. It and every `tell` are called under the store's
    lock, perhaps before the call that asked returns: they must not call the store, nor block. Every call gets one
    outcome for each key, until `close`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        root: bytes,
        block_tokens: int,
        block_bytes: int,
        capacity_bytes: int,
        dropped: Callable[[Sequence[bytes]], None],
        limit_ns: int = LIMIT_NS,
        write_bytes_per_s: int = 0,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`write_bytes_per_s`: most of a second; 0 is as fast as it goes.

        ValueError: `capacity_bytes` holds no block, the folder is not ours alone, or another engine uses it.
        """
        self._layout = Layout.within(capacity_bytes, root, block_tokens, block_bytes)
        self.capacity_bytes = capacity_bytes
        self.errors: Counter[str] = Counter(dict.fromkeys(ERRORS, 0))
        self._folder = folder
        self._dropped = dropped
        self._limit_ns = limit_ns
        self._write_bytes_per_s = write_bytes_per_s
        self._now_ns = now_ns
        self._index = DiskIndex(self._layout.num_slots)
        self._jobs = Jobs(limit_ns)
        self._breaker = Breaker()
        self._distrusted = False  # by what opened the breaker: the next file is a new one
        self._reopening = False
        self._grows_ns: int | None = None  # when the disk may have room for more
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # for the threads
        self._limits = threading.Condition(self._lock)  # for the thread that gives up what is late
        self._watching = False  # it has something to wait for
        self._closing = threading.Event()
        self._file: BlockFile | None = None
        try:
            self._file = self._load()
        except (OSError, Damaged) as error:
            self._count(_reason(error), error)
            self._breaker.open(now_ns())
        self._threads = [threading.Thread(target=self._run, name="disk", daemon=True) for _ in range(NUM_THREADS)]
        self._threads.append(threading.Thread(target=self._watch, name="disk limits", daemon=True))
        for thread in self._threads:
            thread.start()

    # -- for the caller --------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        """Of the blocks that can be read. The file may be larger, up to the capacity."""
        return len(self._index) * self._layout.slot_bytes

    @property
    def off(self) -> bool:
        """The breaker is open: nothing is read or written."""
        return self._breaker.state is State.OPEN

    @property
    def num_openings(self) -> int:
        """How often the breaker opened."""
        return self._breaker.num_openings

    def held(self) -> list[Held]:
        """What can be read, the least recently used first."""
        with self._lock:
            return [entry.held for entry in sorted(self._index, key=lambda entry: entry.use)]

    def write(self, key: bytes, tokens: tuple[int, ...], parent: bytes, buffer: Block, tell: Tell) -> None:
        """Keeps the block in `buffer`, which must not change before the outcome."""
        data = self._view(buffer)
        assert len(tokens) == self._layout.block_tokens
        with self._lock:
            now_ns = self._now_ns()
            entry = self._index.get(key)
            if entry is not None:
                self._index.touch(entry)
                tell(Outcome(key, ""))
            elif not self._on(now_ns):
                tell(Outcome(key, "off"))
            elif self._jobs.write_of(key) or self._jobs.num_queued_writes >= MOST_WRITES:
                tell(Outcome(key, "busy"))
            else:
                self._put(Job("write", Entry(Held(key, parent, tokens), b"", -1, 0), tell, data), now_ns)

    def read(self, key: bytes, buffer: Block, tell: Tell) -> None:
        """Into `buffer`: the block, once the outcome says so; with any other outcome it is as it was, and stays so."""
        data = self._view(buffer)
        assert data.flags.writeable
        with self._lock:
            now_ns = self._now_ns()
            entry = self._index.get(key)
            if entry is None:
                tell(Outcome(key, "absent"))
            elif not self._on(now_ns):
                tell(Outcome(key, "off"))
            elif self._jobs.num_queued_reads >= MOST_READS:
                tell(Outcome(key, "busy"))
            else:
                self._index.touch(entry)
                self._put(Job("read", entry, tell, data), now_ns)

    def forget(self, keys: Iterable[bytes], tell: Tell) -> None:
        """Nobody finds these blocks from now on, and the outcome says that their bytes are overwritten.

        One that is not held is done at once. Tried whatever the breaker says, and by `close` before it ends.
        """
        with self._lock:
            for key in keys:
                entry, write = self._index.get(key), self._jobs.write_of(key)
                if self._file is None:  # what an earlier run left may be there, out of reach
                    tell(Outcome(key, "off"))
                elif entry is not None:
                    self._drop(entry, tell)
                elif write is not None and write.phase is not Phase.QUEUED:
                    if write.phase is not Phase.TOLD:
                        self._jobs.tell(write, "forgotten")
                    write.erased = tell
                else:
                    if write is not None:
                        self._jobs.tell(write, "forgotten")
                    tell(Outcome(key, ""))

    def expire(self) -> None:
        """Gives up what is late by now. A thread of the store's own calls it in time."""
        with self._lock:
            for job in self._jobs.late(self._now_ns()):
                if job.phase is Phase.QUEUED:  # what held it up is late itself, and counted
                    self._jobs.tell(job, "busy")
                elif job.phase is Phase.BEGUN:  # else told meanwhile, by the breaker that the one before it opened
                    self._jobs.tell(job, "slow")
                    self._failed("slow", f"a {job.kind} took longer than {self._limit_ns / 1e9:g} s")

    def close(self, limit_s: float) -> bool:
        """Gives up what is not done, but for what is to be forgotten. False: a call into the disk did not return."""
        end_s = time.monotonic() + limit_s
        with self._lock:
            self._closing.set()
            self._jobs.hush()
            self._work.notify_all()
            self._limits.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        if self._file is not None:
            self._file.close()
            self._file = None
        return True

    def _view(self, buffer: Block) -> NDArray[np.uint8]:
        data = np.frombuffer(buffer, np.uint8)
        assert len(data) == self._layout.block_bytes, f"{len(data)} bytes are no block"
        return data

    # -- under the lock --------------------------------------------------------------------------------------------

    def _on(self, now_ns: int) -> bool:
        """And has another try made where it is time for one."""
        if self._breaker.due(now_ns) and not self._reopening:
            self._reopening = True
            self._limits.notify()
        if self._grows_ns is not None and now_ns >= self._grows_ns:
            self._grows_ns = None
            self._index.grow()
        return not self.off

    def _put(self, job: Job, now_ns: int) -> None:
        self._jobs.put(job, now_ns)
        self._work.notify()
        if not self._watching:
            self._watching = True
            self._limits.notify()

    def _drop(self, entry: Entry, tell: Tell | None) -> None:
        self._index.remove(entry)
        self._dropped((entry.held.key,))
        self._put(Job("erase", entry, tell), self._now_ns())

    def _failed(self, reason: str, error: object) -> None:
        """Counts, also against the breaker."""
        self._count(reason, error)
        opens = self._breaker.error(self._now_ns())
        if reason == "missing" and not self.off:  # and it stays so, until there is a new file
            self._breaker.open(self._now_ns())
            opens = True
        if opens:
            self._distrusted = reason in _DISTRUST
            self._jobs.tell_queued("off")
            log.warning("the disk tier is off for %d s", RETRY_NS // 1_000_000_000)

    def _count(self, reason: str, error: object) -> None:
        self.errors[reason] += 1
        log.warning("disk tier in %s: %s (%s)", self._folder, reason, error)

    def _finish(self, job: Job, error: Exception | None, busy_ns: int) -> None:
        reason = "" if error is None else _reason(error)
        if job.kind == "read":
            reason = self._finish_read(job, reason, error)
        elif job.kind == "write":
            self._finish_write(job, reason, error)
        else:
            self._index.release(job.entry.slot)
            if reason and job.tell is not None:
                self._failed(reason, error)
        if job.phase is not Phase.TOLD:
            if not reason:
                self._breaker.success()
            self._jobs.tell(job, reason, busy_ns)

    def _finish_read(self, job: Job, reason: str, error: Exception | None) -> str:
        """Why there is nothing to read. A damaged block goes; where it went meanwhile, its slot may hold another."""
        if not reason or not job.entry.live:
            return reason and "absent"
        self._failed(reason, error)
        self._drop(job.entry, None)
        return reason

    def _finish_write(self, job: Job, reason: str, error: Exception | None) -> None:
        entry = job.entry
        if reason == "full" and self._index.refuse(entry.slot):
            self._count(reason, error)
            self._grows_ns = self._now_ns() + RETRY_NS
        elif reason:
            if reason != "full":  # else the index has taken it back
                self._index.release(entry.slot)
            self._failed(reason, error)
        elif job.phase is Phase.TOLD:  # too late, or forgotten
            self._put(Job("erase", entry, job.erased), self._now_ns())
            return
        else:
            self._index.add(entry)
        if job.erased is not None:
            job.erased(Outcome(job.key, reason))

    # -- threads ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        own = np.zeros(self._layout.block_bytes, np.uint8)
        while (job := self._take()) is not None:
            began_ns = time.perf_counter_ns()
            error = None
            try:
                self._carry_out(job, own)
            except Exception as raised:
                error = raised
            busy_ns = time.perf_counter_ns() - began_ns
            with self._lock:
                self._finish(job, error, busy_ns)
            if job.kind == "write" and self._write_bytes_per_s:
                self._closing.wait(max(0.0, len(own) / self._write_bytes_per_s - busy_ns / 1e9))
            with self._lock:
                self._jobs.ended(job)
                if self._reopening:
                    self._limits.notify()

    def _take(self) -> Job | None:
        """Waits for the next job. None: it is time to end."""
        with self._lock:
            while True:
                closing = self._closing.is_set()
                job = None if self._reopening else self._jobs.take(closing=closing)
                if job is None and closing and not self._reopening:
                    return None
                if job is None:
                    self._work.wait()
                elif job.kind != "write" or self._place(job):
                    return job

    def _place(self, job: Job) -> bool:
        """Finds a slot for what is to be written. False: none can be had."""
        entry = job.entry
        parent = self._index.get(entry.held.parent)
        if parent is not None:
            self._index.touch(parent)  # of no use without it
        taken = self._index.take_slot()
        if taken is None:
            self._jobs.tell(job, "full")
            self._jobs.ended(job)
            return False
        entry.slot, victim = taken
        entry.use = self._index.new_use()
        if victim is not None:
            self._dropped((victim.held.key,))
        return True

    def _carry_out(self, job: Job, own: NDArray[np.uint8]) -> None:
        """`own`: room for a block, the thread's own."""
        file, entry = self._file, job.entry
        assert file is not None
        if job.kind == "erase":
            file.erase(entry.slot)
        elif job.kind == "read":
            file.read(entry.slot, own)
            if digest(own) != entry.digest:
                raise Damaged("corrupt")
            if self._borrow(job):
                np.copyto(job.data, own)
        elif self._borrow(job):
            np.copyto(own, job.data)
            with self._lock:
                job.phase = Phase.BEGUN
            entry.digest = digest(own)
            file.write(entry, own)

    def _borrow(self, job: Job) -> bool:
        """The caller's buffer is ours for a copy, which nobody waits for longer than that takes. False: given up."""
        with self._lock:
            if job.phase is Phase.TOLD or self._closing.is_set():
                return False
            job.phase = Phase.COPYING
            return True

    def _watch(self) -> None:
        """Gives up what is late, and has another try after the breaker was open."""
        while True:
            self.expire()
            with self._lock:
                due_ns = self._jobs.due_ns
                self._watching = due_ns is not None
                alone = self._reopening and not self._jobs.num_begun
                if not (alone or self._closing.is_set()):
                    self._limits.wait(None if due_ns is None else max(0.001, (due_ns - self._now_ns()) / 1e9))
                if self._closing.is_set():
                    self._reopening = False
                    self._work.notify_all()
                    return
            if alone:
                self._reopen()

    def _reopen(self) -> None:
        """Nobody else touches the file meanwhile."""
        error: Exception | None = None
        try:
            if self._file is None or self._distrusted or self._file.removed():
                self._start_over()
        except Exception as raised:
            error = raised
        with self._lock:
            if error is None:
                self._distrusted = False
                self._breaker.retry()
            else:
                self._count(_reason(error), error)
                self._breaker.open(self._now_ns())
            self._reopening = False
            self._work.notify_all()

    def _load(self) -> BlockFile:
        """What an earlier run left is found again."""
        file = BlockFile(self._folder, self._layout)
        try:
            entries, damaged = file.entries()
            unused = self._index.load(entries)
            for slot in (*damaged, *unused):
                file.clear(slot)
        except BaseException:
            self._index = DiskIndex(self._layout.num_slots)
            file.close()
            raise
        if file.foreign:
            self._count("foreign", "of another model or layout, or no file; a new one is begun")
        for reason, count in Counter(damaged.values()).items():
            self.errors[reason] += count
            log.warning("disk tier in %s: %d blocks of an earlier run are %s", self._folder, count, reason)
        return file

    def _start_over(self) -> None:
        """With a new, empty file."""
        with self._lock:
            keys = [entry.held.key for entry in self._index]
            for entry in self._index:
                entry.live = False
            self._index = DiskIndex(self._layout.num_slots)
            self._grows_ns = None
            if keys:
                self._dropped(keys)
            old, self._file = self._file, None
        if old is not None:
            old.close()
        try:
            new = BlockFile(self._folder, self._layout, fresh=True)
        except BaseException:
            with self._lock:
                self._jobs.tell_queued("io", erases=True)
            raise
        with self._lock:
            self._jobs.tell_queued("", erases=True)
            self._file = new


def _reason(error: Exception) -> str:
    if isinstance(error, Damaged):
        return error.reason
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "full"
    return "io"
