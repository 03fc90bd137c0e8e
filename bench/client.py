"""One streamed completion against an OpenAI-compatible server, timed: the only part of the load driver that sends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
import msgspec

from shoal.workload.latency import Latency

MAX_LINE_BYTES = 1 << 20  # longest line of a stream that is still taken for one


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server and what is common to all requests to it."""

    url: str  # http://host:port, without /v1
    model: str  # served name
    api_key: str = field(default="", repr=False)
    timeout_s: float = 600.0  # for a whole answer, from sending
    body: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0, "ignore_eos": True})  # in every request


class Request(NamedTuple):
    due_ns: int  # from the start of the load
    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of one request: a line of the rows file. Times in nanoseconds from the start of the load."""

    index: int
    due_ns: int
    sent_ns: int
    asked_prompt: int  # tokens
    asked_output: int
    chunk_ns: list[int] = field(default_factory=list)  # arrival of each event that carried output
    end_ns: int = 0
    prompt_tokens: int = 0  # from `usage`
    output_tokens: int = 0
    error: str = ""  # kind; empty: answered in full
    detail: str = ""

    @property
    def latency(self) -> Latency:
        """Only for a request that was answered in full."""
        return Latency(self.due_ns, self.chunk_ns[0], self.chunk_ns[-1], self.output_tokens)


class Failure(Exception):
    """`kind` is what failures are counted by."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


def session() -> aiohttp.ClientSession:
    """No limit on connections; idle ones are closed before a server's own limit (uvicorn: 5 s) can race a request."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


async def served_model(http: aiohttp.ClientSession, url: str, api_key: str) -> str:
    """The first model that the server lists. Raises Failure."""
    try:
        async with asyncio.timeout(10), http.get(f"{url}/v1/models", headers=_headers(api_key)) as response:
            if response.status != 200:
                raise Failure(f"http_{response.status}", f"{url}/v1/models")
            listing = msgspec.json.decode(await response.read())
            return listing["data"][0]["id"]
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise Failure("connect", f"{url}/v1/models: {error or type(error).__name__}") from error
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        raise Failure("protocol", f"{url}/v1/models lists no model") from error


async def send(
    http: aiohttp.ClientSession, target: Target, index: int, request: Request, due_ns: int, start_ns: int
) -> Outcome:
    """Send now, read to the end. Never raises for what the server or the network did: that is the outcome's `error`.

    `start_ns` is the load's start on `time.perf_counter_ns`; `due_ns`, counted from it, is when this should have left.
    """
    outcome = Outcome(
        index=index,
        due_ns=due_ns,
        sent_ns=time.perf_counter_ns() - start_ns,
        asked_prompt=len(request.prompt),
        asked_output=request.output_tokens,
    )
    try:
        async with asyncio.timeout(target.timeout_s):
            await _stream(http, target, request, outcome, start_ns)
    except Failure as failure:
        outcome.error, outcome.detail = failure.kind, failure.detail
    except TimeoutError:
        outcome.error, outcome.detail = "timeout", f"no end after {target.timeout_s} s"
    except aiohttp.ClientConnectorError as error:
        outcome.error, outcome.detail = "connect", str(error)
    except (aiohttp.ClientError, OSError) as error:
        outcome.error, outcome.detail = "cut", str(error) or type(error).__name__
    outcome.end_ns = time.perf_counter_ns() - start_ns
    return outcome


async def _stream(
    http: aiohttp.ClientSession, target: Target, request: Request, outcome: Outcome, start_ns: int
) -> None:
    body = {
        **target.body,
        "model": target.model,
        "prompt": request.prompt,
        "max_tokens": request.output_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Content-Type": "application/json", **_headers(target.api_key)}
    async with http.post(f"{target.url}/v1/completions", data=msgspec.json.encode(body), headers=headers) as response:
        if response.status != 200:
            text = await response.content.read(1024)
            raise Failure(f"http_{response.status}", text.decode(errors="replace"))
        finished, usage = False, None
        async for data, at_ns in _events(response.content):
            if data == b"[DONE]":
                break
            try:
                chunk = _decode(data)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise Failure("protocol", f"{error}: {data[:200]!r}") from error
            if chunk.error is not None:
                raise Failure("error_event", str(chunk.error))
            if chunk.choices:
                outcome.chunk_ns.append(at_ns - start_ns)
                finished = finished or any(choice.finish_reason for choice in chunk.choices)
            usage = chunk.usage or usage
        else:
            raise Failure("cut", "the stream ended without [DONE]")
    if not finished:
        raise Failure("cut", "no finish_reason")
    if usage is None:
        raise Failure("no_usage", "the server ignores stream_options.include_usage")
    outcome.prompt_tokens, outcome.output_tokens = usage.prompt_tokens, usage.completion_tokens


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[tuple[bytes, int]]:
    """The data of each server-sent event with its arrival. Both kinds of server send one `data:` line an event."""
    rest = b""
    async for received in stream.iter_any():
        at_ns = time.perf_counter_ns()
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip(), at_ns
        if len(rest) > MAX_LINE_BYTES:
            raise Failure("protocol", f"a line of more than {MAX_LINE_BYTES} bytes")


def _headers(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}
