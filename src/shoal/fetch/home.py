"""Where pulled models lie, and how a new one appears there whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

LOCK_POLL_S = 0.1
LOCK_LIMIT_S = 2400.0  # longer than a download and a conversion together may last


class ModelError(Exception):
    """A model cannot be had; the message says why and what to do, for the person who asked."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a pull is. `total_bytes` is 0 where nobody knows it."""

    stage: Literal["wait", "download", "convert"]
    done_bytes: int
    total_bytes: int


ProgressCallback = Callable[[Progress], None]


def shoal_home() -> Path:
    """The cache folder: SHOAL_HOME, else `shoal` in the user's cache directory. Not created here."""
    if chosen := os.environ.get("SHOAL_HOME"):
        return Path(chosen).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "shoal"


def require_space(folder: Path, num_bytes: int) -> None:
    """Raises ModelError when the disk under `folder` has fewer than `num_bytes` free."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ModelError(
            f"not enough disk space: {num_bytes / 1e6:.0f} MB needed in {folder}, {free / 1e6:.0f} MB free "
            "(set SHOAL_HOME to a folder on a larger disk)"
        )


@contextmanager
def new_folder(target: Path, progress: ProgressCallback, is_current: Callable[[], bool]) -> Iterator[Path | None]:
    """Yields an empty folder that becomes `target` when the block ends without an exception, or None.

    None says that another process has made `target` while this one waited. One process at a time is inside, held
    apart by a file lock that the kernel frees when its holder dies. What a killed holder left is removed here.
    Readers never lock: they see the old folder, none, or the new one, since a rename is the last thing done.

    Raises ModelError when the disk is full, the folder cannot be written, or the lock is not free in LOCK_LIMIT_S.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{target.name}.lock", progress):
            for leftover in target.parent.glob(f".{target.name}.*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)
            if is_current():
                yield None
                return
            temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
            try:
                model = temporary / "model"
                model.mkdir()
                yield model
                _sync(model)
                if target.exists():  # made from another source: moved aside first, a rename onto a full folder fails
                    target.rename(temporary / "outdated")
                model.rename(target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(f"the disk is full: {target.parent} (set SHOAL_HOME to a larger disk)") from error
        raise ModelError(f"cannot write {target.parent}: {error.strerror or error} (SHOAL_HOME chooses it)") from error


@contextmanager
def _locked(path: Path, progress: ProgressCallback) -> Iterator[None]:
    with path.open("w") as file:
        limit = time.monotonic() + LOCK_LIMIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > limit:
                    raise ModelError(
                        f"another process has been pulling this model for too long (lock: {path})"
                    ) from None
                progress(Progress("wait", 0, 0))
                time.sleep(LOCK_POLL_S)
        yield


def _sync(folder: Path) -> None:
    """A power cut after the rename must not leave files without content behind a name that says complete."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
