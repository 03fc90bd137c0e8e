"""SEC-03: hostile input costs its sender an error, and nobody else anything."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from shoal.gateway import http
from shoal.gateway.errors import ApiError
from shoal.gateway.http import MAX_HEAD_BYTES
from shoal.gateway.prompts import Prompts
from shoal.gateway.text.template import ChatTemplate
from shoal.gateway.text.tokenizer import Tokenizer
from shoal.wire.messages import Update
from tests.gateway.stub import StubEngine, stage
from tests.support.gateways import MODEL, Service, service
from tests.support.processes import wait_until
from tests.support.scripted import Script
from tests.support.wires import until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ANSWER_S, GAP_S, HEALTH_S = 4.0, 1.0, 0.4  # twice what is promised: other tests run beside this one


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}]} | fields).encode()


def text(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "x"} | fields).encode()


def nested(levels: int) -> bytes:
    return b'{"model": "tiny", "messages": ' + b"[" * levels + b"]" * levels + b"}"


def schema(inner: bytes) -> bytes:
    form = b'{"type": "json_schema", "json_schema": {"name": "x", "schema": ' + inner + b"}}"
    return chat()[:-1] + b', "response_format": ' + form + b"}"


HOSTILE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "regex (a+)+$": (TEXT, lambda: text(structured_outputs={"regex": "(a+)+$"})),
    "regex (a|a)*b": (TEXT, lambda: text(guided_regex="(a|a)*b")),
    "regex x{1,100000}": (CHAT, lambda: chat(structured_outputs={"regex": "x{1,100000}"})),
    "tools": (CHAT, lambda: chat(tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="required")),
    "schema, 10 000 deep": (CHAT, lambda: schema(b'{"items": ' * 10_000 + b"1" + b"}" * 10_000)),
    "enum of 1 MB": (CHAT, lambda: schema(json.dumps({"enum": ["x" * 9] * 80_000}).encode())),
    "JSON, 100 000 deep": (CHAT, lambda: nested(100_000)),
    "unclosed, 4 MB deep": (CHAT, lambda: b"[" * ((4 << 20) - 1)),
    "number of 4 MB": (TEXT, lambda: b'{"model": "tiny", "prompt": "x", "n": ' + b"9" * 4_000_000 + b"}"),
    "body of 50 MB": (TEXT, lambda: b"x" * (50 << 20)),
    "duplicate keys": (TEXT, lambda: b'{"model": "tiny", "prompt": "x", "n": 1, "n": 1000000}'),
    "n": (TEXT, lambda: text(n=1_000_000)),
    "top_logprobs": (CHAT, lambda: chat(logprobs=True, top_logprobs=100_000)),
    "logprobs": (TEXT, lambda: text(logprobs=-1)),
    "stops": (TEXT, lambda: text(stop=[str(n) for n in range(100_000)])),
    "logit_bias": (TEXT, lambda: text(logit_bias={str(n): 1 for n in range(100_000)})),
    "logit_bias beyond the body": (TEXT, lambda: text(logit_bias={str(n): 1 for n in range(1_000_000)})),
    "template arguments": (
        CHAT,
        lambda: chat(
            chat_template_kwargs={"tokenize": True, "chat_template": "{% for i in range(10**9) %}{% endfor %}"}
        ),
    ),
    "template": (CHAT, lambda: chat(chat_template="{% for i in range(10**9) %}{% endfor %}")),
    "1 MB of one character": (TEXT, lambda: text(prompt="a" * 1_000_000)),
    "1 MB of one character in a message": (CHAT, lambda: chat(messages=[{"role": "user", "content": "a" * 1_000_000}])),
}


class Background:
    """Streams that go on in threads of their own, the largest gap in them, and how long /health took each time."""

    def __init__(self, s: Service, count: int) -> None:
        self.largest_gap_s = 0.0
        self.health_s: list[float] = []
        self.failed: list[str] = []
        self._stop = threading.Event()
        self._service = s
        self._threads = [threading.Thread(target=self._follow) for _ in range(count)]
        self._threads.append(threading.Thread(target=self._watch_health))

    def __enter__(self) -> Background:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(10)

    def _follow(self) -> None:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 4000, "stream": True}
        with closing(self._service.post(TEXT, body)) as sock:
            last = None
            while not self._stop.is_set():
                piece = sock.recv(65536)
                now = time.monotonic()
                if last is not None:
                    self.largest_gap_s = max(self.largest_gap_s, now - last)
                last = now
                if not piece or b'"error"' in piece:
                    self.failed.append(repr(piece))
                    return

    def _watch_health(self) -> None:
        while not self._stop.wait(0.05):
            began = time.monotonic()
            if self._service.call("/health").status != 200:
                self.failed.append("health")
            self.health_s.append(time.monotonic() - began)


@pytest.mark.processes
def test_sec_03_hostile_bodies(model_dir: Path) -> None:
    with service(model_dir, Script(step_ms=50)) as s:
        memory = psutil.Process(s.gateway.pid).memory_info
        bodies = {name: (path, make()) for name, (path, make) in HOSTILE.items()}
        _send_all(s, bodies)
        _whole_set(s, bodies)  # warms up: code, arenas, threads
        before = memory().rss
        with Background(s, 8) as background:
            wait_until(lambda: s.engine_count("num_requests_running") == 8)
            _whole_set(s, bodies)
        assert not background.failed
        assert background.largest_gap_s < GAP_S
        assert sorted(background.health_s)[-2] < HEALTH_S  # one outlier may be the machine's
        wait_until(lambda: memory().rss < 1.1 * before, 10, lambda: f"{before} bytes before, {memory().rss} after")
        assert s.call("/ready").status == 200


def _whole_set(s: Service, bodies: dict[str, tuple[str, bytes]]) -> None:
    _send_all(s, bodies)
    _giant_headers(s)
    with _idle_connections(s, 2000):
        assert s.call("/health").status == 200
        assert s.complete("x", max_tokens=1).status == 200


def _send_all(s: Service, bodies: dict[str, tuple[str, bytes]]) -> None:
    for name, (path, body) in bodies.items():
        began = time.monotonic()
        reply = s.call(path, body)
        assert 400 <= reply.status < 500 and reply.error["message"], name
        assert time.monotonic() - began < ANSWER_S, name


def _giant_headers(s: Service) -> None:
    for start, piece in ((b"x: ", b"a" * 65536), (b"x: y\r\n", b"x: y\r\n" * 10_000), (b"GET /", b"a" * 65536)):
        began = time.monotonic()
        with closing(s.connect()) as sock, suppress(ConnectionError):  # closed while we still send
            sock.sendall((b"" if start == b"GET /" else b"GET /health HTTP/1.1\r\nhost: x\r\n") + start)
            for _ in range((64 << 20) // len(piece)):
                sock.sendall(piece)
            raise AssertionError("64 MB of headers were read")
        assert time.monotonic() - began < ANSWER_S


@contextmanager
def _idle_connections(s: Service, count: int) -> Iterator[None]:
    """Opened and closed in bunches: it is about how many there are, not about how fast they come."""
    with ExitStack() as sockets:
        for number in range(count):
            sockets.enter_context(closing(s.connect()))
            if number % 50 == 0:
                assert s.call("/health").status == 200
        yield


# -- the same limits one by one, with shorter times --------------------------------------------------------------------


async def _exchange(port: int, data: bytes) -> bytes:
    """Sends, and reads until the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(), 5)
    finally:
        writer.close()


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * MAX_HEAD_BYTES, "headers_too_large"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n", "headers_too_large"),
        (b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nhost: x\r\n\r\n", "headers_too_large"),
        (b"nonsense\r\n\r\n", "bad_http"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", "bad_http"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", "bad_http"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab", "bad_http"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", "bad_http"),
        (b"GET /health HTTP/1.1\nhost: x\n\n", "bad_http"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n", "bad_http"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding:\r\n chunked\r\n\r\n0\r\n\r\n", "bad_http"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx: a\r\n b\r\n\r\n", "bad_http"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\nx: a\0b\r\n\r\n", "bad_http"),
        (b"GET /health HTTP/1.1\r\nhost : x\r\n\r\n", "bad_http"),
        (b"GET /health HTTP/1.1\r\n\r\n", "bad_http"),
        (b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n", "bad_http"),
    ],
)
async def test_sec_03_heads_are_refused_and_the_connection_closed(
    model_dir: Path, folder: Path, head: bytes, code: str
) -> None:
    async with stage(model_dir, folder) as s:
        answer = await _exchange(_port(s.url), head)
        assert (
            answer.startswith(b"HTTP/1.1 4") and json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == code
        )


