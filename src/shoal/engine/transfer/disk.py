"""The disk tier: keeps KV blocks by their prefix keys, in one file of bounded size, and finds them after a restart.

    write(), read(), forget() ──► diskstate.py ──► two threads ──► diskfile.py: what the bytes mean
                                  diskjobs.py: in line  │
                                  diskindex.py: held    └──► tell(Outcome)

A caller never waits: what cannot be queued is refused, and what takes longer than a limit is given up. Bytes go through
a buffer of the thread's own, and the caller's is touched only for one copy in memory, if the outcome is still awaited
then: a call into the disk that comes back late finds nothing of the caller's to write to.

No error leaves this file. Whatever goes wrong is an outcome with a reason, which means: compute it again.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal.core.kv.hashing import KEY_BYTES
from shoal.engine.transfer.digest import Block, digest
from shoal.engine.transfer.diskfile import BlockFile, Damaged, Layout
from shoal.engine.transfer.diskindex import DiskIndex, Entry, Held
from shoal.engine.transfer.diskjobs import Job, Outcome, Phase, Tell
from shoal.engine.transfer.diskstate import DiskState, reason_of

NUM_THREADS = 2
MOST_READS = 256  # in line
MOST_WRITES = 64
LIMIT_NS = 1_000_000_000  # of a read or a write, from the call on


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
        self._folder = folder
        self._write_bytes_per_s = write_bytes_per_s
        self._now_ns = now_ns
        self._state = DiskState(self._layout.num_slots, limit_ns, dropped, now_ns)
        self._lock = threading.Lock()  # of the state
        self._work = threading.Condition(self._lock)  # for the threads
        self._limits = threading.Condition(self._lock)  # for the thread that gives up what is late
        self._watching = False  # until some time, or it will look again anyway
        self._closing = threading.Event()
        self._file: BlockFile | None = None
        try:
            self._file = self._load()
        except (OSError, Damaged) as error:
            self._state.failed_to_open(error)
        self._threads = [threading.Thread(target=self._run, name="disk", daemon=True) for _ in range(NUM_THREADS)]
        self._threads.append(threading.Thread(target=self._watch, name="disk limits", daemon=True))
        for thread in self._threads:
            thread.start()

    # -- for the caller --------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return len(self._state.index)

    @property
    def num_bytes(self) -> int:
        """Of the blocks that can be read. The file may be larger, up to the capacity."""
        return len(self._state.index) * self._layout.slot_bytes

    @property
    def errors(self) -> Mapping[str, int]:
        """How many there were, by reason: all of diskstate.ERRORS."""
        return self._state.errors

    @property
    def off(self) -> bool:
        """The breaker is open: nothing is read or written."""
        return self._state.off

    @property
    def num_openings(self) -> int:
        """How often the breaker opened."""
        return self._state.breaker.num_openings

    def held(self) -> list[Held]:
        """What can be read, the least recently used first. Read from the file, since nobody else needs token ids."""
        with self._lock:
            if self._file is None:
                return []
            try:
                written = {entry.slot: entry.held for entry in self._file.entries()[0]}
            except (OSError, Damaged) as error:
                self._state.count(reason_of(error), error)
                return []
            entries = [each for each in self._state.index if each.slot in written]
            entries.sort(key=lambda entry: entry.use)
            return [written[each.slot] for each in entries if written[each.slot].key == each.held.key]

    def write(self, key: bytes, tokens: tuple[int, ...], parent: bytes, buffer: Block, tell: Tell) -> None:
        """Keeps the block in `buffer`, which must not change before the outcome."""
        data = self._view(buffer)
        assert len(tokens) == self._layout.block_tokens and len(key) == len(parent) == KEY_BYTES
        with self._lock:
            index, jobs = self._state.index, self._state.jobs
            entry = index.get(key)
            if entry is not None:
                index.touch(entry)
                tell(Outcome(key, ""))
            elif not self._on():
                tell(Outcome(key, "off"))
            elif jobs.write_of(key) or jobs.num_queued_writes >= MOST_WRITES:
                tell(Outcome(key, "busy"))
            else:
                self._put(Job("write", Entry(Held(key, parent, tokens), b"", -1, 0), tell, data))

    def read(self, key: bytes, buffer: Block, tell: Tell) -> None:
        """Into `buffer`: the block, once the outcome says so; with any other outcome it is as it was, and stays so."""
        data = self._view(buffer)
        assert data.flags.writeable
        with self._lock:
            entry = self._state.index.get(key)
            if entry is None:
                tell(Outcome(key, "absent"))
            elif not self._on():
                tell(Outcome(key, "off"))
            elif self._state.jobs.num_queued_reads >= MOST_READS:
                tell(Outcome(key, "busy"))
            else:
                self._state.index.touch(entry)
                self._put(Job("read", entry, tell, data))

    def forget(self, keys: Iterable[bytes], tell: Tell) -> None:
        """Nobody finds these blocks from now on, and the outcome says that their bytes are overwritten.

        One that is not held is done at once. Tried whatever the breaker says, and by `close` before it ends.
        """
        with self._lock:
            for key in keys:
                if self._file is None:  # what an earlier run left may be there, out of reach
                    tell(Outcome(key, "off"))
                else:
                    self._state.forget(key, tell)
            self._work.notify_all()

    def expire(self) -> None:
        """Gives up what is late by now. A thread of the store's own calls it in time."""
        with self._lock:
            self._state.expire()

    def close(self, limit_s: float) -> bool:
        """Gives up what is not done, but for what is to be forgotten. False: a call into the disk did not return."""
        end_s = time.monotonic() + limit_s
        with self._lock:
            self._closing.set()
            self._state.jobs.hush()
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

    def _on(self) -> bool:
        on = self._state.on()
        if self._state.reopening:
            self._limits.notify()
        return on

    def _put(self, job: Job) -> None:
        self._state.put(job)
        self._work.notify()
        if not self._watching:
            self._watching = True
            self._limits.notify()

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
                self._state.finish(job, error, busy_ns)
            if job.kind == "write" and self._write_bytes_per_s:
                self._closing.wait(max(0.0, len(own) / self._write_bytes_per_s - busy_ns / 1e9))
            with self._lock:
                self._state.jobs.ended(job)
                if self._state.reopening:  # which waits until nobody has a job
                    self._limits.notify()

    def _take(self) -> Job | None:
        """Waits for the next job. None: it is time to end."""
        with self._lock:
            while True:
                closing = self._closing.is_set()
                job = self._state.take(closing=closing)
                if job is not None:
                    return job
                if closing and not self._state.reopening:
                    return None
                self._work.wait()

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
        else:
            file.clear(entry.slot)
            if self._borrow(job):
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
            with self._lock:
                self._state.expire()
                due_ns = self._state.jobs.due_ns
                self._watching = due_ns is not None
                alone = self._state.reopening and not self._state.jobs.num_begun
                if not (alone or self._closing.is_set()):
                    self._limits.wait(None if due_ns is None else max(0.001, (due_ns - self._now_ns()) / 1e9))
                if self._closing.is_set():
                    self._state.reopening = False
                    self._work.notify_all()
                    return
            if alone:
                self._reopen()

    def _reopen(self) -> None:
        """Nobody else touches the file meanwhile."""
        error: Exception | None = None
        try:
            if self._file is None or self._state.distrusted or self._file.removed():
                self._start_over()
        except Exception as raised:
            error = raised
        with self._lock:
            self._state.reopened(error)
            self._work.notify_all()

    def _load(self) -> BlockFile:
        """What an earlier run left is found again."""
        file = BlockFile(self._folder, self._layout)
        try:
            entries, damaged = file.entries()
            index = DiskIndex(self._layout.num_slots)
            unused = index.load(entries)
            for slot in (*damaged, *unused):
                file.clear(slot)
        except BaseException:
            file.close()
            raise
        self._state.index = index
        if file.foreign:
            self._state.count("foreign", "a file of another model or layout, or no file; it is replaced")
        for reason, number in Counter(damaged.values()).items():
            self._state.count(reason, "blocks of an earlier run", number)
        return file

    def _start_over(self) -> None:
        """With a new, empty file."""
        with self._lock:
            self._state.start_over()
            old, self._file = self._file, None
        if old is not None:
            old.close()
        try:
            new = BlockFile(self._folder, self._layout, fresh=True)
        except BaseException:
            with self._lock:
                self._state.jobs.tell_erases("io")
            raise
        with self._lock:
            self._state.jobs.tell_erases("")
            self._file = new
