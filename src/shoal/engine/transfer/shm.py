"""Between processes of one machine: the reader opens the owner's file through /proc, without a name that could stay.

The system lets it do so where both run as one user and see each other's processes; elsewhere there is no such way.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

import msgspec

from shoal.engine.transfer.transport import Memory, TransportError


class _Door(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    boot_id: str  # of the machine since it was started
    pid: int
    fd: int
    inode: int  # what is found behind pid and fd must be this file: another container has other processes
    num_bytes: int


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class Shm:
    name = "shm"

    def register(self, memory: Memory) -> bytes:
        inode = os.fstat(memory.fd).st_ino
        return msgspec.msgpack.encode(_Door(_boot_id(), os.getpid(), memory.fd, inode, memory.num_bytes))

    def withdraw(self, memory: Memory) -> None:
        """Whoever has opened it may go on reading: what it finds there has another digest."""

    def open(self, door: bytes, target: Memory, limit_s: float) -> ShmReader:
        try:
            where = msgspec.msgpack.decode(door, type=_Door)
            if where.boot_id != _boot_id():
                raise TransportError("that memory is on another machine")
            fd = os.open(f"/proc/{where.pid}/fd/{where.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (msgspec.DecodeError, OSError) as e:
            raise TransportError(f"no way through /proc: {e}") from None
        found = os.fstat(fd)
        if (found.st_ino, found.st_size) != (where.inode, where.num_bytes):
            os.close(fd)
            raise TransportError("another file is behind that descriptor")
        return ShmReader(fd, target)

    def close(self) -> None:
        pass


class ShmReader:
    """A range is copied when it is polled for, by one system call that holds no lock of Python's."""

    def __init__(self, fd: int, target: Memory) -> None:
        self._fd = fd
        self._target = target
        self._asked: deque[tuple[int, int]] = deque()

    def read(self, offset: int, num_bytes: int) -> None:
        self._asked.append((offset, num_bytes))

    def poll(self) -> bool:
        offset, num_bytes = self._asked[0]
        try:
            num_read = os.preadv(self._fd, [self._target.view[offset : offset + num_bytes]], offset)
        except OSError as e:
            raise TransportError(f"the memory cannot be read: {e}") from None
        if num_read != num_bytes:
            raise TransportError(f"{num_read} bytes of {num_bytes} are there")
        self._asked.popleft()
        return True

    def close(self) -> bool:
        os.close(self._fd)
        return True
