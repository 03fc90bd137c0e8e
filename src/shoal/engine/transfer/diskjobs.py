"""What the disk tier has been asked to do and has not done yet: its order, and until when an outcome is awaited."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.engine.transfer.diskindex import Entry

Kind = Literal["read", "write", "erase"]

_NOTHING = np.empty(0, np.uint8)


class Outcome(NamedTuple):
    key: bytes
    reason: str  # "": done; one of diskstate.ERRORS; or not tried: absent, busy (no room in line), off, forgotten
    busy_ns: int = 0  # what it took, without waiting in line
    digest: bytes = b""  # of a block that was read


Tell = Callable[[Outcome], None]


class Phase(Enum):
    QUEUED = "queued"  # → BEGUN, or TOLD: given up in line
    BEGUN = "begun"  # a thread has it → COPYING, or TOLD: given up, while the thread is still busy with it
    COPYING = "copying"  # from or to the caller's buffer: nobody gives it up now → BEGUN, TOLD
    TOLD = "told"


class Job:
    def __init__(self, kind: Kind, entry: Entry, tell: Tell | None, data: NDArray[np.uint8] = _NOTHING) -> None:
        self.kind = kind
        self.entry = entry  # of a write: as it will be; of an erase: as it was
        self.tell = tell
        self.data = data  # the caller's buffer; let go of once told
        self.phase = Phase.QUEUED
        self.due_ns = 0
        self.erased: list[Tell] = []  # its key was forgotten while it was written: whom to tell when it is gone

    @property
    def key(self) -> bytes:
        return self.entry.held.key

    def finish(self, reason: str, busy_ns: int = 0) -> None:
        assert self.phase is not Phase.TOLD
        self.phase = Phase.TOLD
        self.data = _NOTHING
        if self.tell is not None:
            was_read = self.kind == "read" and not reason
            self.tell(Outcome(self.key, reason, busy_ns, self.entry.digest if was_read else b""))

    def tell_erased(self, outcome: Outcome) -> None:
        for tell in self.erased:
            tell(outcome)


class Jobs:
    """Under its owner's lock."""

    def __init__(self, limit_ns: int) -> None:
        self._limit_ns = limit_ns
        self._reads: deque[Job] = deque()
        self._erases: deque[Job] = deque()
        self._writes: deque[Job] = deque()
        self._queue: dict[Kind, deque[Job]] = {"read": self._reads, "erase": self._erases, "write": self._writes}
        self._awaited: dict[Job, None] = {}  # reads and writes that are not told, by due time
        self._writing: dict[bytes, Job] = {}  # by key, until `finished`
        self._num_begun: dict[Kind, int] = {"read": 0, "erase": 0, "write": 0}

    @property
    def num_queued_reads(self) -> int:
        return len(self._reads)

    @property
    def num_queued_writes(self) -> int:
        return len(self._writes)

    @property
    def num_begun(self) -> int:
        return sum(self._num_begun.values())

    @property
    def due_ns(self) -> int | None:
        """When the next outcome is due."""
        return next(iter(self._awaited)).due_ns if self._awaited else None

    def write_of(self, key: bytes) -> Job | None:
        return self._writing.get(key)

    def put(self, job: Job, now_ns: int) -> None:
        job.due_ns = now_ns + self._limit_ns
        self._queue[job.kind].append(job)
        if job.kind != "erase":
            self._awaited[job] = None
        if job.kind == "write":
            self._writing[job.key] = job

    def take(self, *, closing: bool) -> Job | None:
        """To be carried out now: reads first, since requests wait for them, and one write at a time, so that a thread
        is left for reads. At the end only what was forgotten is still erased."""
        for kind, queue in self._queue.items():
            if queue and not (kind == "write" and self._num_begun["write"]) and (kind == "erase" or not closing):
                job = queue.popleft()
                job.phase = Phase.BEGUN
                self._num_begun[kind] += 1
                return job
        return None

    def tell(self, job: Job, reason: str, busy_ns: int = 0) -> None:
        """One in line leaves it, too."""
        if job.phase is Phase.QUEUED:
            self._queue[job.kind].remove(job)
            self.finished(job)
        self._awaited.pop(job, None)
        job.finish(reason, busy_ns)

    def finished(self, job: Job) -> None:
        """What became of it is known."""
        if job.kind == "write":
            del self._writing[job.key]

    def ended(self, job: Job) -> None:
        """The thread that had it is free again."""
        self._num_begun[job.kind] -= 1

    def late(self, now_ns: int) -> list[Job]:
        late = itertools.takewhile(lambda job: job.due_ns <= now_ns, self._awaited)
        return [job for job in late if job.phase is not Phase.COPYING]

    def tell_queued(self, reason: str) -> None:
        """All reads and writes in line leave it."""
        for job in (*self._reads, *self._writes):
            self.tell(job, reason)

    def tell_erases(self, reason: str) -> None:
        """All erases in line leave it."""
        for job in tuple(self._erases):
            self.tell(job, reason)

    def hush(self) -> None:
        """Nobody is told anything any more, but of what was forgotten."""
        for job in self._awaited:
            job.tell = None
        self._awaited.clear()
