"""One child process that is kept alive: started, watched, started again by fleet.lifecycle's rules, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from shoal.fleet.lifecycle import TRANSITIONS, Life, Restarts
from shoal.wire.messages import Supervised

_LAST_LINES = 20
_NOT_STARTED = 127  # exit status, as a shell says it
_MAX_LINE_BYTES = 16 << 10
_OUTPUT_S = 1.0  # after its end, for what is left in the pipe
_KILL_S = 5.0  # for the kernel to end what was killed


class Child:
    """`say` gets each line of its output, `changed` is called whenever `report` would say something else."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        inherit: Sequence[int],
        say: Callable[[str, str], None],
        changed: Callable[[], None],
    ) -> None:
        self.name = name
        self.state = Life.RUNNING
        self.died = asyncio.Event()  # at least once, without having been asked to
        self.cause = ""
        self._command = command
        self._env = env
        self._inherit = inherit
        self._say = say
        self._changed = changed
        self._restarts = Restarts()
        self._num_restarts = 0
        self._process: asyncio.subprocess.Process | None = None
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._stopping = asyncio.Event()
        self._over = asyncio.Event()

    def report(self) -> Supervised:
        pid = self._process.pid if self._process is not None and self.state is Life.RUNNING else 0
        return Supervised(name=self.name, state=self.state, pid=pid, restarts=self._num_restarts, cause=self.cause)

    async def run(self) -> None:
        """Until `stop`."""
        while True:
            code = await self._live()
            if self._stopping.is_set():
                break
            self.cause = self._explain(code)
            wait_ns = self._restarts.died(time.monotonic_ns())
            if wait_ns is None:
                self._say(self.name, f"{self.cause}; again and again, so it stays down")
            else:
                self._say(self.name, f"{self.cause}; starts again in {wait_ns / 1e9:g} s")
            self._enter(Life.PARKED if wait_ns is None else Life.BACKING_OFF)
            self.died.set()
            if await _within(self._stopping, None if wait_ns is None else wait_ns / 1e9):
                break
            self._num_restarts += 1
            self._enter(Life.RUNNING)
        self._enter(Life.STOPPED)
        self._over.set()

    async def stop(self, limit_s: float) -> None:
        """SIGTERM, and SIGKILL at the limit. `run` has returned then."""
        self._stopping.set()
        if self.state is Life.RUNNING:
            self._enter(Life.STOPPING)
            self._signal(signal.SIGTERM)
        if not await _within(self._over, limit_s):
            self._say(self.name, f"did not end within {limit_s:g} s and is killed")
            self.kill()
            await _within(self._over, _KILL_S)

    def kill(self) -> None:
        """The process and whatever it started."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _live(self) -> int:
        """One life: from start to exit status."""
        self._restarts.started(time.monotonic_ns())
        self._last_lines.clear()
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=self._env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                pass_fds=self._inherit,
            )
        except OSError as e:
            self._last_lines.append(f"cannot be started: {e}")
            return _NOT_STARTED
        self._changed()
        if self._stopping.is_set():
            self._signal(signal.SIGTERM)  # asked to stop while it was being started
        reading = asyncio.create_task(self._read(process))
        code = await process.wait()
        await asyncio.wait({reading}, timeout=_OUTPUT_S)
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        return code

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        rest = b""
        while data := await process.stdout.read(1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                lines.append(rest)
                rest = b""
            for line in lines:
                self._take_line(line)
        if rest:
            self._take_line(rest)

    def _take_line(self, line: bytes) -> None:
        text = line[:_MAX_LINE_BYTES].decode("utf-8", "replace").rstrip()
        if text:
            self._last_lines.append(text)
            self._say(self.name, text)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _explain(self, code: int) -> str:
        """ "killed by SIGKILL", or the exit status with the last line that it wrote."""
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}"
            return f"killed by signal {-code}"
        last = next((line for line in reversed(self._last_lines) if not line.startswith(" ")), "")
        return f"exit status {code}: {last[:300]}" if last else f"exit status {code}"

    def _enter(self, state: Life) -> None:
        assert state in TRANSITIONS[self.state], (self.state, state)
        self.state = state
        self._changed()


async def _within(event: asyncio.Event, limit_s: float | None) -> bool:
    """It happened within the limit; None: however long it takes."""
    try:
        await asyncio.wait_for(event.wait(), limit_s)
        return True
    except TimeoutError:
        return False
