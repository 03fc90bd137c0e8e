"""The private folder of one running service: sockets and configuration. It goes when the service goes.

A supervisor that was killed cannot remove its folder, so the next one does: the lock inside says whether it is in use.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_NEW, _PREFIX = "shoal-new-", "shoal-run-"  # it gets the second name once it is locked
_LOCK = "lock"


@contextlib.contextmanager
def runtime_folder() -> Iterator[Path]:
    """Mode 0700, an unpredictable name, locked for as long as this process lives."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    new = Path(tempfile.mkdtemp(prefix=_NEW))
    lock = os.open(new / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    path = new.rename(new.with_name(new.name.replace(_NEW, _PREFIX)))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    """Folders of this user whose lock nobody holds."""
    for path in parent.glob(_PREFIX + "*"):
        with contextlib.suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(lock)
