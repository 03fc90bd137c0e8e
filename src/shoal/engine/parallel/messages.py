"""What rank 0 and the other ranks say to each other: typed msgpack, each behind its length, over a pair of sockets.

A plan is a few kilobytes and is written once for all ranks. Measured (bench/allreduce.py): it is there sooner than
through shared memory, an idle rank sleeps, and the system itself tells both ends when the other one is gone.
"""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any

import msgspec

from shoal.core.plan import Copied, KvOp, StepPlan, StepResult

MAX_BYTES = 256 << 20
SEND_LIMIT_S = 5.0

_LENGTH = struct.Struct("<I")


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


# -- to the other ranks ------------------------------------------------------------------------------------------------


class Build(Message, frozen=True, tag="build"):
    """All ranks have loaded; these are the smallest numbers of blocks that any of them has room for."""

    num_blocks: int
    num_host_blocks: int


class Step(Message, frozen=True, tag="step"):
    number: int  # counts from 1 without gaps
    plan: StepPlan  # without its copies, which come by themselves
    # In a pipeline, what the last stage sampled in steps whose results rank 0 has heard since: (step, tokens).
    sampled: list[tuple[int, list[int]]] = []


class Clear(Message, frozen=True, tag="clear"):
    """Blocks of the KV store."""

    blocks: list[int]


class Copy(Message, frozen=True, tag="copy"):
    op: KvOp


class MeasureCopies(Message, frozen=True, tag="measure"):
    pass


# -- from them ---------------------------------------------------------------------------------------------------------


class Loaded(Message, frozen=True, tag="loaded"):
    num_blocks: int  # that it has room for
    num_host_blocks: int


class Built(Message, frozen=True, tag="built"):
    pass


class CopyDone(Message, frozen=True, tag="copied"):
    copied: Copied


class CopiesMeasured(Message, frozen=True, tag="measured"):
    bytes_per_s: float


class Result(Message, frozen=True, tag="result"):
    """Of a step, from the last stage of a pipeline."""

    result: StepResult
    stage_ns: list[int]  # what each stage computed for


class Failed(Message, frozen=True, tag="failed"):
    """It is about to end."""

    cause: str


ToRank = Build | Step | Clear | Copy | MeasureCopies
FromRank = Loaded | Built | CopyDone | CopiesMeasured | Result | Failed

_encode = msgspec.msgpack.Encoder().encode


def packed(message: Message) -> bytes:
    body = _encode(message)
    assert len(body) <= MAX_BYTES
    return _LENGTH.pack(len(body)) + body


class Pipe:
    """One end. Several threads may send, one receives."""

    def __init__(self, end: socket.socket, kind: Any) -> None:
        """`kind`: what comes from the other end."""
        self._socket = end
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kind)
        self._lock = threading.Lock()
        self._received = bytearray()
        end.setblocking(True)
        seconds, rest = divmod(SEND_LIMIT_S, 1)
        # Not the socket's own limit: that is one for both directions.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6)))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message | bytes) -> None:
        """A message, or one that is `packed`. OSError: the other end is gone, or reads nothing any more."""
        with self._lock:
            self._socket.sendall(packed(message) if isinstance(message, Message) else message)

    def receive(self) -> Any:
        """Waits for the next one; None: the other end is gone."""
        while (message := self._next()) is None:
            if not self._read():
                return None
        return message

    def arrived(self) -> tuple[list[Any], bool]:
        """After one read, for when there is something to read; False: the other end is gone."""
        alive = self._read()
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages, alive

    def close(self) -> None:
        self._socket.close()

    def shut(self) -> None:
        """The other end finds that this one is gone."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is gone

    def _read(self) -> bool:
        try:
            data = self._socket.recv(1 << 18)
        except ConnectionResetError:
            return False
        self._received += data
        return bool(data)

    def _next(self) -> Any:
        if len(self._received) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
        if end > _LENGTH.size + MAX_BYTES:
            raise msgspec.DecodeError(f"a message of {end} bytes")
        if len(self._received) < end:
            return None
        message = self._decoder.decode(memoryview(self._received)[_LENGTH.size : end])
        del self._received[:end]
        return message
