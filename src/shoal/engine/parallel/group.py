"""Rank 0's side of a replica: it starts the other ranks, tells them what to do, and ends with the first that fails.

    spawn ─► Loaded from all ─► Build ─► Built from all ─► Step, Copy ... ─► the sockets close: they end

A rank has failed when its socket closes, when it says so, when it has been stopped for STOPPED_S, or when rank 0 waited
for it in a step for too long. Then nobody waits any more, and whoever watches is told the first cause, once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from shoal.engine.config import EngineConfig
from shoal.engine.parallel.comm import Aborted
from shoal.engine.parallel.layout import Layout
from shoal.engine.parallel.messages import CopyDone, Failed, FromRank, Message, Pipe, packed
from shoal.engine.parallel.shared import Memory

START_LIMIT_S = 1800.0  # to load a model
STOPPED_S = 1.5  # a rank that is stopped for so long has failed
COMMAND = (sys.executable, "-m", "shoal.engine.parallel.rank")

_SECRETS = ("SHOAL_SECRET", "SHOAL_API_KEY")  # which a rank needs none of
_TICK_S = 0.25
_EXIT_S = 1.0  # for a process whose socket has closed to leave its exit status
_END_S = 2.0  # for ranks to end by themselves

log = logging.getLogger("shoal.engine")

M = TypeVar("M", bound=Message)


class RankFailed(Exception):
    """The first cause."""


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a rank's process, as JSON."""

    rank: int
    tp: int
    cp: int
    pp: int
    model_dir: str
    config: EngineConfig
    pipe: int  # inherited descriptors
    fds: tuple[int, int]  # of shared.Memory
    parent: int  # process id


class _Other:
    def __init__(self, rank: int, process: subprocess.Popen[bytes], pipe: Pipe) -> None:
        self.rank = rank
        self.process = process
        self.pipe = pipe
        self.said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.stopped_s = 0.0

    @property
    def is_stopped(self) -> bool:
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.process.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return False


