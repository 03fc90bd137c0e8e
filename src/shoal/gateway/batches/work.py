"""One batch, from the look at its input file to its output files. All that it knows is in the store, so it can be
broken off at any moment and begun again, by this gateway or by another.

    validating ─► in_progress ─► finalizing ─► completed
         │             │  lines are fed into the window, each one's result is committed by itself
         │             └─► cancelling, or past expires_at: lines at work are withdrawn ─► cancelled, expired
         └─► failed
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import sqlite3
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count, islice
from typing import BinaryIO, Protocol

import msgspec

from shoal.gateway.batches.archive import Archive, NewFile
from shoal.gateway.batches.lines import Problem, look
from shoal.gateway.batches.objects import (
    MAX_ERRORS,
    UNANSWERED,
    Batch,
    File,
    Line,
    Place,
    Status,
    answered,
    unanswered,
)
from shoal.gateway.batches.pauses import pause_s
from shoal.gateway.batches.store import Store
from shoal.gateway.batches.window import Window
from shoal.gateway.errors import ApiError, internal

NOT_NOW = frozenset({429, 503})  # statuses of a request that may be sent again, later, as often as need be
LOST = 502  # of one that was lost on its way
MAX_LOST = 3  # times that a line is lost before that is its result: it may be the line that does it
PAGE = 256  # lines
RESULTS = 32  # as many are in memory when files are written

log = logging.getLogger("shoal.gateway")


class Ask(Protocol):
    """Answers a request: the body of the answer. Raises ApiError."""

    async def __call__(self, path: str, body: bytes, *, id: str, tenant: str) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What the work on any batch needs."""

    owner: str  # this gateway, in the store
    archive: Archive
    ask: Ask
    window: Window
    now_s: Callable[[], float]  # wall clock
    max_body_bytes: int
    retention_s: float  # of the files it writes
    count: Callable[[bool], None]  # called for each result that is committed; True: a good one


