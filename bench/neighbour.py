"""Engine processes of the default model that lend KV to others, and a session with one, such as a gateway has.

As a program it is one of them: python bench/neighbour.py SETTINGS, which are those of `process` as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import IO, Any, NamedTuple

from shoal import models
from shoal.core.request import Peer, RequestSpec, Sampling
from shoal.engine.transfer.shm import Shm
from shoal.engine.transfer.tcp import Tcp
from shoal.engine.transfer.transport import Transport
from shoal.wire import lifeline
from shoal.wire.connection import Connection, ConnectionClosed, dial
from shoal.wire.messages import Frame, KeepAlive, Role, Submit, Welcome

SECRET = b"of the bench"
START_S, ANSWER_S = 120.0, 300.0  # a busy machine is slow
TRANSPORTS: dict[str, tuple[Callable[[], Transport], ...]] = {"shm": (Shm,), "tcp": (Tcp,), "both": (Shm, Tcp)}


class Answer(NamedTuple):
    ttft_s: float
    tokens: tuple[int, ...]
    cached_tokens: int


class Neighbour:
    """A session with one engine process. One request at a time."""

    def __init__(self, address: str, connection: Connection) -> None:
        self.address = address
        welcome = connection.peer
        assert isinstance(welcome, Welcome) and welcome.engine is not None
        self.info = welcome.engine
        self._incarnation = welcome.incarnation
        self._connection = connection
        self._num_asked = 0

    def peer(self, num_tokens: int) -> Peer:
        """As another engine is told of it that it holds the beginning of a prompt."""
        return Peer(self.info.peers, self._incarnation, num_tokens // self.info.hash_block_tokens)

    async def ask(self, prompt: Sequence[int], *, peer: Peer | None = None) -> Answer:
        """One token, greedy."""
        self._num_asked += 1
        id = f"{self._num_asked}.0"
        sampling = Sampling(temperature=0)
        spec = RequestSpec(id=id, prompt=tuple(prompt), max_tokens=1, sampling=sampling, peer=peer)
        began = time.perf_counter()
        self._connection.send(Submit(specs=(spec,)))
        ttft_s, tokens = 0.0, list[int]()
        async with asyncio.timeout(ANSWER_S):
            while True:
                frame = await self._connection.receive()
                if not isinstance(frame, Frame):
                    continue
                assert not frame.refused, frame.refused
                for update in frame.updates:
                    if update.id != id:
                        continue
                    if update.tokens:
                        ttft_s = ttft_s or time.perf_counter() - began
                        tokens += update.tokens
                    if update.ending is not None:
                        return Answer(ttft_s, tuple(tokens), update.ending.cached_tokens)

    async def stay(self) -> None:
        """The engine hears of this side until the connection ends."""
        while not self._connection.closed:
            self._connection.send(KeepAlive())
            await asyncio.sleep(1.0)


@asynccontextmanager
async def process(
    name: str, *, transport: str = "tcp", core: int | None = None, **options: Any
) -> AsyncIterator[Neighbour]:
    """It serves. `core`: the only one that it may use; `options` are fields of EngineConfig."""
    models.pull(models.DEFAULT)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder, tempfile.TemporaryFile() as log:
        listen = f"unix:{folder}/{name}.sock"
        settings = {"name": name, "listen": listen, "transport": transport, "core": core, "options": options}
        command = [sys.executable, __file__, json.dumps(settings)]
        ended, alive = os.pipe()  # it ends with the bench, however that does
        environment = os.environ | {lifeline.VARIABLE: str(ended)}
        child = await asyncio.create_subprocess_exec(*command, stderr=log, env=environment, pass_fds=(ended,))
        os.close(ended)
        staying: asyncio.Task[None] | None = None
        try:
            neighbour = Neighbour(listen, await _connect(listen, child, log))
            staying = asyncio.create_task(neighbour.stay())
            yield neighbour
        finally:
            if staying is not None:
                staying.cancel()
            with suppress(ProcessLookupError):
                child.terminate()
            await child.wait()
            os.close(alive)


@asynccontextmanager
async def processes(*settings: dict[str, Any]) -> AsyncIterator[list[Neighbour]]:
    """Several, started at once; `settings` are the arguments of `process`."""
    async with AsyncExitStack() as stack:
        yield await asyncio.gather(*(stack.enter_async_context(process(**each)) for each in settings))


async def _connect(address: str, child: asyncio.subprocess.Process, log: IO[bytes]) -> Connection:
    """When it listens, which it does when it can compute."""
    async with asyncio.timeout(START_S):
        while child.returncode is None:
            with suppress(OSError, ConnectionClosed):
                return await dial(address, role=Role.GATEWAY, name="bench", incarnation="1", session=1, secret=SECRET)
            await asyncio.sleep(0.05)
    log.seek(0)
    raise SystemExit(f"an engine process ended before it served:\n{log.read().decode()}")


def main() -> None:
    settings = json.loads(sys.argv[1])
    if settings["core"] is not None:
        os.sched_setaffinity(0, {settings["core"]})
    from shoal.engine import main as engine_main
    from shoal.engine import process as engine_process
    from shoal.engine.config import EngineConfig
    from shoal.engine.transfer.peers import Peers
    from shoal.telemetry import logs

    logs.setup(settings["name"])
    lifeline.watch()

    def build() -> engine_process.Parts:
        """As every engine, but with these transports alone."""
        config = EngineConfig(**settings["options"])
        parts = engine_main.build(models.pull(models.DEFAULT), config, models.DEFAULT)
        runner: Any = parts.runner
        transports = [make() for make in TRANSPORTS[settings["transport"]]]
        most = config.peer_max_bytes_per_s
        peers = Peers(runner.blocks, config.peer_address, transports, max_bytes_per_s=most)
        return replace(parts, peers=peers)

    engine = engine_process.Engine(
        build, name=settings["name"], listen=settings["listen"], controller="", secret=SECRET
    )
    raise SystemExit(engine_process.run(engine))


if __name__ == "__main__":
    main()
