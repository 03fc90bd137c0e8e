"""A job's answer on its way to the client, who may go away at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shoal.gateway.answers import Answer
from shoal.gateway.auth import Grant
from shoal.gateway.dispatch import Dispatcher
from shoal.gateway.errors import ApiError, internal
from shoal.gateway.job import Cancelled, Job
from shoal.gateway.output import Delta
from shoal.gateway.tenants import Hold
from shoal.gateway.terms import Terms

_COMMENT = b":\n\n"

log = logging.getLogger("shoal.gateway")


@dataclass(slots=True)
class Record:
    """What the access log and the metrics want to know of a request."""

    id: str
    arrived_s: float  # monotonic
    counted: bool = False  # a request for text: part of the accounting
    grant: Grant = field(default_factory=Grant)  # of its key
    terms: Terms | None = None  # None: not a request for text, or none that was understood
    hold: Hold | None = None
    job: Job | None = None
    error: ApiError | None = None
    aborted: str | None = None  # why nobody got an answer
    status: int = 0


def record_of(request: Request) -> Record:
    record: Record = request.scope["shoal.record"]
    return record


async def collect(answer: Answer) -> bytes:
    """The whole answer as one object. Raises ApiError where the job failed, Cancelled."""
    deltas: list[Delta] = []
    while not answer.job.exhausted:
        deltas += await answer.job.news()
    return answer.whole(deltas)


class Reply(Response):
    """Written by hand rather than on Starlette's StreamingResponse, whose task group costs as much as the request.

    Until the first news nothing is sent, so that a failure can still have its own status.
    """

    def __init__(self, answer: Answer, dispatcher: Dispatcher, record: Record) -> None:
        self._answer = answer
        self._job = answer.job
        self._dispatcher = dispatcher
        self._record = record
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watch = asyncio.create_task(self._watch(receive))
        try:
            if self._job.order.params.stream:
                await self._stream(send)
            else:
                await self._whole(send)
        except Cancelled:
            self._record.aborted = self._job.cancelled
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
            self._dispatcher.finish(self._job)

    async def _watch(self, receive: Receive) -> None:
        """The body is read already, so the only message to come says that the client is gone."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._job.cancel("client_disconnect")

    async def _whole(self, send: Send) -> None:
        body = await collect(self._answer)
        await self._start(send, b"application/json", (b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        try:
            while not self._job.exhausted:
                deltas = await self._job.news()
                events = b"" if self._started else self._answer.opening()
                events += b"".join(map(self._answer.chunk, deltas)) or _COMMENT
                if last := self._job.exhausted:
                    events += self._answer.closing()
                if not self._started:
                    await self._start(send, b"text/event-stream", (b"cache-control", b"no-cache"))
                await send({"type": "http.response.body", "body": events, "more_body": not last})
        except Cancelled:
            raise
        except Exception as e:
            if not self._started:
                raise
            await self._break_off(send, e)

    async def _break_off(self, send: Send, failure: Exception) -> None:
        """An error event, and no [DONE]."""
        if not isinstance(failure, ApiError):
            log.error("request.failed", {"id": self._record.id}, exc_info=failure)
            failure = internal()
        self._record.error = failure
        await send({"type": "http.response.body", "body": b"data: " + failure.body() + b"\n\n"})

    async def _start(self, send: Send, content_type: bytes, *headers: tuple[bytes, bytes]) -> None:
        self._started = True
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", content_type), *headers],
            }
        )
