"""The private folder of files and batches, and the one thread that speaks to its database.

    FOLDER/batches.sqlite3    see `store.py`
    FOLDER/files/ID           the bytes of a file that the database names
    FOLDER/files/ID.part      one that is being written, or was when its writer died

The folder comes into being with the first request for a file or a batch: who uses none finds nothing on the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from shoal.gateway.batches.store import Store

WRITE_BYTES = 1 << 20  # collected before the disk is asked
ABANDONED_S = 3600.0  # bytes that no row names are an upload under way; later than this, what a dead gateway left

P = ParamSpec("P")
T = TypeVar("T")


class Archive:
    """Everything raises OSError or sqlite3.Error where the disk does not do its part."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError for a folder that others may look into."""
        self._folder = folder
        self._database = folder / "batches.sqlite3"
        self._files = folder / "files"
        self._store: Store | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        if (_mode(folder) or 0) & 0o077:
            raise ValueError(f"batch_dir {folder} is open to other users: make it private (chmod 700)")

    @property
    def exists(self) -> bool:
        """Something was uploaded once."""
        return self._store is not None or _mode(self._database) is not None

    async def do(self, method: Callable[Concatenate[Store, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a method of the store on its thread. It is done, also where the caller is cancelled meanwhile."""
        loop = asyncio.get_running_loop()
        return await asyncio.shield(loop.run_in_executor(self._thread, lambda: method(self._opened(), *args, **kwargs)))

    def path(self, id: str) -> Path:
        """Of a file whose id came from the store, never from a client."""
        return self._files / id

    async def new_file(self) -> NewFile:
        await asyncio.to_thread(self._make_folders)
        return NewFile(self._files)

    async def remove(self, id: str) -> None:
        await asyncio.to_thread(self.path(id).unlink, missing_ok=True)

    async def sweep(self) -> None:
        """Removes bytes that no row names."""
        named = await self.do(Store.file_ids)
        await asyncio.to_thread(self._sweep, named)

    async def close(self) -> None:
        """What was asked for before is done."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    def _opened(self) -> Store:
        if self._store is None:
            self._make_folders()
            self._store = Store(self._database)
        return self._store

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _make_folders(self) -> None:
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._files.mkdir(mode=0o700, exist_ok=True)

    def _sweep(self, named: set[str]) -> None:
        for path in self._files.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another gateway was quicker
                if path.name not in named and path.stat().st_mtime < time.time() - ABANDONED_S:
                    path.unlink()


def _mode(path: Path) -> int | None:
    """None where there is nothing, or nothing that we may see: who needs it will say so."""
    try:
        return path.stat().st_mode
    except OSError:
        return None


class NewFile:
    """A file on its way into the archive: whole after `keep`, gone after `drop`."""

    def __init__(self, folder: Path) -> None:
        self.id = f"file-{secrets.token_hex(12)}"
        self.num_bytes = 0
        self._path = folder / self.id
        self._part = folder / f"{self.id}.part"
        self._fd = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._lock = threading.Lock()  # a writer that was cancelled leaves its thread at work
        self._collected: list[bytes] = []
        self._num_collected = 0

    async def write(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self._collected.append(data)
        self._num_collected += len(data)
        if self._num_collected >= WRITE_BYTES:
            await asyncio.to_thread(self._write, self._take())

    async def keep(self) -> None:
        await asyncio.to_thread(self._keep, self._take())

    async def drop(self) -> None:
        await asyncio.to_thread(self._drop)

    def _take(self) -> bytes:
        data = b"".join(self._collected)
        self._collected.clear()
        self._num_collected = 0
        return data

    def _write(self, data: bytes) -> None:
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]

    def _keep(self, data: bytes) -> None:
        self._write(data)
        with self._lock:
            os.fsync(self._fd)
            self._end()
            self._part.rename(self._path)

    def _drop(self) -> None:
        with self._lock:
            self._end()
            for path in (self._part, self._path):
                path.unlink(missing_ok=True)

    def _end(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
