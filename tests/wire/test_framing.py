"""Bytes that are no messages: the connection ends, is counted, and the process lives."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.plan import Logprobs
from shoal.core.request import Finish, Refusal, RequestSpec, Sampling
from shoal.wire import codec
from shoal.wire.codec import BadFrame, FrameReader
from shoal.wire.connection import Cause, Connection
from shoal.wire.listener import STRANGER_FRAME_BYTES
from shoal.wire.messages import (
    MAX_FRAME_BYTES,
    Abort,
    Announce,
    Costs,
    Ending,
    Frame,
    KeepAlive,
    Members,
    Message,
    Refusing,
    Register,
    Replica,
    Report,
    Submit,
    Update,
)
from tests.support.wires import VIEW, connect, frame, listening, raw, read_frame, swallow, until

SPEC = RequestSpec(
    id="a.0",
    prompt=(1, 2, 3),
    max_tokens=4,
    sampling=Sampling(seed=2**63, logit_bias=((5, -1.5),)),
    prefix_keys=(b"k",),
)
LOGPROBS = Logprobs(-0.25, ((1, -0.25), (2, float("-inf"))))
UPDATE = Update("a.0", 3, (7, 8), (LOGPROBS, LOGPROBS), 1, (LOGPROBS,), Ending(Finish.STOP, 8, 16))
REPLICA = Replica(name="e", incarnation="i", address="unix:/x", state="serving")
TO_LISTENER: list[Message] = [
    Submit(specs=(SPEC,)),
    Abort(ids=("a.0",), reason="client_disconnect"),
    KeepAlive(),
    Register(pid=1, replica=REPLICA),
    Report(view=VIEW, gateway={"queue": {"m": 1.0}, "refusals": 2.0}),
]
TO_DIALLER: list[Message] = [
    Frame(view=VIEW, updates=(UPDATE,), refused=(Refusing("b.0", Refusal.QUEUE_FULL, "full"),), costs=Costs((1.0,))),
    Announce(what="step", predicted_ns=10**9),
    Members(version=3, replicas=(REPLICA,)),
]


@pytest.mark.parametrize(
    ("decoder", "messages"), [(codec.to_listener, TO_LISTENER), (codec.to_dialler, TO_DIALLER)], ids=["up", "down"]
)
@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_messages_survive_however_the_bytes_are_cut(
    decoder: msgspec.msgpack.Decoder, messages: list[Message], piece: int
) -> None:
    data = b"".join(codec.encode(message) for message in messages)
    reader, found = FrameReader(decoder), []
    for start in range(0, len(data), piece):
        reader.feed(data[start : start + piece], found)
    assert found == messages


BAD = {
    "oversized": (MAX_FRAME_BYTES + 1).to_bytes(4, "big") + b"x",
    "largest length": b"\xff\xff\xff\xff",
    "empty": frame(b""),
    "no msgpack": frame(b"\xc1"),
    "pickle": frame(pickle.dumps({"t": "keepalive"})),
    "no map": frame(msgspec.msgpack.encode([1, 2, 3])),
    "no type": frame(msgspec.msgpack.encode({"ids": []})),
    "unknown type": frame(msgspec.msgpack.encode({"t": "run", "code": "1"})),
    "other direction": frame(msgspec.msgpack.encode({"t": "announce", "what": "step", "predicted_ns": 1})),
    "unknown field": frame(msgspec.msgpack.encode({"t": "keepalive", "more": 1})),
    "missing field": frame(msgspec.msgpack.encode({"t": "abort", "ids": []})),
    "wrong type": frame(msgspec.msgpack.encode({"t": "abort", "ids": [1], "reason": "x"})),
    "trailing bytes": frame(msgspec.msgpack.encode({"t": "keepalive"}) + b"\x00"),
    "no UTF-8": frame(b"\x81\xa1t\xa2\xff\xfe"),
    "deep nesting": frame(b"\x82\xa1t\xa6report\xa7gateway" + b"\x81\xa1x" * 30_000 + b"\x01"),
    "deep array": frame(b"\x91" * 1_000_000),
    "extension": frame(b"\x82\xa1t\xa6report\xa7gateway\xd4\x05\x00"),
    "huge declared array": frame(b"\x83\xa1t\xa5abort\xa3ids\xdd\xff\xff\xff\xff"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_frames_are_refused_by_the_codec(name: str) -> None:
    found: list[Message] = []
    with pytest.raises(BadFrame):
        FrameReader(codec.to_listener).feed(codec.encode(KeepAlive()) + BAD[name], found)
    assert found == [KeepAlive()]  # what came before it counts


@given(st.binary(max_size=300), st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_random_bytes_never_do_worse_than_a_bad_frame(data: bytes, cut: int) -> None:
    reader, found = FrameReader(codec.to_listener), []
    try:
        for part in (data[:cut], frame(data), data):
            reader.feed(part, found)
    except BadFrame:
        pass


def test_damaged_messages_never_do_worse_than_a_bad_frame() -> None:
    chance = random.Random(5)
    whole = codec.encode(Submit(specs=(SPEC,)))
    for _ in range(3000):
        damaged = bytearray(whole[4:])
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        with contextlib.suppress(BadFrame):
            FrameReader(codec.to_listener).feed(frame(bytes(damaged)), [])


async def test_bad_frames_end_their_connection_and_nothing_else() -> None:
    async with listening(swallow) as listener:
        for name, data in BAD.items():
            connection = await connect(listener.address)
            before = listener.ended[Cause.MALFORMED] + listener.ended[Cause.OVERSIZED]
            connection._transport.write(data)
            await asyncio.wait_for(connection.wait_lost(5), 6)
            assert listener.ended[Cause.MALFORMED] + listener.ended[Cause.OVERSIZED] == before + 1, name
        (await connect(listener.address)).close()


async def test_a_cut_frame_is_an_end_of_file_for_the_receiver() -> None:
    async with listening(swallow) as listener:
        connection = await connect(listener.address)
        connection._transport.write(codec.encode(KeepAlive())[:-1])
        connection.close()
        await until(lambda: listener.ended[Cause.EOF])


async def test_a_stranger_cannot_make_the_listener_hold_a_large_frame() -> None:
    async with listening(swallow) as listener:
        reader, writer = await raw(listener.address)
        await read_frame(reader)
        writer.write((STRANGER_FRAME_BYTES + 1).to_bytes(4, "big"))
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        assert listener.ended[Cause.OVERSIZED] == 1


async def test_a_large_frame_of_a_known_peer_arrives() -> None:
    received: list[Message] = []

    async def handler(connection: Connection) -> None:
        received.append(await connection.receive())

    prompt = tuple(range(100_000))
    async with listening(handler) as listener:
        connection = await connect(listener.address)
        connection.send(Submit(specs=(RequestSpec(id="a", prompt=prompt, max_tokens=1),)))
        await asyncio.wait_for(connection.wait_lost(5), 6)
    assert isinstance(received[0], Submit)
    assert received[0].specs[0].prompt == prompt


def test_a_message_beyond_the_limit_is_the_senders_fault() -> None:
    with pytest.raises(ValueError, match="exceeds the frame limit"):
        codec.encode(Abort(ids=("x" * MAX_FRAME_BYTES,), reason=""))
