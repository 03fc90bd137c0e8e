"""What the disk tier knows and decides: what it holds, what it was asked, what went wrong, and whether it is in use.

No threads and no files: disk.py calls it under its lock, and carries out what comes of it.
"""

from __future__ import annotations

import errno
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from shoal.engine.transfer.breaker import RETRY_NS, Breaker, State
from shoal.engine.transfer.diskfile import Damaged
from shoal.engine.transfer.diskindex import DiskIndex, Entry
from shoal.engine.transfer.diskjobs import Job, Jobs, Outcome, Phase, Tell

log = logging.getLogger(__name__)

ERRORS = ("missing", "cut", "corrupt", "foreign", "full", "slow", "io")
_DISTRUST = {"missing", "cut", "corrupt", "foreign"}  # errors of what the file holds, not of the disk under it


class DiskState:
    def __init__(
        self, num_slots: int, limit_ns: int, dropped: Callable[[Sequence[bytes]], None], now_ns: Callable[[], int]
    ) -> None:
        self.errors: Counter[str] = Counter(dict.fromkeys(ERRORS, 0))
        self.index = DiskIndex(num_slots)
        self.jobs = Jobs(limit_ns)
        self.breaker = Breaker()
        self.distrusted = False  # what the file holds, by what opened the breaker: the next file is a new one
        self.reopening = False  # there is to be another try, or it is under way: no job begins meanwhile
        self._grows_ns: int | None = None  # when the disk may have room for more
        self._dropped = dropped
        self._now_ns = now_ns

    @property
    def off(self) -> bool:
        """Nothing is read or written, and nothing of that in line."""
        return self.breaker.state is State.OPEN

    # -- calls -----------------------------------------------------------------------------------------------------

    def on(self) -> bool:
        """Not off. Where it is time for another try, there is to be one."""
        now_ns = self._now_ns()
        if self.breaker.due(now_ns):
            self.reopening = True
        if self._grows_ns is not None and now_ns >= self._grows_ns:
            self._grows_ns = None
            self.index.grow()
        return not self.off

    def put(self, job: Job) -> None:
        self.jobs.put(job, self._now_ns())

    def forget(self, key: bytes, tell: Tell) -> None:
        entry, write = self.index.get(key), self.jobs.write_of(key)
        if entry is not None:
            self._drop(entry, tell)
            return
        under_way = write is not None and write.phase is not Phase.QUEUED
        if write is not None and write.phase is not Phase.TOLD:
            self.jobs.tell(write, "forgotten")
        if write is not None and under_way:
            write.erased.append(tell)
        else:
            tell(Outcome(key, ""))

    def expire(self) -> None:
        """Gives up what is late by now."""
        for job in self.jobs.late(self._now_ns()):
            if job.phase is Phase.QUEUED:  # what held it up is late itself, and counted
                self.jobs.tell(job, "busy")
            elif job.phase is Phase.BEGUN:  # else the one before it opened the breaker, and it is told
                self.jobs.tell(job, "slow")
                self._failed("slow", f"a {job.kind} was given up")

    # -- what threads do -------------------------------------------------------------------------------------------

    def take(self, *, closing: bool) -> Job | None:
        """The next job to carry out; a block to be written has its place. None: there is none now."""
        while not self.reopening:
            job = self.jobs.take(closing=closing)
            if job is None or job.kind != "write" or self._place(job.entry):
                return job
            self.jobs.finished(job)
            self.jobs.tell(job, "full")
            self.jobs.ended(job)
        return None

    def finish(self, job: Job, error: Exception | None, busy_ns: int) -> None:
        reason = "" if error is None else reason_of(error)
        self.jobs.finished(job)
        if job.kind == "read":
            reason = self._finish_read(job, reason, error)
        elif job.kind == "write":
            self._finish_write(job, reason, error)
        else:
            self.index.release(job.entry.slot)
            if reason and job.tell is not None:
                self._failed(reason, error)
        if job.phase is not Phase.TOLD:
            if not reason:
                self.breaker.success()
            self.jobs.tell(job, reason, busy_ns)

    def start_over(self) -> None:
        """With nothing, as the next file."""
        keys = [entry.held.key for entry in self.index]
        for entry in self.index:
            entry.live = False
        self.index = DiskIndex(self.index.num_slots)
        self._grows_ns = None
        if keys:
            self._dropped(keys)

    def reopened(self, error: Exception | None) -> None:
        """How the other try went."""
        self.reopening = False
        if error is not None:
            self.failed_to_open(error)
            return
        self.distrusted = False
        self.breaker.retry()
        log.info("the disk tier is in use again")

    def failed_to_open(self, error: Exception) -> None:
        self.count(reason_of(error), error)
        self.breaker.open(self._now_ns())

    def count(self, reason: str, error: object, number: int = 1) -> None:
        self.errors[reason] += number
        log.warning("disk tier: %s, %d times (%s)", reason, number, error)

    def _place(self, entry: Entry) -> bool:
        """Finds a slot for what is to be written. False: none can be had."""
        parent = self.index.get(entry.held.parent)
        if parent is not None:
            self.index.touch(parent)  # of no use without it
        taken = self.index.take_slot()
        if taken is None:
            return False
        entry.slot, victim = taken
        entry.use = self.index.new_use()
        if victim is not None:
            self._dropped((victim.held.key,))
        return True

    def _finish_read(self, job: Job, reason: str, error: Exception | None) -> str:
        """Why there is nothing to read. A damaged block goes; where it went meanwhile, its slot may hold another."""
        if not reason or not job.entry.live:
            return reason and "absent"
        self._failed(reason, error)
        self._drop(job.entry, None)
        return reason

    def _finish_write(self, job: Job, reason: str, error: Exception | None) -> None:
        entry = job.entry
        if reason == "full" and self.index.refuse(entry.slot):
            self.count(reason, error)
            self._grows_ns = self._now_ns() + RETRY_NS
        elif reason:
            if reason != "full":  # else the index has taken it back
                self.index.release(entry.slot)
            self._failed(reason, error)
        elif job.phase is Phase.TOLD or not entry.digest:  # too late, or forgotten, or it is time to end
            self.put(Job("erase", entry, job.tell_erased if job.erased else None))
            return
        else:
            self.index.add(entry)
        job.tell_erased(Outcome(job.key, reason))

    def _drop(self, entry: Entry, tell: Tell | None) -> None:
        self.index.remove(entry)
        self._dropped((entry.held.key,))
        self.put(Job("erase", entry, tell))

    def _failed(self, reason: str, error: object) -> None:
        """Counts, also against the breaker."""
        self.count(reason, error)
        now_ns = self._now_ns()
        opens = self.breaker.error(now_ns)
        if reason == "missing" and not self.off:  # and it stays so, until there is a new file
            self.breaker.open(now_ns)
            opens = True
        if opens:
            self.distrusted = reason in _DISTRUST
            self.jobs.tell_queued("off")
            log.warning("the disk tier is off for %d s", RETRY_NS // 1_000_000_000)


def reason_of(error: Exception) -> str:
    if isinstance(error, Damaged):
        return error.reason
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "full"
    return "io"
