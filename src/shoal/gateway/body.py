"""Reading a request's body: every limit is checked before the parser sees a byte."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from itertools import accumulate
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from shoal.gateway.errors import ApiError, Reason
from shoal.gateway.violations import explain

MAX_DEPTH = 64
MAX_BODY_S = 60.0  # from the first to the last byte
DISCARD_S = 1.5  # a body that is too large is read, and dropped, for so long before it is refused
OFF_LOOP_BYTES = 64 << 10  # parsing, rendering and tokenising more than this leaves the event loop

T = TypeVar("T")


async def read_json(request: Request, schema: type[T], max_bytes: int) -> T:
    """The body as `schema`. Raises ApiError that names the field or the limit, ClientDisconnect if nobody is left."""
    try:
        async with asyncio.timeout(MAX_BODY_S):
            body = await read(request, max_bytes)
    except TimeoutError:
        raise ApiError(Reason.BODY_TIMEOUT, f"the body did not arrive within {MAX_BODY_S:g} s") from None
    return await parse(body, schema)


async def parse(body: bytes, schema: type[T]) -> T:
    """`decode`, off the event loop where that takes long."""
    if len(body) > OFF_LOOP_BYTES:
        return await asyncio.to_thread(decode, body, schema)
    return decode(body, schema)


async def read(request: Request, max_bytes: int) -> bytes:
    return b"".join([piece async for piece in pieces(request, max_bytes)])


async def pieces(request: Request, max_bytes: int) -> AsyncIterator[bytes]:
    """The body as it comes. Raises ApiError where it is too large, ClientDisconnect where its end will never come."""
    too_large = ApiError(Reason.BODY_TOO_LARGE, f"the body is larger than {max_bytes} bytes")
    announced = request.headers.get("content-length")
    if announced is not None and int(announced) > max_bytes:  # the HTTP parser lets digits only through
        if "expect" not in request.headers:  # otherwise the client waits for leave to send
            await _discard(request)
        raise too_large
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        piece = message.get("body", b"")
        size += len(piece)
        if size > max_bytes:
            if message.get("more_body", False):
                await _discard(request)
            raise too_large
        yield piece
        if not message.get("more_body", False):
            return


async def _discard(request: Request) -> None:
    """A client that is still sending when its connection is closed never sees the answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while (await request.receive()).get("more_body", False):
                pass


def decode(body: bytes, schema: type[T]) -> T:
    """Of a key that occurs twice in an object the last one counts, as everywhere in Python."""
    if depth(body) > MAX_DEPTH:
        raise ApiError(Reason.INVALID_JSON, f"the JSON is nested deeper than {MAX_DEPTH} levels")
    try:
        return msgspec.json.decode(body, type=schema)
    except msgspec.ValidationError as e:
        raise explain(e, schema) from None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as e:
        raise ApiError(Reason.INVALID_JSON, f"the body is not valid JSON: {e}") from None


# A string, closed or cut off by the end. Possessive: a hostile body costs one pass, not one per quotation mark.
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)'
_STRINGS = re.compile(_STRING, re.DOTALL)
_PIECE = re.compile(rb'(?:[^"]++|%s){1,4096}+' % _STRING, re.DOTALL)  # ends outside of strings
_BRACKETS = b"[]{}"
_OTHER = bytes(set(range(256)) - set(_BRACKETS))
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_SLICE = 1 << 16


def depth(body: bytes) -> int:
    """The deepest nesting of arrays and objects; beyond MAX_DEPTH any number above it. Linear in the body's length.

    In pieces, so that other threads get their turn: each call into C is short.
    """
    level = deepest = 0
    for piece in _PIECE.finditer(body):
        brackets = _STRINGS.sub(b"", piece[0]).translate(None, _OTHER)
        for start in range(0, len(brackets), _SLICE):
            levels = list(accumulate(map(_STEP.__getitem__, brackets[start : start + _SLICE]), initial=level))
            level, deepest = levels[-1], max(deepest, *levels)
            if deepest > MAX_DEPTH:
                return deepest
    return deepest
