"""What `shoal batch` reads and writes: requests from one file, their results into two others, also after a break."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec
from msgspec import Raw

from shoal.cli.rows import MAX_LINE_BYTES, lines

BEGINNING = b'{"id":"batch_req_'  # of every line that we write
PATHS = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Item:
    """One request of the input, or why it is none."""

    custom_id: str
    path: str = ""
    body: bytes = b""
    code: str = ""
    message: str = ""  # what is wrong


def items(file: BinaryIO, model: str) -> Iterator[Item]:
    """The requests of a file: OpenAI's batch lines, or bodies of requests as they are, which are called `line-N` and
    get the model where they name none. Blank lines are left out."""
    seen: set[str] = set()
    for number, text in enumerate(lines(file), 1):
        if not text.strip():
            continue
        item = _item(f"line {number}: ", f"line-{number}", text, model)
        if item.custom_id in seen:
            message = f"line {number}: its custom_id was there before"
            item = Item(item.custom_id, code="duplicate_custom_id", message=message)
        seen.add(item.custom_id)
        yield item


def _item(where: str, name: str, text: bytes, model: str) -> Item:
    """`name`: of a line that has no custom_id."""
    if len(text) > MAX_LINE_BYTES:
        return Item(name, code="line_too_long", message=f"{where}longer than {MAX_LINE_BYTES} bytes")
    try:
        row = msgspec.json.decode(text, type=dict[str, Raw])
        name = _text(row, "custom_id") or name
        method, path = _text(row, "method"), _text(row, "url")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return Item(name, code="invalid_json_line", message=f"{where}{error}")
    if "body" in row:
        if method not in (None, "POST") or path is None or path not in PATHS.values():
            allowed = ", ".join(PATHS.values())
            return Item(name, code="invalid_url", message=f"{where}expected POST to one of {allowed}")
        return Item(name, path, bytes(row["body"]))
    kinds = sorted(PATHS.keys() & row.keys())
    if len(kinds) != 1 or path is not None or method is not None:
        return Item(name, code="invalid_line", message=f'{where}expected "url" and "body", or "prompt", or "messages"')
    return Item(name, PATHS[kinds[0]], msgspec.json.encode({"model": model, **row}))


def _text(row: dict[str, Raw], key: str) -> str | None:
    value = row.pop(key, None)
    return None if value is None else msgspec.json.decode(value, type=str)


class _Result(msgspec.Struct):
    id: str
    custom_id: str
    response: dict[str, Any]


class Results:
    """The file of answers, which is added to, and beside it that of errors, which begins anew: failed requests are
    tried again. Raises ValueError for a file that holds something else, or that another process writes."""

    def __init__(self, path: Path) -> None:
        self.done: set[str] = set()  # custom_ids with an answer
        self.num_failed = 0
        self.errors_path = self.errors_of(path)
        self._files = contextlib.ExitStack()
        self._path = path
        self._errors: BinaryIO | None = None  # from the first error on

    @staticmethod
    def errors_of(path: Path) -> Path:
        """out.jsonl -> out.errors.jsonl"""
        return path.with_name(path.name.removesuffix(".jsonl") + ".errors.jsonl")

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as files:
            self._file = files.enter_context(self._path.open("a+b"))
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"{self._path}: another process is writing it") from None
            self._read()
            self.errors_path.unlink(missing_ok=True)
            self._files = files.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def add(self, custom_id: str, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()
        self.done.add(custom_id)

    def fail(self, line: bytes) -> None:
        if self._errors is None:
            self._errors = self._files.enter_context(self.errors_path.open("wb"))
        self._errors.write(line)
        self._errors.flush()
        self.num_failed += 1

    def _read(self) -> None:
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n") and (line.startswith(BEGINNING) or BEGINNING.startswith(line)):
                self._file.truncate(end)  # we were stopped in the middle of it
                return
            try:
                self.done.add(msgspec.json.decode(line, type=_Result).custom_id)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                raise ValueError(
                    f"{self._path}: line {number} is no answer of a batch; choose another file for the output"
                ) from None
            end += len(line)
