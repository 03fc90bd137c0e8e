"""What `shoal generate` reads: a prompt per line, as text or as JSON. A bad line is a row with an error, not an end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec

MAX_LINE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Row:
    line: int  # counts from 1
    prompt: str | list[dict[str, Any]] | None  # text, or the messages of a chat
    params: dict[str, Any] = field(default_factory=dict)  # sampling parameters of this row
    error: str = ""  # why there is no prompt


PARAMS = {
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
}


def read_rows(file: BinaryIO, json: bool | None = None) -> Iterator[Row]:
    """The rows of a file, blank lines left out. `json=None`: JSON if the first one begins with a brace."""
    for number, line in enumerate(lines(file), 1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        if json is None:
            json = line.lstrip().startswith(b"{")
        if len(line) > MAX_LINE_BYTES:
            yield _bad(number, f"longer than {MAX_LINE_BYTES} bytes")
        else:
            yield _from_json(number, line) if json else _from_text(number, line)


def lines(file: BinaryIO) -> Iterable[bytes]:
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
        return _bad(number, f"not UTF-8: byte {error.start + 1}: {error.reason}")


def _from_json(number: int, line: bytes) -> Row:
    text = _from_text(number, line)
    if text.error:
        return text
    try:
        row = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        return _bad(number, str(error))
    prompt, messages = row.pop("prompt", None), row.pop("messages", None)
    if (prompt is None) == (messages is None):
        return _bad(number, 'expected either "prompt" or "messages"')
    if prompt is not None and not isinstance(prompt, str):
        return _bad(number, "prompt: expected text")
    if messages is not None and not (isinstance(messages, list) and all(isinstance(m, dict) for m in messages)):
        return _bad(number, "messages: expected a list of objects")
    if unknown := sorted(row.keys() - PARAMS):
        return _bad(number, f"unknown field {unknown[0][:200]!r}")
    return Row(number, messages if prompt is None else prompt, row)


def _bad(number: int, error: str) -> Row:
    return Row(number, None, error=f"line {number}: {error}")