class Work:
    def __init__(self, id: str, means: Means) -> None:
        self._id = id
        self._means = means
        self._archive = means.archive
        self._lines: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until the batch has ended, or is another gateway's. Raises whatever goes wrong; to be begun again later."""
        batch = await self._held()
        if batch is not None and batch.status is Status.VALIDATING and not self._over(batch):
            await self._accept(batch)
            batch = await self._held()
        if batch is not None and batch.status is Status.IN_PROGRESS and not self._over(batch):
            await self._answer_lines(batch)
        end = await self._end()
        if end is not None:
            await self._finish(*end)

    def stop_lines(self) -> None:
        """The batch was cancelled, or has expired: what is at work is withdrawn."""
        if self._lines is not None:
            self._lines.cancel()

    async def _held(self) -> Batch | None:
        return await self._archive.do(Store.held, self._means.owner, self._id)

    def _over(self, batch: Batch) -> bool:
        return self._means.now_s() >= batch.expires_at

    # -- validating ----------------------------------------------------------------------------------------------------

    async def _accept(self, batch: Batch) -> None:
        owner, archive = self._means.owner, self._archive
        await archive.do(Store.forget_lines, owner, self._id)
        problems: list[Problem] = []
        total = 0
        with await asyncio.to_thread(self._open, batch) as file:
            found = look(file, batch.endpoint, self._means.max_body_bytes)
            while chunk := await asyncio.to_thread(lambda: list(islice(found, PAGE))):
                problems += [one for one in chunk if isinstance(one, Problem)]
                places = [one for one in chunk if isinstance(one, Place)]
                total += len(places)
                if len(problems) >= MAX_ERRORS:
                    break
                if not problems:
                    await archive.do(Store.add_lines, owner, self._id, places)
        if problems:
            told = msgspec.json.encode([asdict(problem) for problem in problems[:MAX_ERRORS]]).decode()
            now_s = self._means.now_s()
            await archive.do(Store.finish, owner, self._id, Status.FAILED, now_s, problems=told)
        else:
            await archive.do(Store.move, owner, self._id, Status.IN_PROGRESS, self._means.now_s(), total=total)

    def _open(self, batch: Batch) -> BinaryIO:
        return self._archive.path(batch.input_file_id).open("rb")

    # -- in progress ---------------------------------------------------------------------------------------------------

    async def _answer_lines(self, batch: Batch) -> None:
        """Returns when every line has its result, or after `stop_lines`."""
        self._lines = asyncio.create_task(self._feed(batch))
        try:
            await asyncio.wait([self._lines])
        finally:
            self._lines.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._lines

    async def _feed(self, batch: Batch) -> None:
        after = 0
        with await asyncio.to_thread(self._open, batch) as file:
            async with asyncio.TaskGroup() as group:
                while places := await self._archive.do(Store.pending, self._id, after, PAGE):
                    for place in places:
                        await self._means.window.enter(batch.tenant)
                        task = group.create_task(self._line(batch, file, place))
                        task.add_done_callback(lambda _: self._means.window.leave())
                    after = places[-1].number

    async def _line(self, batch: Batch, file: BinaryIO, place: Place) -> None:
        text = await asyncio.to_thread(os.pread, file.fileno(), place.length, place.start)
        body = bytes(msgspec.json.decode(text, type=Line).body)
        id, status, answer = await self._answer(batch, body)
        await self._keep(place, status == 200, answered(place.custom_id, id, status, answer))

    async def _answer(self, batch: Batch, body: bytes) -> tuple[str, int, bytes]:
        """(id of the request, status, body of the answer)"""
        num_lost = 0
        for tries in count():
            id = secrets.token_hex(8)
            try:
                return id, 200, await self._means.ask(batch.endpoint, body, id=id, tenant=batch.tenant)
            except ApiError as e:
                error = e
            except Exception:
                log.exception("batches.line_failed", {"batch": self._id, "id": id})
                error = internal()
            status = error.shape.status
            num_lost += status == LOST
            if status not in NOT_NOW and not (status == LOST and num_lost < MAX_LOST):
                break
            await asyncio.sleep(pause_s(tries, float(dict(error.headers).get("retry-after", "0"))))
        return id, status, error.body()

    async def _keep(self, place: Place, ok: bool, line: bytes) -> None:
        """The disk may be full for a while: the answer is not thrown away for that."""
        for tries in count():
            try:
                if await self._archive.do(Store.add_result, self._means.owner, self._id, place.number, ok, line):
                    self._means.count(ok)
                return
            except (OSError, sqlite3.Error) as e:
                log.warning("batches.result_not_kept", {"batch": self._id, "error": str(e)})
            await asyncio.sleep(pause_s(tries))

    # -- the end -------------------------------------------------------------------------------------------------------

    async def _end(self) -> tuple[Batch, Status] | None:
        """How the batch ends; None where it has, or is not ours any more."""
        batch = await self._held()
        if batch is None:
            return None
        if batch.status is Status.CANCELLING:
            return batch, Status.CANCELLED
        if batch.status is Status.IN_PROGRESS and batch.completed + batch.failed == batch.total:
            now_s = self._means.now_s()
            moved = await self._archive.do(Store.move, self._means.owner, self._id, Status.FINALIZING, now_s)
            return (batch, Status.COMPLETED) if moved else await self._end()  # it was cancelled in that moment
        if batch.status is Status.FINALIZING:
            return batch, Status.COMPLETED
        if self._over(batch):
            return batch, Status.EXPIRED
        raise RuntimeError(f"{batch.status}, with {batch.completed + batch.failed} of {batch.total} results")

    async def _finish(self, batch: Batch, end: Status) -> None:
        owner, now_s = self._means.owner, self._means.now_s()
        good, bad = await self._archive.new_file(), await self._archive.new_file()
        try:
            await self._write(good, bad, end)
            output = await self._kept(batch, good, "output", now_s)
            errors = await self._kept(batch, bad, "errors", now_s)
        except BaseException:
            await good.drop()
            await bad.drop()
            raise
        if not await self._archive.do(Store.finish, owner, self._id, end, now_s, output=output, errors=errors):
            await good.drop()
            await bad.drop()

    async def _write(self, good: NewFile, bad: NewFile, end: Status) -> None:
        after = 0
        while results := await self._archive.do(Store.results, self._id, after, RESULTS):
            for number, ok, line in results:
                await (good if ok else bad).write(line)
                after = number
        after = 0
        while end in UNANSWERED and (places := await self._archive.do(Store.pending, self._id, after, PAGE)):
            for place in places:
                await bad.write(unanswered(place.custom_id, f"{self._id}_{place.number}", *UNANSWERED[end]))
                after = place.number

    async def _kept(self, batch: Batch, file: NewFile, what: str, now_s: float) -> File | None:
        """None, and no file, where nothing was written."""
        if not file.num_bytes:
            await file.drop()
            return None
        await file.keep()
        return File(
            id=file.id,
            tenant=batch.tenant,
            purpose="batch_output",
            filename=f"{self._id}_{what}.jsonl",
            bytes=file.num_bytes,
            created_at=int(now_s),
            expires_at=int(now_s + self._means.retention_s),
        )
