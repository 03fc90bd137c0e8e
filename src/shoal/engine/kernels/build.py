"""Compiles the kernels for this very processor and keeps the library in shoal's cache.

A library made with -march=native must not travel to another machine, so none is shipped: the file's name is a hash of
sources, flags, compiler and processor. It is looked up first, so a machine compiles once.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from shoal.fetch.home import shoal_home

FLAGS = ("-O3", "-march=native", "-std=c++20", "-fPIC", "-shared", "-pthread")
COMPILERS = ("g++", "clang++", "c++")
LIMIT_S = 120.0
_HERE = Path(__file__).parent


class Unavailable(Exception):
    """There are no kernels on this machine; the message says why."""


def library() -> Path:
    """The compiled library, made now if it has to be. Raises Unavailable."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise Unavailable(f"no C++ compiler: none of {', '.join(COMPILERS)} is installed")
    try:
        path = shoal_home() / "kernels" / f"{_key(compiler)}.so"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _compile(compiler, path)
        _require_trust(path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"cannot compile: {error}") from error
    return path


def _compile(compiler: str, target: Path) -> None:
    """Two processes may do this at once: each renames a whole file to the same name."""
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [compiler, *FLAGS, str(_HERE / "kernels.cpp"), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
            raise Unavailable(f"{compiler} failed: {first.strip()}")
        made.rename(target)


def _require_trust(path: Path) -> None:
    """The library becomes part of this process: only its own user or root may have been able to write it."""
    for place in (path, path.parent):
        status = place.stat()
        if status.st_uid not in (0, os.getuid()) or status.st_mode & 0o022:
            raise Unavailable(f"{place} can be written by other users")


def _key(compiler: str) -> str:
    digest = hashlib.blake2b(digest_size=12)
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=LIMIT_S, check=False).stdout
    for part in (*FLAGS, compiler, platform.machine(), _processor()):
        digest.update(part.encode() + b"\0")
    digest.update(version)
    for source in sorted((*_HERE.glob("*.h"), *_HERE.glob("*.cpp"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()


def _processor() -> str:
    """Model and features, of the first core."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split("\n\n", 1)[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(
        line for line in lines if line.startswith(("vendor_id", "cpu family", "model", "flags", "Features"))
    )
