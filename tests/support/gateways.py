"""A real gateway process in front of real engine processes with scripted runners, and ways to look at them."""

from __future__ import annotations

import json
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import openai
from prometheus_client.parser import text_string_to_metric_families

from tests.support.processes import Process, running, scripted_engine, socket_folder, wait_until
from tests.support.scripted import Script

MODEL = "tiny"


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body, parse_constant=_no_json)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        return error

    @property
    def events(self) -> list[Any]:
        """Payloads of an event stream; the last one "[DONE]" where it came."""
        lines = [line for line in self.body.decode().split("\n\n") if line and not line.startswith(":")]
        assert all(line.startswith("data: ") for line in lines), lines
        return [line if (line := text[6:]) == "[DONE]" else json.loads(line) for text in lines]


def _reply(status: int, answer: Any) -> Reply:
    return Reply(status, {name.lower(): value for name, value in answer.headers.items()}, answer.read())


def _no_json(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@dataclass(frozen=True)
class Service:
    url: str
    gateway: Process
    engines: list[Process]

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="a-key", max_retries=0, timeout=20)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def call(
        self, path: str, body: Any = None, *, method: str | None = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """`body`: bytes as they are, anything else as JSON. A body makes it a POST."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = Request(self.url + path, data, headers or {}, method=method)
        try:
            with urlopen(request, timeout=20) as answer:
                return _reply(answer.status, answer)
        except HTTPError as e:
            with e:
                return _reply(e.code, e)

    def complete(self, prompt: Any, **fields: Any) -> Reply:
        return self.call("/v1/completions", {"model": MODEL, "prompt": prompt, **fields})

    def chat(self, content: str, **fields: Any) -> Reply:
        messages = [{"role": "user", "content": content}]
        return self.call("/v1/chat/completions", {"model": MODEL, "messages": messages, **fields})

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def post(self, path: str, body: Any, *headers: str) -> socket.socket:
        """Sends a request, the only one of its connection, and leaves the answer to the caller."""
        data = json.dumps(body).encode()
        lines = (f"POST {path} HTTP/1.1", "host: x", "connection: close", f"content-length: {len(data)}", *headers)
        sock = self.connect()
        sock.sendall("\r\n".join((*lines, "", "")).encode() + data)
        return sock

    def counts(self, name: str) -> dict[str, float]:
        """Values of one of the gateway's metrics by its last label ("" where it has none), summed over the others."""
        return metric(f"{self.url}/metrics", name)

    def engine_count(self, name: str, number: int = 0) -> float:
        url = self.engines[number].wait_line(r"metrics=(\S+)")[1]
        return metric(url, name)[""]

    def balanced(self) -> bool:
        """received = ok + failed + refused + aborted"""
        kinds = ("success", "failure", "refused", "aborted")
        ended = sum(sum(self.counts(f"request_{kind}_total").values()) for kind in kinds)
        return self.counts("requests_received_total")[""] == ended


def metric(url: str, name: str) -> dict[str, float]:
    with urlopen(url, timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples if sample.name == f"shoal:{name}"):
        *_, value = ("", *sample.labels.values())
        found[value] = found.get(value, 0.0) + sample.value
    return found


@contextmanager
def gateway_process(
    model_dir: Path, engines: Sequence[str], *options: str, env: dict[str, str] | None = None
) -> Iterator[tuple[str, Process]]:
    command = [sys.executable, "-m", "shoal.cli", "gateway", "--model", str(model_dir), "--served-model-name", MODEL]
    command += ["--port", "0", *(part for address in engines for part in ("--engine", address))]
    with (
        tempfile.TemporaryDirectory() as folder,
        running([*command, "--batch-dir", f"{folder}/batches", *options], env) as process,
    ):
        yield process.wait_line(r"gateway\.serving url=(\S+)")[1], process


@contextmanager
def service(
    model_dir: Path, *scripts: Script, options: Sequence[str] = (), env: dict[str, str] | None = None
) -> Iterator[Service]:
    """One engine a script. At the end everything must stop by itself, with every invariant whole."""
    with ExitStack() as stack:
        folder = stack.enter_context(socket_folder())
        addresses = [f"unix:{folder}/e{number}.sock" for number in range(len(scripts))]
        url, gateway = stack.enter_context(gateway_process(model_dir, addresses, *options, env=env))
        engines = [
            stack.enter_context(scripted_engine(script, listen=address, name=f"engine-{number}"))
            for number, (script, address) in enumerate(zip(scripts, addresses, strict=True))
        ]
        made = Service(url, gateway, engines)
        if scripts:
            wait_until(lambda: made.call("/ready").status == 200, 10, lambda: gateway.text)
        yield made
        assert gateway.stop() == 0, gateway.text
        for engine in engines:
            if engine.popen.poll() is None:
                assert engine.stop() == 0, engine.text


def read_all(sock: socket.socket) -> bytes:
    """Until the other side closes."""
    with closing(sock):
        pieces = []
        while piece := sock.recv(65536):
            pieces.append(piece)
        return b"".join(pieces)


def unchunked(answer: bytes) -> bytes:
    """The body of an answer in chunks, whatever interim answers came before it."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    while head.startswith(b"HTTP/1.1 1"):
        head, _, rest = rest.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head, head
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not int(size, 16):
            return body
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
