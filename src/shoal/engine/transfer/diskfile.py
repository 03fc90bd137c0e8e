"""The file of the disk tier: what its bytes mean, and the calls that read and write them.

    folder, 0700      lock      whose lock says that an engine uses the folder
                      blocks    the file, 0600
                      blocks.*  one that is not complete yet; removed at the next start

    blocks:  header | record 0 | record 1 | ...   | block 0 | block 1 | ...
             4096     key, parent, token ids,       data, each from a multiple of 4096
                      digest of the block's data;
                      zeros: the slot is empty

Integers are little-endian; header and records end in a digest of what they say. A slot is written in the order: its
record cleared, block, record. Nothing is flushed: after a power cut a record may be older or newer than its block, and
then the digest differs.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.core.kv.hashing import KEY_BYTES
from shoal.engine.transfer.digest import DIGEST_BYTES, digest
from shoal.engine.transfer.diskindex import Entry, Held

FIELD = "kv_disk_folder"  # of the engine's configuration, in messages about it
VERSION = 1
PAGE = 4096

_HEADER = struct.Struct("<8sI16sIQQ")  # magic, version, root, tokens and bytes of a block, slots
_MAGIC = b"shoal kv"
_RECORD = struct.Struct("<16s16s16sQI")  # key, parent, digest, use, number of token ids, which follow
_UNFINISHED = re.compile(r"blocks\.[0-9a-f]{16}")


class Damaged(Exception):
    """The file does not hold what it should. `reason`: missing, cut, corrupt or foreign."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Layout(NamedTuple):
    """A file with another layout holds nothing for us."""

    root: bytes  # kv.hashing.root_key: model, KV dtype and format, tokens of a block
    block_tokens: int
    block_bytes: int
    num_slots: int

    @classmethod
    def within(cls, capacity_bytes: int, root: bytes, block_tokens: int, block_bytes: int) -> Layout:
        """The whole file, with all its slots in use, takes at most `capacity_bytes`."""
        one = cls(root, block_tokens, block_bytes, 1)
        num_slots = (capacity_bytes - 2 * PAGE) // (one.slot_bytes + one.record_bytes)
        if num_slots < 1:
            least = 2 * PAGE + one.slot_bytes + one.record_bytes
            raise ValueError(f"{FIELD}: {capacity_bytes} bytes hold no block, it takes {least}")
        return one._replace(num_slots=num_slots)

    @property
    def slot_bytes(self) -> int:
        return _up(self.block_bytes, PAGE)

    @property
    def record_bytes(self) -> int:
        return _up(_RECORD.size + 4 * self.block_tokens + DIGEST_BYTES, 64)

    @property
    def blocks_at(self) -> int:
        return PAGE + _up(self.num_slots * self.record_bytes, PAGE)

    def header(self) -> bytes:
        assert len(self.root) == KEY_BYTES
        fields = _HEADER.pack(_MAGIC, VERSION, self.root, self.block_tokens, self.block_bytes, self.num_slots)
        return (fields + digest(fields)).ljust(PAGE, b"\0")

    def pack(self, entry: Entry) -> bytes:
        key, parent, tokens = entry.held
        fields = _RECORD.pack(key, parent, entry.digest, entry.use, len(tokens))
        fields += struct.pack(f"<{self.block_tokens}I", *tokens)
        return (fields + digest(fields)).ljust(self.record_bytes, b"\0")

    def unpack(self, slot: int, record: bytes) -> Entry | None:
        """None: the slot is empty. Damaged: nobody wrote this record."""
        if not any(record):
            return None
        size = _RECORD.size + 4 * self.block_tokens
        fields = record[:size]
        if record[size : size + DIGEST_BYTES] != digest(fields):
            raise Damaged("corrupt")
        key, parent, block_digest, use, num_tokens = _RECORD.unpack_from(fields)
        if num_tokens != self.block_tokens:
            raise Damaged("corrupt")
        tokens = struct.unpack_from(f"<{num_tokens}I", fields, _RECORD.size)
        return Entry(Held(key, parent, tokens), block_digest, slot, use)