async def test_sec_03_slow_heads_bodies_and_readers_are_cut(
    model_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "HEAD_S", 0.3)
    monkeypatch.setattr("shoal.gateway.body.MAX_BODY_S", 0.3)
    async with stage(model_dir, folder) as s:
        port = _port(s.url)
        assert await _exchange(port, b"") == b""  # a connection that says nothing
        assert await _exchange(port, b"GET /health HTTP/1.1\r\nhost: x\r\nx: ") == b""
        second = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" + b"GET /heal"
        assert (await _exchange(port, second)).count(b"HTTP/1.1 ") == 1
        body = await _exchange(port, b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        assert b"408" in body.split(b"\r\n")[0] and b"body_timeout" in body


async def test_sec_03_a_client_that_does_not_read_is_cut(
    model_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "SLOW_READER_S", 0.3)
    engine = StubEngine(lambda engine, specs: None, max_model_len=100_000)
    async with stage(model_dir, folder, engine) as s:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", _port(s.url)))
        body = text(stream=True)
        head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        await asyncio.get_running_loop().sock_sendall(sock, head + body)
        with closing(sock):
            async with asyncio.timeout(10):
                index = 0
                while not engine.aborted:
                    if engine.submitted:
                        engine.say(Update(engine.submitted[0].id, index + n, (100,)) for n in range(200))
                        index += 200
                    await asyncio.sleep(0.01)
        assert engine.aborted == [(engine.submitted[0].id, "client_disconnect")]


async def test_sec_03_connections_are_limited(model_dir: Path, folder: Path) -> None:
    async with stage(model_dir, folder, max_connections=3) as s:
        port = _port(s.url)
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert b"too_many_connections" in await _exchange(port, b"")
        for _, writer in held:
            writer.close()
        await until(lambda: len(s.gateway._server.server_state.connections) < 3)
        assert await s.status("/health") == 200


async def test_sec_03_one_address_cannot_take_every_connection(model_dir: Path, folder: Path) -> None:
    async with stage(model_dir, folder, max_connections_per_address=2) as s:
        port = _port(s.url)
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        assert b"connections of your address" in await _exchange(port, b"")
        elsewhere = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.9", 0))
        elsewhere[1].write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert b" 200 " in await elsewhere[0].read()
        for _, writer in (*held, elsewhere):
            writer.close()
        counts = s.gateway._server.config.http_protocol_class.num_of
        await until(lambda: counts["127.0.0.1"] <= 1)  # the test's own client
        assert await s.status("/health") == 200
        assert set(counts) <= {"127.0.0.1"}


async def test_sec_03_requests_that_wait_behind_another_are_limited(model_dir: Path, folder: Path) -> None:
    """An answer that is being sent is never followed by another one's error in its middle."""
    engine = StubEngine(lambda engine, specs: engine.say([Update(specs[0].id, 0, (100,))]))
    async with stage(model_dir, folder, engine) as s:
        body = text(stream=True)
        first = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        for behind in (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * (http.MAX_WAITING + 1), b"nonsense\r\n\r\n"):
            engine.aborted.clear()
            reader, writer = await asyncio.open_connection("127.0.0.1", _port(s.url))
            writer.write(first)
            await asyncio.wait_for(reader.readuntil(b"data: "), 5)
            writer.write(behind)
            assert b"HTTP/1.1" not in await asyncio.wait_for(reader.read(), 5)
            await until(lambda: engine.aborted)
            writer.close()


async def test_sec_03_a_large_body_without_a_length_is_cut_off(model_dir: Path, folder: Path) -> None:
    async def endless() -> Any:
        for _ in range(200):
            yield b"x" * 65536

    async with (
        stage(model_dir, folder, max_body_bytes=1 << 20) as s,
        s.http.post(s.url + TEXT, data=endless()) as answer,
    ):
        assert answer.status == 413 and str(1 << 20) in await answer.text()


def test_sec_03_tokenising_takes_no_longer_than_the_text(tokenizer: Tokenizer) -> None:
    """The worst text for byte-pair merging is one repeated character; quadratic work would take minutes."""
    began = time.perf_counter()
    tokenizer.encode("t" * 1_000_000)
    assert time.perf_counter() - began < 20


async def test_sec_03_a_template_that_makes_much_of_little_is_refused_before_it_is_tokenised(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = Prompts(tokenizer, ChatTemplate("{{ messages[0].content * 1000000 }}", {}))
    monkeypatch.setattr(tokenizer, "encode", None)
    with pytest.raises(ApiError, match="3000000 bytes"):
        await prompts.chat([{"role": "user", "content": "abc"}], window=128)
