"""Real processes for tests: start, wait for a condition, stop, and see that nothing is left behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

from tests.support.scripted import Script

ROOT = Path(__file__).parents[2]
_T = TypeVar("_T")
SECRET = "a secret of the tests"


class Process:
    """A child with its output captured: `text` is what it wrote so far, to stdout and stderr."""

    def __init__(self, command: Sequence[str], env: dict[str, str] | None = None, **popen: object) -> None:
        environment = {
            **os.environ,
            "SHOAL_SECRET": SECRET,
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        self.popen: subprocess.Popen[str] = subprocess.Popen(  # type: ignore[call-overload]
            list(command),
            env=environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            **popen,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        return "".join(self.lines)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def wait_line(self, pattern: str, limit_s: float = 20.0) -> re.Match[str]:
        """Waits for output that matches; fails at once where the process is over without it."""

        def look() -> re.Match[str] | None:
            found = re.search(pattern, self.text)
            if found is None and self.popen.poll() is not None and not self._reader.is_alive():
                raise AssertionError(f"exit status {self.popen.returncode} without {pattern!r}:\n{self.text}")
            return found

        found = wait_until(look, limit_s, lambda: f"no {pattern!r} in:\n{self.text}")
        assert isinstance(found, re.Match)
        return found

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(number)

    def wait(self, limit_s: float = 20.0) -> int:
        """Exit status; the limit is a failure."""
        code = self.popen.wait(limit_s)
        self._reader.join(5.0)
        return code

    def stop(self, limit_s: float = 20.0) -> int:
        self.kill(signal.SIGTERM)
        try:
            return self.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self.popen.wait(5.0)
            raise AssertionError(f"did not stop within {limit_s} s:\n{self.text}") from None

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with self.popen.stdout as stream:
            for line in stream:
                self.lines.append(line)


@contextmanager
def running(command: Sequence[str], env: dict[str, str] | None = None, **popen: object) -> Iterator[Process]:
    """Killed with all its descendants at the end, if the test has not stopped it."""
    process = Process(command, env, **popen)
    try:
        yield process
    finally:
        family = descendants(process.pid)
        process.kill()
        for child in family:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.popen.wait(10.0)
        process._reader.join(5.0)


@contextmanager
def scripted_engine(
    script: Script | None = None, *, listen: str, name: str = "engine-0", controller: str = ""
) -> Iterator[Process]:
    """A real engine process with a scripted runner; its log line "engine.serving" has been seen."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "script.json"
        path.write_bytes(msgspec.json.encode(script or Script()))
        command = [sys.executable, "-m", "tests.support.scripted_engine", "--listen", listen, "--name", name]
        command += ["--script", str(path)] + (["--controller", controller] if controller else [])
        with running(command) as process:
            process.wait_line(r"engine\.serving")
            yield process


@contextmanager
def socket_folder() -> Iterator[Path]:
    """A private folder with a short path: a Unix socket's path has at most 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="shoal-t-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def wait_until(look: Callable[[], _T], limit_s: float = 10.0, say: Callable[[], str] = lambda: "") -> _T:
    """The first true value of `look`."""
    end = time.monotonic() + limit_s
    while not (value := look()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {limit_s} s: {say()}")
        time.sleep(0.01)
    return value


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; a zombie is over."""
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def listening(pid: int) -> list[str]:
    """What a process listens on: "host:port" or the path of a Unix socket."""
    found = []
    for c in psutil.Process(pid).net_connections(kind="all"):
        if c.family.name == "AF_UNIX":
            if c.laddr and c.type == 1:
                found.append(str(c.laddr))
        elif c.status == psutil.CONN_LISTEN:
            found.append(f"{c.laddr.ip}:{c.laddr.port}")
    return sorted(set(found))
