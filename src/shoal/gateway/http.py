"""uvicorn's HTTP/1.1 protocol with limits before parsing, errors in OpenAI's shape, and half-closed clients served.

A client that closed its sending side only (shutdown) and one that went away look alike at first: both send a FIN.
Only bytes tell: the one takes them, the other's system answers with a reset. So after a FIN the connection stays open
and is probed with bytes that mean nothing: `102 Processing` before a response, a comment between events.
"""

from __future__ import annotations

import asyncio
import http
import ipaddress
from collections import Counter

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from shoal.gateway.errors import ApiError, Reason

MAX_HEAD_BYTES = 16 << 10
HEAD_S = 10.0  # from a connection's or a request's first moment to the end of its headers
IDLE_S = 60.0  # between requests
LINGER_S = 5.0  # a body that was refused unread is drained for so long, then the connection is cut
MAX_WAITING = 16  # requests of one connection that wait for the answers before theirs
SLOW_READER_S = 10.0  # a client that takes no bytes for so long is cut
PROBE_S = (0.005, 0.2)  # pauses between probes: the first, doubling up to the last

_HEADERS_TOO_LARGE = ApiError(Reason.HEADERS_TOO_LARGE, f"the headers are larger than {MAX_HEAD_BYTES} bytes")
_BAD_HTTP = ApiError(Reason.BAD_HTTP, "the request is not valid HTTP")


def origin(client: tuple[str, int] | None) -> str:
    """Whom a client counts as, where clients are counted: its address; with IPv6 the network that is one customer's."""
    if client is None:
        return ""
    ip = ipaddress.ip_address(client[0].partition("%")[0])
    if ip.version == 4:
        return str(ip)
    return str(ip.ipv4_mapped or ipaddress.ip_network((ip, 64), strict=False))


def limited(max_connections: int, max_per_address: int) -> type[HttpProtocol]:
    """The protocol of one server. uvicorn makes the instances, so what they share is their class's."""
    shared = {"max_connections": max_connections, "max_per_address": max_per_address, "num_of": Counter()}
    return type("LimitedHttpProtocol", (HttpProtocol,), shared)


class HttpProtocol(HttpToolsProtocol):
    max_connections: int
    max_per_address: int
    num_of: Counter[str]  # open connections by origin

    # -- limits --------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()
        self._refusal = _BAD_HTTP
        self._answering: RequestResponseCycle | None = None  # self.cycle is the last one that was read
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._arm("head", HEAD_S, self.transport.close)
        if len(self.connections) > self.max_connections:
            self._refuse(ApiError(Reason.TOO_MANY_CONNECTIONS, f"{self.max_connections} connections are open"))
        self._origin = origin(self.client)
        self.num_of[self._origin] += 1
        if self.num_of[self._origin] > self.max_per_address:
            why = f"{self.max_per_address} connections of your address are open"
            self._refuse(ApiError(Reason.TOO_MANY_CONNECTIONS, why))

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self.num_of[self._origin] -= 1
        if not self.num_of[self._origin]:
            del self.num_of[self._origin]
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True  # uvicorn tells the last cycle only
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_head and "head" not in self._timers:
            self._arm("head", HEAD_S, self.transport.close)
        super().data_received(data)
        if self._in_head:  # still: what came is a part of it
            self._count_head(len(data))
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self._refuse(self._refusal)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()
        self._arm("head", HEAD_S, self.transport.close)

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url), parsing=True)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4, parsing=True)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        names = [name for name, _ in self.headers]
        num_hosts = names.count(b"host")
        hostless = num_hosts == 0 and self.parser.get_http_version() == "1.1"
        if hostless or num_hosts > 1 or (b"content-length" in names and b"transfer-encoding" in names):
            raise ValueError("ambiguous request")  # the parser turns it into a 400
        if len(self.pipeline) >= MAX_WAITING:
            raise ValueError("too many requests at once")
        self._in_head = False
        self._disarm("head")
        self._disarm("linger")
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:
            self._disarm("probe")
            if self.cycle.more_body:
                self._arm("linger", LINGER_S, self.transport.close)
            else:
                self._begin_head()

    def _begin_head(self) -> None:
        self._in_head = True
        self._head_bytes = 0

    def _count_head(self, num_bytes: int, parsing: bool = False) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refusal = _HEADERS_TOO_LARGE
            if parsing:
                raise ValueError("too large")  # the parser stops and `send_400_response` is called

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._refusal)

    def _refuse(self, error: ApiError) -> None:
        """Answers outside the application, and closes. In the middle of another answer it only closes."""
        if self.transport.is_closing():
            return
        if self._answering is not None and not self._answering.response_complete:
            self.transport.close()
            return
        body = error.body()
        status = http.HTTPStatus(error.shape.status)
        headers = {"content-type": "application/json", "content-length": str(len(body)), **dict(error.shape.headers)}
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(f"HTTP/1.1 {status.value} {status.phrase}\r\n{head}\r\n".encode() + body)
        self.transport.close()

    # -- slow and half-closed clients ----------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._arm("slow", SLOW_READER_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._disarm("slow")

    def eof_received(self) -> bool:  # type: ignore[override]
        """True: the connection stays open for writing."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.scope["http_version"] == "1.0":
            return False
        if cycle is not self._answering:
            return False  # it waits behind another: probes would go into the wrong answer
        cycle.keep_alive = False
        self._probe(PROBE_S[0])
        return True

    def _probe(self, pause_s: float) -> None:
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if not self.cycle.response_started:
            self.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        elif self.cycle.chunked_encoding:  # only event streams are sent in chunks, and each chunk ends with an event
            self.transport.write(b"3\r\n:\n\n\r\n")
        self._arm("probe", pause_s, self._probe, min(2 * pause_s, PROBE_S[1]))

    # -- timers --------------------------------------------------------------------------------------------------------

    def _arm(self, name: str, delay_s: float, then: object, *args: object) -> None:
        self._disarm(name)
        self._timers[name] = self.loop.call_later(delay_s, then, *args)  # type: ignore[arg-type]

    def _disarm(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
