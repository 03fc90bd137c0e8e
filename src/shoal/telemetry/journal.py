"""The journal: every input and output of one scheduler, as JSON lines, so that a run can be replayed exactly.

It holds prompts and outputs as token ids, which is why it is off by default and its file is mode 0600.

    {"op": "header", ...}                         what a fresh Scheduler needs: limits, key root, costs, what is on disk
    {"op": "submit" | "abort" | "plan" | "apply" | "copied" | "fetched" | "lend" | "unlend",
     "now_ns": ..., its other inputs, what the scheduler answered}

Costs are learned inside `apply`, `copied` and `fetched` and from results alone, so header and inputs determine every
later plan.
An engine that starts again appends another header: a journal may hold several runs, and the one before a crash is never
overwritten.

The step thread encodes a line into a bounded buffer; a thread of the journal's own writes it, at most 0.2 s later.
A failed write or a full buffer switches the journal off with one log line, and serving goes on: a journal may end
early, but never has a gap. JSON has no infinity: a logprob of minus infinity is written as null.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from shoal.core.kv.news import KvEvent
from shoal.core.limits import Limits
from shoal.core.plan import (
    Accepted,
    Brought,
    Copied,
    Ended,
    Event,
    Held,
    Parked,
    Preempted,
    PromptScored,
    Refused,
    Resumed,
    Started,
    StepPlan,
    StepResult,
    Token,
    View,
)
from shoal.core.request import RequestSpec
from shoal.core.scheduler import Scheduler

VERSION = 5
MAX_BUFFER_BYTES = 16 << 20
FLUSH_S = 0.2
CLOSE_S = 2.0  # longest wait for the last lines
_WAKE_BYTES = 256 << 10

log = logging.getLogger("shoal.journal")


class _Line(msgspec.Struct, frozen=True, tag_field="op", omit_defaults=True):
    pass


class Header(_Line, frozen=True, tag="header"):
    version: int
    limits: Limits
    hash_root: bytes
    coefficients: tuple[float, ...]  # of core.stepcost at the start
    on_disk: tuple[Held, ...] = ()  # at the start


class Submitted(_Line, frozen=True, tag="submit"):
    now_ns: int
    spec: RequestSpec
    refused: Refused | None
    error: str = ""  # what the scheduler raised: such a line is the last one of its run


class Aborted(_Line, frozen=True, tag="abort"):
    now_ns: int
    id: str
    events: list[Any]  # [kind, fields of the event...] each
    error: str = ""


class Planned(_Line, frozen=True, tag="plan"):
    now_ns: int
    plan: StepPlan | None
    error: str = ""


class Applied(_Line, frozen=True, tag="apply"):
    now_ns: int
    result: StepResult
    events: list[Any]
    error: str = ""


class CopiesDone(_Line, frozen=True, tag="copied"):
    now_ns: int
    done: list[Copied]
    events: list[Any]
    error: str = ""


class FetchesDone(_Line, frozen=True, tag="fetched"):
    now_ns: int
    done: list[Brought]
    events: list[Any]
    error: str = ""


class Lent(_Line, frozen=True, tag="lend"):
    now_ns: int
    lease: int
    keys: tuple[bytes, ...]
    blocks: list[int]
    error: str = ""


class LeaseOver(_Line, frozen=True, tag="unlend"):
    now_ns: int
    lease: int
    error: str = ""


Call = Submitted | Aborted | Planned | Applied | CopiesDone | FetchesDone | Lent | LeaseOver
Record = Header | Call

_KINDS: dict[type, str] = {
    Token: "token",
    PromptScored: "prompt_scored",
    Started: "started",
    Preempted: "preempted",
    Parked: "parked",
    Resumed: "resumed",
    Ended: "ended",
}
encode = msgspec.json.Encoder().encode


class Sink(Protocol):
    """Where lines go. `write` must not block, and does nothing once `on` is false."""

    on: bool

    def write(self, line: bytes) -> None: ...

    def close(self) -> None: ...


class Recorder:
    """A Scheduler that writes down what it is asked and what it answers. Used on one thread, like the Scheduler."""

    def __init__(self, scheduler: Scheduler, sink: Sink, *, hash_root: bytes, on_disk: Iterable[Held] = ()) -> None:
        """`scheduler` and its cost model must be new, and `hash_root` the one it was made with."""
        view = scheduler.view()
        assert view.step == view.num_waiting == 0, "the journal must see a scheduler's whole life"
        self._scheduler = scheduler
        self._sink = sink
        self._write(Header(VERSION, scheduler.limits, hash_root, scheduler.cost.coefficients, tuple(on_disk)))

    @property
    def limits(self) -> Limits:
        return self._scheduler.limits

    def submit(self, spec: RequestSpec, now_ns: int) -> Accepted | Refused:
        try:
            answer = self._scheduler.submit(spec, now_ns)
        except Exception as error:
            self._end_with(Submitted(now_ns, spec, None, _named(error)))
            raise
        if self._sink.on:
            self._write(Submitted(now_ns, spec, answer if isinstance(answer, Refused) else None))
        return answer

    def abort(self, id: str, now_ns: int) -> list[Event]:
        try:
            events = self._scheduler.abort(id, now_ns)
        except Exception as error:
            self._end_with(Aborted(now_ns, id, [], _named(error)))
            raise
        if self._sink.on:
            self._write(Aborted(now_ns, id, _tagged(events)))
        return events

    def plan(self, now_ns: int) -> StepPlan | None:
        try:
            plan = self._scheduler.plan(now_ns)
        except Exception as error:
            self._end_with(Planned(now_ns, None, _named(error)))
            raise
        if self._sink.on:
            self._write(Planned(now_ns, plan))
        return plan

    def apply(self, result: StepResult, now_ns: int) -> list[Event]:
        try:
            events = self._scheduler.apply(result, now_ns)
        except Exception as error:
            self._end_with(Applied(now_ns, result, [], _named(error)))
            raise
        if self._sink.on:
            self._write(Applied(now_ns, result, _tagged(events)))
        return events

    def copied(self, done: list[Copied], now_ns: int) -> list[Event]:
        try:
            events = self._scheduler.copied(done, now_ns)
        except Exception as error:
            self._end_with(CopiesDone(now_ns, done, [], _named(error)))
            raise
        if self._sink.on:
            self._write(CopiesDone(now_ns, done, _tagged(events)))
        return events

    def fetched(self, done: list[Brought], now_ns: int) -> list[Event]:
        try:
            events = self._scheduler.fetched(done, now_ns)
        except Exception as error:
            self._end_with(FetchesDone(now_ns, done, [], _named(error)))
            raise
        if self._sink.on:
            self._write(FetchesDone(now_ns, done, _tagged(events)))
        return events

    def lend(self, lease: int, keys: Sequence[bytes], now_ns: int) -> list[int]:
        try:
            blocks = self._scheduler.lend(lease, keys, now_ns)
        except Exception as error:
            self._end_with(Lent(now_ns, lease, tuple(keys), [], _named(error)))
            raise
        if self._sink.on:
            self._write(Lent(now_ns, lease, tuple(keys), blocks))
        return blocks

    def unlend(self, lease: int, now_ns: int) -> None:
        try:
            self._scheduler.unlend(lease, now_ns)
        except Exception as error:
            self._end_with(LeaseOver(now_ns, lease, _named(error)))
            raise
        if self._sink.on:
            self._write(LeaseOver(now_ns, lease))

    def view(self) -> View:
        return self._scheduler.view()

    def kv_news(self) -> list[KvEvent]:
        return self._scheduler.kv_news()

    def close(self) -> None:
        self._sink.close()

    def _write(self, line: _Line) -> None:
        self._sink.write(encode(line) + b"\n")

    def _end_with(self, line: Call) -> None:
        """The most wanted line of all: it is in the file before the error goes on to end the engine."""
        self._write(line)
        self._sink.close()


Planner = Scheduler | Recorder  # who plans the steps, without a journal or with one


class JournalFile:
    """A Sink whose lines a thread appends to a file."""

    def __init__(self, path: Path, max_buffer_bytes: int = MAX_BUFFER_BYTES) -> None:
        """OSError: the file cannot be opened for appending."""
        self.on = True
        self.lost = 0  # lines that are not in the file because the journal went off
        self._path = path
        self._max_buffer_bytes = max_buffer_bytes
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if stat.S_ISREG(os.fstat(self._file).st_mode):
            os.fchmod(self._file, 0o600)  # it may have been there, with another mode
        self._lines: list[bytes] = [b"\n"] if self._ends_in_a_cut_line() else []
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        with self._changed:
            if not self.on:
                self.lost += 1
            elif self._num_bytes + len(line) > self._max_buffer_bytes:
                self._switch_off(1, f"more than {self._max_buffer_bytes} bytes wait to be written")
            else:
                self._lines.append(line)
                self._num_bytes += len(line)
                if self._num_bytes >= _WAKE_BYTES:
                    self._changed.notify()

    def close(self) -> None:
        """Write what is left, for at most CLOSE_S. May be called again."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        closing = False
        while not closing:
            with self._changed:
                if not self._closing:
                    self._changed.wait(FLUSH_S)
                lines, self._lines, self._num_bytes = self._lines, [], 0
                closing = self._closing
            try:
                self._append(b"".join(lines))
            except OSError as error:
                with self._changed:
                    self._switch_off(len(lines), str(error))
        with self._changed:
            self.on = False
        os.close(self._file)

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def _switch_off(self, num_lost: int, reason: str) -> None:
        """Under the lock. Lines that wait are lost too, so that no gap can be followed by more."""
        self.lost += num_lost + len(self._lines)
        self._lines, self._num_bytes = [], 0
        if self.on:
            self.on = False
            log.error("journal.off", {"file": str(self._path), "reason": reason})

    def _ends_in_a_cut_line(self) -> bool:
        size = os.fstat(self._file).st_size
        return size > 0 and os.pread(self._file, 1, size - 1) != b"\n"


