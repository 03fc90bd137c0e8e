"""What the routes of files and batches do. A tenant sees its own: everybody else's ids do not exist for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from shoal.core.classes import ServiceClass
from shoal.gateway.batches.archive import Archive, NewFile
from shoal.gateway.batches.form import Form
from shoal.gateway.batches.objects import WINDOW_S, Batch, File, NewBatch, Status
from shoal.gateway.batches.store import Store
from shoal.gateway.body import pieces, read_json
from shoal.gateway.errors import ApiError, Reason, invalid, unsupported
from shoal.gateway.reply import record_of
from shoal.gateway.schema import BATCHED
from shoal.gateway.terms import check_granted

MAX_UPLOAD_S = 900.0  # from the first to the last byte
FORM_BYTES = 64 << 10  # of an upload, beside its file
MOST_OPEN = 100  # batches of one tenant that have not ended
FILES_PAGE, BATCHES_PAGE = (10_000, 10_000), (20, 100)  # (usual, largest) number of entries in a list

log = logging.getLogger("shoal.gateway")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchApi:
    archive: Archive
    model: str  # the served name
    service_class: str  # of batches' lines
    classes: Mapping[str, ServiceClass]
    wake: Callable[[], None]  # the runner
    now_s: Callable[[], float]  # wall clock
    max_body_bytes: int
    max_file_bytes: int
    tenant_bytes: int  # that a tenant's files may take
    retention_s: float

    # -- files ---------------------------------------------------------------------------------------------------------

    async def upload(self, request: Request) -> Response:
        form = Form(request.headers.get("content-type", ""))
        with _storage():
            content = await self.archive.new_file()
            try:
                file = await self._receive(request, form, content)
                await content.keep()
            except BaseException:
                await content.drop()
                raise
            if not await self.archive.do(Store.add_file, file, self.tenant_bytes):
                await content.drop()
                raise ApiError(Reason.STORAGE, f"your files may take {self.tenant_bytes} bytes; delete some")
        return _json(file.shown())

    async def _receive(self, request: Request, form: Form, content: NewFile) -> File:
        try:
            async with asyncio.timeout(MAX_UPLOAD_S):
                async for piece in pieces(request, self.max_file_bytes + FORM_BYTES):
                    await content.write(form.feed(piece))
        except TimeoutError:
            raise ApiError(Reason.BODY_TIMEOUT, f"the file did not arrive within {MAX_UPLOAD_S:g} s") from None
        filename = form.end()
        purpose = form.fields.pop("purpose", None)
        if purpose is None:
            raise invalid("'purpose' is required", "purpose")
        if purpose != "batch":
            raise unsupported("purpose", f"'purpose' must be 'batch', not {purpose[:100]!r}")
        for name in form.fields:
            raise unsupported(name[:100], f"'{name[:100]}' is not supported")
        if content.num_bytes > self.max_file_bytes:
            raise ApiError(Reason.BODY_TOO_LARGE, f"the file is larger than {self.max_file_bytes} bytes", param="file")
        now_s = self.now_s()
        return File(
            id=content.id,
            tenant=_tenant(request),
            purpose="batch",
            filename=filename,
            bytes=content.num_bytes,
            created_at=int(now_s),
            expires_at=int(now_s + self.retention_s),
        )

    async def files(self, request: Request) -> Response:
        query = request.query_params
        limit, order = _limit(request, *FILES_PAGE), query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid(f"'order' must be 'asc' or 'desc', not {order[:100]!r}", "order")
        with _storage():
            files = await self.archive.do(
                Store.files,
                _tenant(request),
                limit=limit + 1,
                after=query.get("after"),
                ascending=order == "asc",
                purpose=query.get("purpose"),
            )
        return _list(files, limit)

    async def file(self, request: Request) -> Response:
        return _json((await self._file(request)).shown())

    async def content(self, request: Request) -> Response:
        path = self.archive.path((await self._file(request)).id)
        with _storage():
            found = await asyncio.to_thread(path.stat)
        return FileResponse(path, media_type="application/octet-stream", stat_result=found)

    async def delete_file(self, request: Request) -> Response:
        id = request.path_params["id"]
        with _storage():
            outcome = await self.archive.do(Store.delete_file, _tenant(request), id)
            if outcome == "deleted":
                await self.archive.remove(id)
        if outcome == "missing":
            raise _no("file", id)
        if outcome == "in use":
            raise ApiError(Reason.CONFLICT, "a batch that has not ended reads this file; cancel it first", param="id")
        return _json({"id": id, "object": "file", "deleted": True})

    async def _file(self, request: Request) -> File:
        id = request.path_params["id"]
        with _storage():
            file = await self.archive.do(Store.file, _tenant(request), id)
        if file is None:
            raise _no("file", id)
        return file

    # -- batches -------------------------------------------------------------------------------------------------------

    async def create(self, request: Request) -> Response:
        check_granted(self.service_class, record_of(request).grant, self.classes)
        body = await read_json(request, NewBatch, self.max_body_bytes)
        if body.endpoint not in BATCHED:
            raise unsupported("endpoint", f"'endpoint' must be one of {', '.join(BATCHED)}")
        if body.completion_window != "24h":
            raise unsupported("completion_window", "'completion_window' must be '24h'")
        now_s = int(self.now_s())
        batch = Batch(
            id=f"batch_{secrets.token_hex(12)}",
            tenant=_tenant(request),
            model=self.model,
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            metadata=msgspec.json.encode(body.metadata).decode(),
            created_at=now_s,
            expires_at=now_s + WINDOW_S,
        )
        with _storage():
            outcome = await self.archive.do(Store.add_batch, batch, MOST_OPEN)
        if outcome == "no file":
            raise _no("file of purpose 'batch'", body.input_file_id, "input_file_id")
        if outcome == "too many":
            raise ApiError(Reason.TOO_MANY_BATCHES, f"{MOST_OPEN} of your batches have not ended; no more are taken")
        self.wake()
        return _json(batch.shown())

    async def batches(self, request: Request) -> Response:
        limit, after = _limit(request, *BATCHES_PAGE), request.query_params.get("after")
        with _storage():
            batches = await self.archive.do(Store.batches, _tenant(request), limit=limit + 1, after=after)
        return _list(batches, limit)

    async def batch(self, request: Request) -> Response:
        return _json((await self._batch(request)).shown())

    async def cancel(self, request: Request) -> Response:
        """The runner does the rest. Once more does no harm."""
        batch = await self._batch(request)
        with _storage():
            cancelled = await self.archive.do(Store.cancel, batch.id, self.now_s())
        batch = await self._batch(request)
        if not cancelled and batch.status not in (Status.CANCELLING, Status.CANCELLED):
            raise ApiError(Reason.CONFLICT, f"the batch is {batch.status}: it cannot be cancelled any more", param="id")
        self.wake()
        return _json(batch.shown())

    async def _batch(self, request: Request) -> Batch:
        id = request.path_params["id"]
        with _storage():
            batch = await self.archive.do(Store.batch, _tenant(request), id)
        if batch is None:
            raise _no("batch", id)
        return batch


def _tenant(request: Request) -> str:
    return record_of(request).grant.tenant


@contextlib.contextmanager
def _storage() -> Iterator[None]:
    """A disk that fails is the service's trouble; the log says which."""
    try:
        yield
    except (OSError, sqlite3.Error) as e:
        log.error("batches.storage_failed", {"error": str(e)})
        raise ApiError(Reason.STORAGE, "this gateway cannot keep or read files at present") from None


def _limit(request: Request, usual: int, largest: int) -> int:
    text = request.query_params.get("limit", str(usual))
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= largest):
        raise invalid(f"'limit' must be 1 to {largest}, not {text[:100]!r}", "limit")
    return int(text)


def _list(found: Sequence[File | Batch] | None, limit: int) -> Response:
    """`found` has one more than `limit` where there are more; None: there is nothing `after`."""
    if found is None:
        raise invalid("'after' is no id of this list", "after")
    data = [one.shown() for one in found[:limit]]
    ids = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
    return _json({"object": "list", "data": data, **ids, "has_more": len(found) > limit})


def _no(what: str, id: str, param: str = "id") -> ApiError:
    return ApiError(Reason.NOT_FOUND, f"there is no {what} {id[:100]!r}", param=param)


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
