"""The lines of an input file: where each is, and what is wrong with those that cannot be run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from shoal.gateway.batches.objects import MAX_LINES, Line, Place
from shoal.gateway.body import decode
from shoal.gateway.errors import ApiError, Reason

ENVELOPE_BYTES = 4096  # of a line, beside the body of its request


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a batch cannot begin; codes as OpenAI names them, where it does."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


def look(file: BinaryIO, endpoint: str, max_body_bytes: int) -> Iterator[Place | Problem]:
    """Every line that is not blank, in order, and problems. What is in a request's body is not looked at: that is
    answered when the line is run, as it would be over HTTP. Reads no more than a line at a time."""
    seen: set[str] = set()
    number, start, limit = 0, 0, max_body_bytes + ENVELOPE_BYTES
    blank = True
    while text := file.readline(limit + 1):
        number += 1
        length = len(text)
        if length > limit and not text.endswith(b"\n"):
            length += _skip_line(file, limit)
            blank = False
            yield Problem("line_too_long", f"this line is longer than {limit} bytes", number)
        elif text.strip():
            if len(seen) == MAX_LINES:
                yield Problem("too_many_tasks", f"a batch has at most {MAX_LINES} requests", number)
                return
            blank = False
            yield _one(text.rstrip(b"\r\n"), number, start, endpoint, seen)
        start += length
    if blank:
        yield Problem("empty_file", "the input file has no requests")


def _skip_line(file: BinaryIO, limit: int) -> int:
    """Bytes up to the end of the line."""
    num_bytes = 0
    while rest := file.readline(limit):
        num_bytes += len(rest)
        if rest.endswith(b"\n"):
            break
    return num_bytes


def _one(text: bytes, number: int, start: int, endpoint: str, seen: set[str]) -> Place | Problem:
    try:
        line = decode(text, Line)
    except ApiError as e:
        code = "invalid_json_line" if e.reason == Reason.INVALID_JSON else str(e.reason)
        return Problem(code, e.message.replace("the body", "the line", 1), number, e.param)
    if line.method != "POST":
        return Problem("invalid_method", "'method' must be 'POST'", number, "method")
    if line.url != endpoint:
        return Problem("url_mismatch", f"'url' must be the batch's endpoint, {endpoint}", number, "url")
    if line.custom_id in seen:
        return Problem("duplicate_custom_id", "another line of the file has this 'custom_id'", number, "custom_id")
    seen.add(line.custom_id)
    return Place(number, start, len(text), line.custom_id)
