"""The first proof: a journal fed to a fresh Scheduler gives the same answers, byte for byte."""

from __future__ import annotations

from pathlib import Path

from shoal.core.scheduler import Scheduler
from shoal.core.stepcost import StepCost
from shoal.telemetry import journal
from shoal.telemetry.journal import (
    Aborted,
    Applied,
    Call,
    CopiesDone,
    FetchesDone,
    Header,
    LeaseOver,
    Lent,
    Planned,
    Recorder,
    Submitted,
)


class Divergence(Exception):
    """Recorded and computed again are not the same; says where, and both."""

    def __init__(self, where: str, recorded: object, again: object) -> None:
        super().__init__(f"{where}\nrecorded: {recorded}\n   again: {again}")


class Lines:
    """A journal in memory."""

    def __init__(self) -> None:
        self.on = True
        self.lines: list[bytes] = []

    def write(self, line: bytes) -> None:
        self.lines.append(line.rstrip(b"\n"))

    def close(self) -> None:
        pass


def recorder(header: Header, sink: journal.Sink) -> Recorder:
    """Around a fresh Scheduler such as the header's."""
    cost = StepCost(header.coefficients)
    scheduler = Scheduler(header.limits, hash_root=header.hash_root, cost=cost, on_disk=header.on_disk)
    return Recorder(scheduler, sink, hash_root=header.hash_root, on_disk=header.on_disk)


def replay(path: Path) -> int:
    """How many lines came out the same: all of them. Raises Divergence, or ValueError for a file that is no journal."""
    number = 0
    again, live = Lines(), None
    for line, record in journal.read(path):
        number += 1
        again.lines.clear()
        if isinstance(record, Header):
            live = recorder(record, again)
        else:
            assert live is not None
            _call(live, record)
        if again.lines != [line]:
            raise Divergence(f"{path}, record {number}", line, again.lines)
    return number


def _call(live: Recorder, record: Call) -> None:
    try:
        match record:
            case Submitted():
                live.submit(record.spec, record.now_ns)
            case Aborted():
                live.abort(record.id, record.now_ns)
            case Planned():
                live.plan(record.now_ns)
            case Applied():
                live.apply(record.result, record.now_ns)
            case CopiesDone():
                live.copied(record.done, record.now_ns)
            case FetchesDone():
                live.fetched(record.done, record.now_ns)
            case Lent():
                live.lend(record.lease, record.keys, record.now_ns)
            case LeaseOver():
                live.unlend(record.lease, record.now_ns)
    except Exception:
        if not record.error:
            raise
