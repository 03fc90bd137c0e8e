"""`shoal batch`: a file of requests through a running service, a file of answers back."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Self

import typer

from shoal.cli.chat import DEFAULT_URL

if TYPE_CHECKING:
    from aiohttp import ClientSession

    from shoal.cli.batch_files import Item, Results

MAX_TRIES = 3  # of a request that the service fails at; one that it puts off is sent again as often as need be
GIVE_UP_S = 120.0  # without any answer from the service
ANSWER_S = 3600.0  # one request may wait so long
CONNECT_S = 10.0
BAD_ANSWER = 502  # status of what claims to be an answer and is none

Source = Annotated[
    Path,
    typer.Argument(
        metavar="IN",
        exists=True,
        dir_okay=False,
        readable=True,
        help='requests, one per line: OpenAI\'s batch lines, or {"prompt": "…"} or {"messages": […]} with parameters',
    ),
]
Target = Annotated[
    Path,
    typer.Argument(
        metavar="OUT", dir_okay=False, help="answers as they come; errors beside it: out.jsonl, out.errors.jsonl"
    ),
]


def batch(
    source: Source,
    target: Target,
    url: Annotated[str, typer.Option("--url", metavar="URL", help="address of a running service")] = DEFAULT_URL,
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help="for lines that name none; empty: the service's first one")
    ] = "",
    concurrency: Annotated[int, typer.Option("--concurrency", metavar="N", min=1, help="requests at once")] = 32,
) -> None:
    """Answer a file of requests by a running service, when it has nothing more urgent to do.

    Answers are OpenAI's batch output lines, found again by their custom_id; failed requests go to a file of their own.
    After an interruption the same command goes on with what OUT does not have yet. The key is in SHOAL_API_KEY.
    """
    from shoal.cli.batch_files import Results

    for taken in (target, Results.errors_of(target)):
        if taken.exists() and taken.samefile(source):
            raise typer.BadParameter(f"{source} is both input and output")
    with source.open("rb") as file, Results(target) as results, Progress(_count(file), results) as progress:
        try:
            asyncio.run(_run(file, results, progress, url, model, concurrency))
        except KeyboardInterrupt:
            progress.interrupted = True
            raise typer.Exit(130) from None
    if results.num_failed:
        raise typer.Exit(1)


def _count(file: BinaryIO) -> int:
    from shoal.cli.rows import lines

    num_requests = sum(1 for line in lines(file) if line.strip())
    file.seek(0)
    return num_requests


async def _run(file: BinaryIO, results: Results, progress: Progress, url: str, model: str, concurrency: int) -> None:
    from aiohttp import ClientSession, ClientTimeout, TCPConnector

    from shoal.cli import service
    from shoal.cli.batch_files import items
    from shoal.cli.chat import first_model

    source = items(file, model or await first_model(url))
    timeout = ClientTimeout(total=ANSWER_S, sock_connect=CONNECT_S)
    connector = TCPConnector(limit=concurrency)
    headers = {"content-type": "application/json", "x-shoal-class": "batch", **service.authorization()}
    async with ClientSession(timeout=timeout, connector=connector, headers=headers) as session:
        sender = Sender(session, service.root(url))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(_work(source, sender, results, progress))
        except ExceptionGroup as failed:  # the others were stopped by it
            raise failed.exceptions[0] from None


async def _work(source: Iterator[Item], sender: Sender, results: Results, progress: Progress) -> None:
    from shoal.gateway.batches.objects import answered, unanswered

    for item in source:
        if item.message:
            results.fail(unanswered(item.custom_id, secrets.token_hex(8), item.code, item.message))
        elif item.custom_id in results.done:
            progress.num_skipped += 1
        else:
            id, status, body = await sender.answer(item)
            line = answered(item.custom_id, id, status, body)
            if status == 200:
                results.add(item.custom_id, line)
            else:
                results.fail(line)
        progress.step()


class Sender:
    """Sends requests until they are answered. Raises ServiceError where it is of no use to go on."""

    def __init__(self, session: ClientSession, base: str) -> None:
        self._session = session
        self._base = base
        self._silent_since_s: float | None = None  # None: the service answered last

    async def answer(self, item: Item) -> tuple[str, int, bytes]:
        """(id of the request, status, body of the answer as JSON)"""
        from aiohttp import ClientError

        from shoal.gateway.batches.pauses import pause_s

        num_failures = 0
        for tries in count():
            at_least_s = 0.0
            try:
                id, status, body, at_least_s = await self._send(item)
            except (ClientError, OSError) as error:
                self._check_silence(error)
            else:
                self._silent_since_s = None
                num_failures += status >= 500 and status != 503
                if status not in (429, 503) and (status < 500 or num_failures == MAX_TRIES):
                    break
            await asyncio.sleep(pause_s(tries, at_least_s))
        return id, status, body

    async def _send(self, item: Item) -> tuple[str, int, bytes, float]:
        """The last one: how long the service wants to be left alone, s."""
        from shoal.cli import service

        async with self._session.post(self._base + item.path, data=item.body, allow_redirects=False) as response:
            status = response.status
            if status in (401, 403):
                raise service.ServiceError(await service.explain(response))
            text = await response.read()
            id = response.headers.get("x-request-id", secrets.token_hex(8))
            retry_after_s = _seconds(response.headers.get("retry-after", ""))
        body = _one_line(text)
        if body is None:
            message = f"the answer is not JSON: {' '.join(text[:500].decode(errors='replace').split())}"
            body = json.dumps({"error": {"message": message, "type": "bad_answer"}}).encode()
            status = BAD_ANSWER if status == 200 else status
        return id, status, body, retry_after_s

    def _check_silence(self, error: Exception) -> None:
        from shoal.cli.service import ServiceError

        now_s = time.monotonic()
        if self._silent_since_s is None:
            self._silent_since_s = now_s
        if now_s - self._silent_since_s > GIVE_UP_S:
            raise ServiceError(
                f"{self._base} has not answered for {GIVE_UP_S:g} s ({error or type(error).__name__}); "
                "what is done is kept: the same command goes on from there"
            )


def _one_line(body: bytes) -> bytes | None:
    """An object in JSON, without line ends; None for what is none: what stands between us and the service may answer
    with anything."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return json.dumps(value).encode() if b"\n" in body else body


def _seconds(text: str) -> float:
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0.0


class Progress:
    """A bar on a terminal, and one line at the end."""

    def __init__(self, num_requests: int, results: Results) -> None:
        from rich import progress
        from rich.console import Console

        console = Console(stderr=True)
        columns = (
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[failed]}"),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
        )
        self.num_skipped = 0  # they were done before
        self.interrupted = False
        self._results = results
        self._bar = progress.Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self._bar.add_task("", total=num_requests, failed="")
        self._num_done = 0

    def __enter__(self) -> Self:
        self._start_s = time.monotonic()
        self._bar.start()
        return self

    def step(self) -> None:
        self._num_done += 1
        failed = self._results.num_failed
        self._bar.update(self._task, completed=self._num_done, failed=f"{failed} failed" if failed else "")

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        failed = self._results.num_failed
        answered = self._num_done - self.num_skipped - failed
        line = f"{answered} answered, {failed} failed in {time.monotonic() - self._start_s:.1f} s"
        if self.num_skipped:
            line += f"; {self.num_skipped} were done before"
        if failed:
            line += f"; errors: {self._results.errors_path}"
        if self.interrupted:
            line += "; interrupted: the same command goes on from here"
        typer.echo(line, err=True)
