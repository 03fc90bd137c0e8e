"""`shoal generate`: many prompts, no server. A line in, a line out, in the same order."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal

import msgspec
import typer

from shoal.cli.meter import Meter, loading
from shoal.cli.options import ConfigFile, Model, resolve, with_settings
from shoal.cli.pull import fetch
from shoal.cli.rows import Row, read_rows
from shoal.cli.sampling import IgnoreEos, MaxTokens, MinP, Seed, Stop, Temperature, TopK, TopP, as_option
from shoal.config import Config

if TYPE_CHECKING:
    from shoal.llm import LLM, Output, Request, SamplingParams

READ_AHEAD = 1024  # lines

Input = Annotated[str, typer.Option("--input", metavar="FILE", help="prompts, one per line; -: standard input")]
To = Annotated[
    str, typer.Option("--output", metavar="FILE", help="answers, a JSON object per line; -: standard output")
]
Format = Annotated[
    Literal["auto", "text", "jsonl"],
    typer.Option(
        "--format",
        help='of the prompts: text, or jsonl: {"prompt": "…"} or {"messages": [{"role": "user", "content": "…"}]}, '
        "with sampling parameters for that line where you like; auto: jsonl if the first line begins with a brace",
    ),
]


@with_settings("engine")
def generate(
    *,
    model: Model = None,
    config: ConfigFile = None,
    input: Input = "-",
    output: To = "-",
    format: Format = "auto",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    settings: dict[str, Any],
) -> None:
    """Answer many prompts without a server, all in one continuous batch.

    One JSON line per prompt, in the order of the prompts: the number of its line, and either text, finish_reason and
    counts of tokens, or an error.
    """
    values = resolve(config, settings, model)
    from shoal.offline import RequestError, SamplingParams

    try:
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            stop=stop or None,
            ignore_eos=ignore_eos,
        )
    except RequestError as error:
        raise typer.BadParameter(as_option(str(error))) from None
    with ExitStack() as files:
        source = _open(files, "--input", input, "rb")
        sink = _open(files, "--output", output, "wb")
        try:
            num_failed = _run(values, source, sink, {"text": False, "jsonl": True}.get(format), params)
        except KeyboardInterrupt:  # what was answered is written; the step thread may be inside a kernel, and the
            os._exit(130)  # interpreter's orderly end would crash under it
    if num_failed:
        raise typer.Exit(1)


def _open(files: ExitStack, option: str, name: str, mode: str) -> Any:
    """A descriptor of our own also for the standard streams: at exit the reading thread may still wait on it."""
    try:
        if name == "-":
            return files.enter_context(os.fdopen(os.dup((sys.stdin if mode == "rb" else sys.stdout).fileno()), mode))
        return files.enter_context(Path(name).open(mode))
    except OSError as error:
        raise typer.BadParameter(f"{option}: {name}: {error.strerror}") from None


def _run(config: Config, source: BinaryIO, sink: BinaryIO, json: bool | None, params: SamplingParams) -> int:
    """Number of prompts that were not answered."""
    from shoal.llm import LLM

    num_prompts = _count(source)
    fetch(config.model.name)
    with loading(config.model.name):
        llm = LLM(config.model.name, **asdict(config.engine))
    with llm, Meter(num_prompts) as meter:
        for line, answer in _answers(llm, _read_ahead(read_rows(source, json)), params):
            sink.write(_encode(line, answer))
            sink.flush()
            meter.count(answer)
    return meter.num_failed


def _answers(llm: LLM, rows: Iterator[Row | None], params: SamplingParams) -> Iterator[tuple[int, Output]]:
    """(number of its line, output) of each row, in the order of the rows."""
    from shoal.llm import Output

    taken: deque[Row] = deque()

    def requests() -> Iterator[Request | None]:
        for row in rows:
            if row is None:
                yield None
                continue
            request, problem = _request(row, params)
            taken.append(replace(row, error=problem))
            if request is not None:
                yield request

    for output in llm.outputs(requests()):
        while taken[0].error:
            row = taken.popleft()
            yield row.line, Output(error=row.error)
        yield taken.popleft().line, output
    for row in taken:
        yield row.line, Output(error=row.error)


def _request(row: Row, params: SamplingParams) -> tuple[Request | None, str]:
    from shoal.llm import Request, RequestError

    if row.prompt is None:
        return None, row.error
    try:
        return Request(row.prompt, replace(params, **row.params)), ""
    except RequestError as error:
        return None, f"line {row.line}: {error}"


def _read_ahead(rows: Iterator[Row]) -> Iterator[Row | None]:
    """The rows, read by a thread; None while the next one has not come."""
    lines: queue.Queue[Row | Exception | None] = queue.Queue(READ_AHEAD)

    def read() -> None:
        try:
            for row in rows:
                lines.put(row)
            lines.put(None)
        except Exception as error:
            lines.put(error)

    threading.Thread(target=read, name="lines", daemon=True).start()
    while True:
        try:
            row = lines.get_nowait()
        except queue.Empty:
            yield None
            continue
        if row is None:
            return
        if isinstance(row, Exception):
            raise row
        yield row


def _count(source: BinaryIO) -> int | None:
    """Prompts in a file; None for a pipe."""
    if not source.seekable():
        return None
    start = source.tell()
    num_prompts = sum(1 for line in source if line.strip())
    source.seek(start)
    return num_prompts


def _encode(line: int, answer: Output) -> bytes:
    if answer.error:
        return msgspec.json.encode({"line": line, "error": answer.error}) + b"\n"
    [choice] = answer.choices
    row = {
        "line": line,
        "text": choice.text,
        "finish_reason": choice.finish_reason,
        "prompt_tokens": len(answer.prompt_token_ids),
        "completion_tokens": len(choice.token_ids),
    }
    return msgspec.json.encode(row) + b"\n"