class BlockFile:
    """Every call may raise OSError or Damaged. Calls from several threads, but only one at a time writes to a slot."""

    def __init__(self, folder: Path, layout: Layout, *, fresh: bool = False) -> None:
        """Opens the file, or makes a new one: where there is none, where it is not of this layout, or if `fresh`.

        ValueError: the folder is not ours alone, or another engine uses it.
        """
        self.layout = layout
        self.foreign = False  # there was one of another layout
        self._empty_record = bytes(layout.record_bytes)
        self._zeros = bytes(layout.block_bytes)
        self._folder = _open_private(folder)
        self._file = -1
        try:
            self._lock = _lock(folder, self._folder)
        except BaseException:
            os.close(self._folder)
            raise
        try:
            self._remove_unfinished()
            if not fresh:
                self._open()
            if self._file < 0:
                self._create()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """With no call under way."""
        for fd in (self._file, self._folder, self._lock):  # the lock last
            if fd >= 0:
                os.close(fd)
        self._file = self._folder = self._lock = -1

    def entries(self) -> tuple[list[Entry], dict[int, str]]:
        """What the records say, and why others are not believed, by slot: corrupt, or the block lies beyond the file's
        end (cut)."""
        layout = self.layout
        size = self._size()
        records = os.pread(self._file, layout.num_slots * layout.record_bytes, PAGE)
        found: list[Entry] = []
        damaged: dict[int, str] = {}
        for slot in range(len(records) // layout.record_bytes):
            try:
                entry = layout.unpack(slot, records[slot * layout.record_bytes : (slot + 1) * layout.record_bytes])
            except Damaged as error:
                damaged[slot] = error.reason
                continue
            if entry is None:
                continue
            if self._block_at(slot) + layout.block_bytes > size:
                damaged[slot] = "cut"
            else:
                found.append(entry)
        return found, damaged

    def read(self, slot: int, block: NDArray[np.uint8]) -> None:
        """Into all of `block`, unverified."""
        self._size()
        if _read_all(self._file, block.data, self._block_at(slot)) < len(block):
            raise Damaged("cut")

    def write(self, entry: Entry, block: NDArray[np.uint8]) -> None:
        """Into a slot that was cleared."""
        _write_all(self._file, block.data, self._block_at(entry.slot))
        _write_all(self._file, self.layout.pack(entry), self._record_at(entry.slot))

    def clear(self, slot: int) -> None:
        """The slot is empty from now on."""
        self._size()
        _write_all(self._file, self._empty_record, self._record_at(slot))

    def erase(self, slot: int) -> None:
        """As `clear`, and the block's bytes are gone from the file."""
        self.clear(slot)
        if self._block_at(slot) < self._size():  # else nothing was ever written there
            _write_all(self._file, self._zeros, self._block_at(slot))

    def _record_at(self, slot: int) -> int:
        return PAGE + slot * self.layout.record_bytes

    def _block_at(self, slot: int) -> int:
        return self.layout.blocks_at + slot * self.layout.slot_bytes

    def removed(self) -> bool:
        """Its name is gone, so its bytes are lost as soon as it is closed."""
        return os.fstat(self._file).st_nlink == 0

    def _size(self) -> int:
        if self.removed():
            raise Damaged("missing")
        return os.fstat(self._file).st_size

    def _open(self) -> None:
        try:
            fd = os.open("blocks", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._folder)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise
            self.foreign = True  # a link, a folder, a socket: not ours, and replaced if that can be done
            return
        self._file = fd
        if not stat.S_ISREG(os.fstat(fd).st_mode) or os.pread(fd, PAGE, 0) != self.layout.header():
            self.foreign = True
            os.close(fd)
            self._file = -1
            return
        os.fchmod(fd, 0o600)

    def _create(self) -> None:
        """Complete before it gets its name."""
        name = f"blocks.{secrets.token_hex(8)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(name, flags, 0o600, dir_fd=self._folder)
        try:
            _write_all(self._file, self.layout.header(), 0)
            os.rename(name, "blocks", src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except BaseException:
            os.unlink(name, dir_fd=self._folder)
            raise

    def _remove_unfinished(self) -> None:
        for name in os.listdir(self._folder):
            if _UNFINISHED.fullmatch(name):
                os.unlink(name, dir_fd=self._folder)


def _open_private(folder: Path) -> int:
    """A descriptor of the folder, which is made where it does not exist."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.EEXIST):
            raise
        raise ValueError(f"{FIELD}: {folder} is a link or no folder; name the folder itself") from None
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(fd)
        raise ValueError(
            f"{FIELD}: others have access to {folder}; make it mode 0700 and its user's own, or name a folder that "
            f"does not exist yet"
        )
    return fd


def _lock(folder: Path, folder_fd: int) -> int:
    """Held until it is closed, however the process ends."""
    fd = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder_fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ValueError(f"{FIELD}: another engine uses {folder}; each needs a folder of its own") from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read_all(fd: int, into: memoryview, at: int) -> int:
    """Bytes that there were, up to the length of `into`."""
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], at + done)
        if count == 0:
            break
        done += count
    return done


def _write_all(fd: int, data: memoryview | bytes, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwritev(fd, [data[done:]], at + done)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
