"""The ASGI application: the key check, the routes, every error as an answer, and the books.

Every request for text is counted once when it arrives and once when it ends: in full, failed, refused or aborted.
"""

from __future__ import annotations

import logging
import re
import secrets
import time

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Router
from starlette.types import Message, Receive, Scope, Send

from shoal.gateway.auth import Keys
from shoal.gateway.errors import ApiError, Reason, internal
from shoal.gateway.http import origin
from shoal.gateway.metrics import Metrics
from shoal.gateway.reply import Record
from shoal.gateway.routes import PUBLIC_PATHS, TEXT_PATHS, UNLOGGED_PATHS

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

log = logging.getLogger("shoal.gateway")


class App:
    def __init__(self, router: Router, keys: Keys, metrics: Metrics, *, request_log: bool) -> None:
        self._router = router
        self._keys = keys
        self._metrics = metrics
        self._request_log = request_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]  # the server is started without the other kinds
        record = Record(id=secrets.token_hex(8), arrived_s=time.monotonic())
        record.counted = scope["method"] == "POST" and scope["path"] in TEXT_PATHS
        headers = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id"), record.id)
        scope["shoal.record"] = record
        scope["app"] = self  # Starlette then raises what it would answer itself
        if record.counted:
            self._metrics.received.inc()

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._answer(scope, headers, receive, send_marked, record)
        finally:
            self._close_books(scope, record, request_id)

    async def _answer(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, send: Send, record: Record
    ) -> None:
        extra: tuple[tuple[str, str], ...] = ()
        try:
            if scope["path"] not in PUBLIC_PATHS:
                self._keys.check(headers.get(b"authorization"), origin(scope["client"]), time.monotonic())
            if _CONTROL.search(scope["path"]):  # a pattern's `$` would overlook a line end
                raise ApiError(Reason.NOT_FOUND, "there is no such path")
            await self._router(scope, receive, send)
            return
        except ApiError as e:
            error = e
        except HTTPException as e:
            error, extra = _from_starlette(e)
        except ClientDisconnect:
            record.aborted = "client_disconnect"
            return
        except Exception:
            log.exception("request.failed", {"id": record.id})
            error = internal()
        record.error = error
        if record.status:
            raise error  # half of an answer is out: the server cuts the connection
        await _send_error(error, extra, send)

    def _close_books(self, scope: Scope, record: Record, request_id: str) -> None:
        took_s = time.monotonic() - record.arrived_s
        outcome, reason = _outcome(record)
        if record.counted:
            self._metrics.outcomes[outcome].labels(reason).inc()
            if outcome == "ok":
                self._observe(record, took_s)
        if self._request_log and scope["path"] not in UNLOGGED_PATHS:
            what = {"id": record.id, "request_id": request_id, "method": scope["method"], "path": scope["path"][:200]}
            how = {"status": record.status, "outcome": outcome, "reason": reason, "ms": round(took_s * 1000, 1)}
            log.info("request", what | how | _sizes(record))

    def _observe(self, record: Record, took_s: float) -> None:
        job = record.job
        self._metrics.e2e.observe(took_s)
        if job is not None and job.first_token_s is not None and job.num_output_tokens > len(job.outputs):
            decode_s = record.arrived_s + took_s - job.first_token_s
            self._metrics.per_token.observe(decode_s * len(job.outputs) / (job.num_output_tokens - len(job.outputs)))


def _outcome(record: Record) -> tuple[str, str]:
    """(a key of `Metrics.outcomes`, reason)."""
    if record.aborted is not None:
        return "aborted", record.aborted
    if record.error is not None:
        return "refused" if record.error.before_work else "failed", str(record.error.reason)
    if record.job is None:
        return "ok", "stop"
    if not record.job.exhausted:
        return "aborted", "abandoned"  # the task was cancelled: the process ends
    return "ok", record.job.finish_reason


def _sizes(record: Record) -> dict[str, object]:
    job = record.job
    if job is None:
        return {}
    sizes: dict[str, object] = {
        "stream": job.order.params.stream,
        "choices": len(job.outputs),
        "prompt_tokens": job.num_prompt_tokens,
        "output_tokens": job.num_output_tokens,
    }
    if job.first_token_s is not None:
        sizes["ttft_ms"] = round((job.first_token_s - record.arrived_s) * 1000, 1)
    return sizes


def _request_id(given: bytes | None, own: str) -> str:
    """The client's own id goes back to it, where it is a harmless one."""
    text = (given or b"").decode("latin-1")
    return text if _REQUEST_ID.fullmatch(text) else own


def _from_starlette(e: HTTPException) -> tuple[ApiError, tuple[tuple[str, str], ...]]:
    if e.status_code == 405:
        return ApiError(Reason.METHOD, "this path does not have that method"), tuple((e.headers or {}).items())
    return ApiError(Reason.NOT_FOUND, "there is no such path"), ()


async def _send_error(error: ApiError, extra: tuple[tuple[str, str], ...], send: Send) -> None:
    body = error.body()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *((name.lower().encode(), value.encode()) for name, value in (*error.shape.headers, *extra)),
    ]
    await send({"type": "http.response.start", "status": error.shape.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
