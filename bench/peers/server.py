"""A server under test: a command and everything that it starts, which can be paused, weighed and surely ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from client import Request, Target, send, session
from peers.memory import Memory, weigh

END_LIMIT_S = 30.0  # from the wish to end to being killed
KILL_LIMIT_S = 10.0  # for the kernel to end what was killed
ATTEMPT_LIMIT_S = 120.0  # for the answer to one token, which a server just started may owe for long
RETRY_S = 0.1
LAST_LINES = 25
FIRST_TOKEN = Request(due_ns=0, prompt=tuple(range(100, 116)), output_tokens=1)


class Server:
    """Runs from here to `end`, in a session of its own: Ctrl-C in the terminal does not reach it."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], target: Target, log: Path
    ) -> None:
        self.name = name
        self.target = target
        self._log = log
        self._seen: set[psutil.Process] = set()  # whose parent ended still belongs to the server
        with log.open("wb") as output:
            self.started_ns = time.perf_counter_ns()
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._root = psutil.Process(self._process.pid)

    def pause(self) -> None:
        """Stop all processes, also those that were started while the first ones were being stopped."""
        paused: set[psutil.Process] = set()
        while new := self._running() - paused:
            for process in new:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
            paused |= new

    def resume(self) -> None:
        for process in self._running():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    async def until_it_answers(self, limit_s: float) -> float:
        """Seconds from its start to the first token of an answer; it is asked again and again until it gives one.

        Raises SystemExit with the end of its log where it ends, or does not answer in time.
        """
        limit = time.monotonic() + limit_s
        async with session() as http:
            while True:
                outcome = await send(http, self.target, 0, FIRST_TOKEN, 0, self.started_ns)
                if not outcome.error:
                    return outcome.chunk_ns[0] / 1e9
                if self._process.poll() is not None:
                    raise SystemExit(f"{self.name} ended with status {self._process.returncode}:\n{self.last_words()}")
                if time.monotonic() > limit:
                    raise SystemExit(
                        f"{self.name} did not answer within {limit_s:g} s ({outcome.error}: {outcome.detail}):\n"
                        f"{self.last_words()}"
                    )
                await asyncio.sleep(RETRY_S)

    def memory(self, pool_bytes: int) -> Memory:
        """Of all its processes together, paused or not."""
        return weigh([process.pid for process in self._running()], pool_bytes)

    def end(self) -> None:
        """Asked first, killed at the limit: nothing of it runs or lies stopped afterwards."""
        try:
            self.resume()
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(END_LIMIT_S)
        finally:
            self.kill()

    def kill(self) -> None:
        self.pause()  # or it could go on starting processes
        left = self._running()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.poll()
        psutil.wait_procs(left, KILL_LIMIT_S)

    def last_words(self) -> str:
        return "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:])

    def _running(self) -> set[psutil.Process]:
        for process in (self._root, *self._seen):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._seen |= {process, *process.children(recursive=True)}
        self._seen = {process for process in self._seen if _runs(process)}
        return set(self._seen)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
