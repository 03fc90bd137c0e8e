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

from shoal.gateway import slo
from shoal.gateway.auth import Keys, single
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
        request_id = _request_id(dict(scope["headers"]).get(b"x-request-id"), record.id)
        scope["shoal.record"] = record
        scope["app"] = self  # Starlette then raises what it would answer itself
        if record.counted:
            self._metrics.received.inc()

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], *_marks(record, request_id)]
            await send(message)

        try:
            await self._answer(scope, receive, send_marked, record)
        finally:
            self._close_books(scope, record, request_id)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, record: Record) -> None:
        extra: tuple[tuple[str, str], ...] = ()
        try:
            if scope["path"] not in PUBLIC_PATHS:
                self._let_in(scope, record)
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

    def _let_in(self, scope: Scope, record: Record) -> None:
        """Raises ApiError unless the key is right."""
        headers = scope["headers"]
        grant = self._keys.check(single(headers, b"authorization"), origin(scope["client"]), time.monotonic())
        record.grant = self._keys.on_behalf(grant, headers)

    def _close_books(self, scope: Scope, record: Record, request_id: str) -> None:
        if record.hold is not None:
            nothing_done = record.job is None or not record.job.num_output_tokens
            record.hold.release(turned_away=nothing_done and record.error is not None and record.error.before_work)
        took_s = time.monotonic() - record.arrived_s
        outcome, reason = _outcome(record)
        if record.counted:
            service_class = "" if record.terms is None else record.terms.service_class
            self._metrics.outcomes[outcome].labels(reason, service_class).inc()
            self._judge(record, outcome, took_s)
            if outcome == "ok":
                self._observe(record, took_s)
        if self._request_log and scope["path"] not in UNLOGGED_PATHS:
            what = {"id": record.id, "request_id": request_id, "method": scope["method"], "path": scope["path"][:200]}
            how = {"status": record.status, "outcome": outcome, "reason": reason, "ms": round(took_s * 1000, 1)}
            log.info("request", what | how | _whose(record) | _sizes(record))

    def _judge(self, record: Record, outcome: str, took_s: float) -> None:
        if record.terms is None:
            return
        job = record.job
        asked_s = record.arrived_s if job is None else job.order.asked_s  # a slow sender is not our delay
        verdict = slo.verdict(
            record.terms,
            outcome,
            status=0 if record.error is None else record.error.shape.status,
            took_s=record.arrived_s + took_s - asked_s,
            ttft_s=None if job is None or job.first_token_s is None else job.first_token_s - asked_s,
            tpot_s=None if job is None else job.token_s,
        )
        if verdict is not None:
            self._metrics.judge(record.terms.service_class, verdict)

    def _observe(self, record: Record, took_s: float) -> None:
        self._metrics.e2e.observe(took_s)
        if record.job is not None and (token_s := record.job.token_s) is not None:
            self._metrics.per_token.observe(token_s)


def _marks(record: Record, request_id: str) -> list[tuple[bytes, bytes]]:
    """Headers of every response. How long it was queued is known once a replica has begun."""
    marks = [(b"x-request-id", request_id.encode())]
    if record.terms is not None:
        marks.append((b"x-shoal-class", record.terms.service_class.encode()))
    if record.job is not None and record.job.queue_ns is not None:
        marks.append((b"x-shoal-queue-ms", f"{record.job.queue_ns / 1e6:.1f}".encode()))
    return marks


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


def _whose(record: Record) -> dict[str, object]:
    whose: dict[str, object] = {"tenant": record.grant.tenant} if record.grant.tenant else {}
    return whose if record.terms is None else whose | {"class": record.terms.service_class}


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
        *((name.lower().encode(), value.encode()) for name, value in (*error.headers, *extra)),
    ]
    await send({"type": "http.response.start", "status": error.shape.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
