"""Bytes to messages and back: a 4-byte big-endian length, then one msgpack map that a schema checks."""

from __future__ import annotations

import msgspec

from shoal.wire.messages import MAX_FRAME_BYTES, Message, ToDialler, ToListener

_LENGTH_BYTES = 4

_encoder = msgspec.msgpack.Encoder()
to_listener = msgspec.msgpack.Decoder(ToListener)  # what the side that listens accepts
to_dialler = msgspec.msgpack.Decoder(ToDialler)  # what the side that dialled accepts


class BadFrame(ValueError):
    """Bytes that are no message. `kind` is "oversized" or "malformed"."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


def encode(message: Message) -> bytes:
    """One frame. Raises ValueError where the message is larger than a frame may be: a fault of this process."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a {type(message).__name__} of {len(body)} bytes exceeds the frame limit, {MAX_FRAME_BYTES}")
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class FrameReader:
    """Cuts a byte stream into messages. After BadFrame the stream has no meaning left and must be closed."""

    def __init__(self, decoder: msgspec.msgpack.Decoder, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes, messages: list[Message]) -> None:
        """Append the messages that `data` completes to `messages`; those before a bad frame are appended too."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= _LENGTH_BYTES:
                body = start + _LENGTH_BYTES
                length = int.from_bytes(buffer[start:body], "big")
                if length > self.max_frame_bytes:
                    raise BadFrame("oversized", f"a frame of {length} bytes, the limit is {self.max_frame_bytes}")
                if len(buffer) - body < length:
                    break
                messages.append(self._decode(bytes(buffer[body : body + length])))
                start = body + length
        finally:
            del buffer[:start]

    def _decode(self, body: bytes) -> Message:
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as e:
            raise BadFrame("malformed", str(e)[:200]) from None
