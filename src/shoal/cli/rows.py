"""What `shoal generate` reads: a prompt per line, as text or as JSON. A bad line is a row with an error, not an end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

MAX_LINE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Row:
    line: int  # counts from 1
    prompt: str | list[dict[str, Any]] | None  # text, or the messages of a chat
    error: str = ""  # why there is no prompt


class _Json(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


def read_rows(file: BinaryIO, json: bool | None = None) -> Iterator[Row]:
    """The rows of a file, blank lines left out. `json=None`: JSON if the first one begins with a brace."""
    for number, line in enumerate(_lines(file), 1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        if json is None:
            json = line.lstrip().startswith(b"{")
        if len(line) > MAX_LINE_BYTES:
            yield Row(number, None, f"line {number}: longer than {MAX_LINE_BYTES} bytes")
        else:
            yield _from_json(number, line) if json else _from_text(number, line)


def _lines(file: BinaryIO) -> Iterable[bytes]:
    """Lines without their ends. Of a longer one than allowed only the beginning is kept."""
    while line := file.readline(MAX_LINE_BYTES + 2):
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES)
        yield line.rstrip(b"\r\n")


def _from_text(number: int, line: bytes) -> Row:
    try:
        return Row(number, line.decode())
    except UnicodeDecodeError as error:
        return Row(number, None, f"line {number}: not UTF-8: byte {error.start + 1}: {error.reason}")


def _from_json(number: int, line: bytes) -> Row:
    text = _from_text(number, line)
    if text.error:
        return text
    try:
        row = msgspec.json.decode(line, type=_Json)
    except (msgspec.MsgspecError, RecursionError) as error:
        return Row(number, None, f"line {number}: {error}")
    if (row.prompt is None) == (row.messages is None):
        return Row(number, None, f'line {number}: expected either "prompt" or "messages"')
    return Row(number, row.prompt if row.prompt is not None else row.messages)
