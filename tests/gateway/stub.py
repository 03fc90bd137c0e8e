"""A gateway and stub engines in this process: the real wire and HTTP, and engines that say what a test tells them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from shoal.core.classes import DEFAULT_CLASSES, ServiceClass
from shoal.core.plan import ClassView
from shoal.core.request import Finish, RequestSpec
from shoal.gateway.auth import Keys
from shoal.gateway.config import GatewayConfig
from shoal.gateway.link import Identity
from shoal.gateway.main import Gateway
from shoal.gateway.params import advised_sampling
from shoal.gateway.prompts import Prompts
from shoal.gateway.text.template import ChatTemplate
from shoal.gateway.text.tokenizer import Tokenizer
from shoal.wire import address
from shoal.wire.connection import Connection, ConnectionClosed
from shoal.wire.listener import Listener, listen
from shoal.wire.messages import Abort, Ending, EngineInfo, Frame, KeepAlive, Message, Refusing, Submit, Update
from tests.support.wires import SECRET, VIEW, until

MODEL = "tiny"


@dataclass
class StubEngine:
    """`on_submit(engine, specs)` is called for each submission, and answers by `say` whenever it likes."""

    on_submit: Callable[[StubEngine, Sequence[RequestSpec]], Any] = lambda engine, specs: engine.answer(specs)
    max_model_len: int = 128
    vocab_size: int = 288
    ready: bool = True
    step: int = 0
    submitted: list[RequestSpec] = field(default_factory=list)
    aborted: list[tuple[str, str]] = field(default_factory=list)  # (id, reason)
    num_keep_alives: int = 0
    connection: Connection | None = None
    num_connections: int = 0
    waiting: dict[str, int] = field(default_factory=dict)  # by class, as its view says

    def say(self, updates: Iterable[Update] = (), refused: Iterable[Refusing] = (), num_running: int = 0) -> None:
        self.step += 1
        classes = {name: ClassView(0, count, 0, 0) for name, count in self.waiting.items()}
        view = replace(VIEW, step=self.step, num_running=num_running, classes=classes)
        self.tell(Frame(view=view, updates=tuple(updates), refused=tuple(refused), ready=self.ready))

    def tell(self, message: Message) -> None:
        assert self.connection is not None
        self.connection.send(message)

    def answer(self, specs: Sequence[RequestSpec], tokens: tuple[int, ...] = (100, 101)) -> None:
        self.say(Update(spec.id, 0, tokens, ending=Ending(Finish.LENGTH, None, 0)) for spec in specs)

    def drop(self) -> None:
        assert self.connection is not None
        self.connection.close()

    async def serve(self, connection: Connection) -> None:
        self.connection = connection
        self.num_connections += 1
        self.say()
        with contextlib.suppress(ConnectionClosed):
            while True:
                match await connection.receive():
                    case Submit(specs=specs):
                        self.submitted += specs
                        self.on_submit(self, specs)
                    case Abort(ids=ids, reason=reason):
                        self.aborted += [(id, reason) for id in ids]
                    case KeepAlive():
                        self.num_keep_alives += 1

    async def listen(self, address: str) -> Listener:
        info = EngineInfo(
            model=MODEL,
            model_digest="d",
            hash_root=b"root",
            hash_block_tokens=16,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
        )
        return await listen(address, secret=SECRET, incarnation="stub", welcome=lambda: info, handler=self.serve)


@dataclass
class Stage:
    """The gateway under test, and a client of it."""

    url: str
    gateway: Gateway
    http: aiohttp.ClientSession

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json={"model": MODEL} | body) as answer:
            text = await answer.text()
            return answer.status, text if answer.content_type == "text/event-stream" else await answer.json()

    async def complete(self, **body: Any) -> tuple[int, Any]:
        return await self.post("/v1/completions", **{"prompt": "hello"} | body)

    async def status(self, path: str) -> int:
        async with self.http.get(self.url + path) as answer:
            return answer.status


@asynccontextmanager
async def stage(
    model_dir: Path,
    folder: Path,
    *engines: StubEngine,
    keys: Keys | None = None,
    classes: Mapping[str, ServiceClass] = DEFAULT_CLASSES,
    **config: Any,
) -> AsyncIterator[Stage]:
    """Engine n listens at folder/n.sock. Ends with everything closed."""
    addresses = [f"unix:{folder}/{number}.sock" for number in range(len(engines))]
    listeners = [await engine.listen(at) for engine, at in zip(engines, addresses, strict=True)]
    gateway = Gateway(
        GatewayConfig(**({"port": 0, "batch_dir": f"{folder}/batches"} | config)),
        keys=keys or Keys([]),
        classes=classes,
        prompts=Prompts(Tokenizer.load(model_dir), ChatTemplate.load(model_dir)),
        advised=advised_sampling(model_dir),
        served_name=MODEL,
        identity=Identity(name="gateway-0", incarnation="g", secret=SECRET),
        controller="",
        engines=tuple(addresses),
    )
    sock = address.bind_tcp("127.0.0.1", 0)
    sock.listen()
    url = address.http_url(*sock.getsockname())
    serving = asyncio.create_task(gateway.run(sock))
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http:
            made = Stage(url, gateway, http)
            await until(lambda: all(engine.connection is not None for engine in engines))
            if any(engine.ready for engine in engines):
                await until(lambda: gateway._replicas.ready)
            yield made
    finally:
        gateway.drain()
        await asyncio.wait_for(serving, 15)
        for listener in listeners:
            await listener.close()