class Group:
    """Its thread listens from the start; `failure` is set once and says why the group is over."""

    def __init__(
        self, layout: Layout, model_dir: Path, config: EngineConfig, *, command: Sequence[str] = COMMAND
    ) -> None:
        """Starts the processes. `config`: of each rank, rank 0's included."""
        self.layout = layout
        self.memory = Memory(layout)
        self.failure: RankFailed | None = None
        self.moved_bytes: Callable[[], int] = int  # that rank 0 gave to others
        self.stage_ns: Callable[[], Sequence[int]] = list  # that each stage of a pipeline computed for
        self.on_copied: Callable[[int, CopyDone], None] = lambda rank, done: None
        self._lock = threading.Lock()
        self._on_failure: Callable[[Exception], None] | None = None
        self._closing = False
        self._others: list[_Other] = []
        self._thread = threading.Thread(target=self._live, args=(model_dir, config, command), name="ranks", daemon=True)
        self._started: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._thread.start()
        if (error := self._started.get()) is not None:
            self.close()
            raise error

    def _live(self, model_dir: Path, config: EngineConfig, command: Sequence[str]) -> None:
        """The system ends what a thread has started when the thread ends (rank.py), so this one does both."""
        try:
            for rank in range(1, self.layout.size):
                self._others.append(self._start(rank, model_dir, config, command))
        except Exception as error:
            self._started.put(error)
            return
        self._started.put(None)
        self._listen()

    def _start(self, rank: int, model_dir: Path, config: EngineConfig, command: Sequence[str]) -> _Other:
        ours, theirs = socket.socketpair()
        layout = self.layout
        arguments = Arguments(
            rank, layout.tp, layout.cp, layout.pp, str(model_dir), config, theirs.fileno(), self.memory.fds, os.getpid()
        )
        with theirs:
            process = subprocess.Popen(
                [*command, msgspec.json.encode(arguments).decode()],
                env={name: value for name, value in os.environ.items() if name not in _SECRETS},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *self.memory.fds),
            )
        return _Other(rank, process, Pipe(ours, FromRank))

    @property
    def pids(self) -> list[int]:
        """Of the other ranks, in their order."""
        return [other.process.pid for other in self._others]

    # -- from the step thread ------------------------------------------------------------------------------------------

    def tell(self, message: Message) -> None:
        """All other ranks. Raises RankFailed."""
        data = packed(message)
        for other in self._others:
            try:
                other.pipe.send(data)
            except OSError as error:
                self._wait_for_cause(other, f"takes no messages: {error}")
        if self.failure is not None:
            raise self.failure

    def hear(self, kind: type[M], limit_s: float) -> list[M]:
        """One message of each other rank. Raises RankFailed."""
        ends_s = time.monotonic() + limit_s
        return [self._hear(other, kind, limit_s, ends_s) for other in self._others]

    def hear_from(self, rank: int, kind: type[M], limit_s: float) -> M:
        """Its next message. Raises RankFailed."""
        return self._hear(self._others[rank - 1], kind, limit_s, time.monotonic() + limit_s)

    def _hear(self, other: _Other, kind: type[M], limit_s: float, ends_s: float) -> M:
        while True:
            try:
                message = other.said.get(timeout=_TICK_S)
                break
            except queue.Empty:
                if time.monotonic() > ends_s:
                    self._fail(other.rank, f"did not answer within {limit_s:g} s")
                if self.failure is not None:
                    raise self.failure from None
        assert isinstance(message, kind), f"rank {other.rank} said {message}"
        return message

    def watch(self, on_failure: Callable[[Exception], None]) -> None:
        """It is called once, from any thread: at once where the group has failed already."""
        with self._lock:
            self._on_failure = on_failure
            failure = self.failure
        if failure is not None:
            on_failure(failure)

    def cause_of(self, error: Exception) -> Exception:
        """What rank 0 is to say when it failed: the first cause, where another rank did before. All end now."""
        if isinstance(error, Aborted):  # whoever failed has said so, and the thread is about to read it
            ends_s = time.monotonic() + _EXIT_S
            while self.failure is None and time.monotonic() < ends_s:
                time.sleep(0.001)
        self.memory.abort()
        return self.failure or error

    def close(self) -> None:
        """All processes have ended when it returns. May be called again."""
        self._closing = True
        self.memory.abort()
        for other in self._others:
            other.pipe.shut()
        ends_s = time.monotonic() + _END_S
        for other in self._others:
            with contextlib.suppress(subprocess.TimeoutExpired):
                other.process.wait(max(0.0, ends_s - time.monotonic()))
            other.process.kill()  # a stopped one, too
            other.process.wait()
        self._thread.join(_END_S)
        for other in self._others:
            other.pipe.close()
        self.memory.close()

    # -- the group's thread --------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for other in self._others:
                selector.register(other.pipe, selectors.EVENT_READ, other)
            while not self._closing:
                for key, _ in selector.select(_TICK_S):
                    self._read(key.data)
                    if self.failure is not None:
                        return
                for other in self._others:
                    self._look_after(other)

    def _read(self, other: _Other) -> None:
        try:
            messages, alive = other.pipe.arrived()
        except (OSError, msgspec.DecodeError) as error:
            messages, alive = [Failed(f"cannot be understood: {error}")], True
        for message in messages:
            if isinstance(message, Failed):
                self._fail(other.rank, message.cause)
            elif isinstance(message, CopyDone):
                self.on_copied(other.rank, message)
            else:
                other.said.put(message)
        if not alive and not self._closing:
            self._fail(other.rank, _end_of(other.process))

    def _look_after(self, other: _Other) -> None:
        """Counts the times that it was seen stopped: rank 0 may have been stopped itself."""
        other.stopped_s = other.stopped_s + _TICK_S if other.is_stopped else 0.0
        if other.stopped_s > STOPPED_S:
            self._fail(other.rank, f"has been stopped for {STOPPED_S:g} s")

    def _fail(self, rank: int, cause: str) -> None:
        with self._lock:
            if self.failure is not None or self._closing:
                return
            self.failure = RankFailed(f"rank {rank} of {self.layout}: {cause}")
            on_failure = self._on_failure
        log.error("engine.rank_failed", {"rank": rank, "cause": cause})
        self.memory.abort()
        if on_failure is not None:
            on_failure(self.failure)

    def _wait_for_cause(self, other: _Other, instead: str) -> None:
        """The thread that listens knows better why a rank is gone."""
        ends_s = time.monotonic() + _EXIT_S + 2 * _TICK_S
        while self.failure is None and time.monotonic() < ends_s:
            time.sleep(0.01)
        self._fail(other.rank, instead)


def _end_of(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(_EXIT_S)
    except subprocess.TimeoutExpired:
        return "closed its socket"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit status {code}"