def read(path: Path) -> Iterator[tuple[bytes, Record]]:
    """Each line, without its end, and what it says: a header first. A line that a crash cut short is left out.

    ValueError names the line that is not a journal's, and why.
    """
    with path.open("rb") as file:
        cut, headed = "", False
        for number, line in enumerate(file, start=1):
            try:
                record = decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if cut:
                    raise ValueError(cut) from None
                cut = f"{path}:{number}: {error}"
                continue
            if cut and not isinstance(record, Header):
                raise ValueError(cut)  # a crash is followed by nothing or by a new run
            if isinstance(record, Header) and record.version != VERSION:
                raise ValueError(f"{path}:{number}: version {record.version}, this program reads {VERSION}")
            headed = headed or isinstance(record, Header)
            if not headed:
                raise ValueError(f"{path}:{number}: a journal begins with a header")
            cut = ""
            yield line.rstrip(b"\n"), record


def decode(line: bytes) -> Record:
    """One line. Raises msgspec.DecodeError."""
    value = msgspec.json.decode(line)
    if isinstance(value, dict) and isinstance(result := value.get("result"), dict):
        for field in ("logprobs", "prompt_logprobs"):
            result[field] = _with_infinity(result.get(field, {}))
    return msgspec.convert(value, Record)


def _with_infinity(value: Any) -> Any:
    if value is None:
        return float("-inf")
    if isinstance(value, list):
        return [_with_infinity(part) for part in value]
    if isinstance(value, dict):
        return {key: _with_infinity(part) for key, part in value.items()}
    return value


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _tagged(events: list[Event]) -> list[Any]:
    return [(_KINDS[type(event)], *event) for event in events]
