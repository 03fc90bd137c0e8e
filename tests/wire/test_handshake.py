"""Who gets in, who does not, and what they are told."""

from __future__ import annotations

import asyncio
import stat

import msgspec
import pytest

from shoal.wire import handshake
from shoal.wire import listener as listening_side
from shoal.wire.connection import Cause, Connection, ConnectionClosed, dial
from shoal.wire.listener import listen
from shoal.wire.messages import PROTOCOL, Challenge, EngineInfo, Hello, KeepAlive, Role, Welcome
from tests.support.processes import socket_folder
from tests.support.wires import SECRET, connect, frame, listening, raw, read_frame, swallow, until

ENGINE = EngineInfo(
    model="m", model_digest="d", hash_root=b"root", hash_block_tokens=16, max_model_len=128, vocab_size=320
)


@pytest.mark.parametrize("scheme", ["unix", "tcp"])
async def test_both_sides_learn_who_the_other_is(scheme: str) -> None:
    met: list[Hello | Welcome] = []

    async def handler(connection: Connection) -> None:
        met.append(connection.peer)
        await swallow(connection)

    with socket_folder() as folder:
        address = f"unix:{folder}/x.sock" if scheme == "unix" else "tcp:127.0.0.1:0"
        listener = await listen(address, secret=SECRET, incarnation="i", welcome=lambda: ENGINE, handler=handler)
        dialler = await connect(listener.address, session=7)
        assert isinstance(dialler.peer, Welcome)
        assert (dialler.peer.incarnation, dialler.peer.engine) == ("i", ENGINE)
        dialler.close()
        await listener.close()
        assert isinstance(met[0], Hello)
        assert (met[0].role, met[0].name, met[0].session) == (Role.GATEWAY, "gateway-0", 7)
        assert list(folder.iterdir()) == []


async def test_a_wrong_secret_is_rejected_with_the_reason_and_counted() -> None:
    async with listening(swallow) as listener:
        with pytest.raises(ConnectionClosed, match="shared secret does not match"):
            await connect(listener.address, secret=b"another")
        await until(lambda: listener.ended[Cause.UNTRUSTED])
        (await connect(listener.address)).close()  # and the listener lives


async def test_a_listener_without_the_secret_is_not_believed() -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(msgspec.msgpack.encode(Challenge(protocol=PROTOCOL, nonce=b"n" * 16))))
        await read_frame(reader)
        writer.write(frame(msgspec.msgpack.encode(Welcome(incarnation="i", proof=b"p" * 32))))
        await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(ConnectionClosed, match="does not hold the shared secret"):
        await connect(f"tcp:127.0.0.1:{port}")
    server.close()


def test_a_proof_of_one_side_is_none_of_the_other() -> None:
    """Else a listener without the secret could send a dialler's own proof back to it."""
    asked = handshake.challenge()
    sent = handshake.hello(asked, secret=SECRET, role=Role.GATEWAY, name="g", incarnation="i", session=1)
    for echo in (asked, msgspec.structs.replace(asked, nonce=sent.nonce)):
        own = handshake.welcome(echo, sent, secret=SECRET, incarnation="i", engine=None)
        assert sent.proof != own.proof
    reflected = Welcome(incarnation="i", proof=sent.proof)
    assert handshake.distrust(asked, sent, reflected, secret=SECRET) is not None


async def test_another_protocol_version_is_rejected_with_both_numbers() -> None:
    async with listening(swallow) as listener:
        reader, writer = await raw(listener.address)
        asked = msgspec.convert(await read_frame(reader), Challenge, strict=False)
        hello = handshake.hello(asked, secret=SECRET, role=Role.GATEWAY, name="g", incarnation="i", session=1)
        writer.write(frame(msgspec.msgpack.encode(msgspec.structs.replace(hello, protocol=PROTOCOL + 1))))
        answer = await read_frame(reader)
        assert answer == {"t": "rejected", "reason": f"protocol {PROTOCOL + 1} is not spoken here, {PROTOCOL} is"}
        assert await reader.read() == b""
        writer.close()


async def test_a_recorded_hello_is_worth_nothing_the_second_time() -> None:
    async with listening(swallow) as listener:
        reader, writer = await raw(listener.address)
        asked = msgspec.convert(await read_frame(reader), Challenge, strict=False)
        recorded = frame(
            msgspec.msgpack.encode(
                handshake.hello(asked, secret=SECRET, role=Role.GATEWAY, name="g", incarnation="i", session=1)
            )
        )
        writer.write(recorded)
        assert (await read_frame(reader))["t"] == "welcome"
        writer.close()

        reader, writer = await raw(listener.address)
        await read_frame(reader)
        writer.write(recorded)
        assert await read_frame(reader) == {"t": "rejected", "reason": "the shared secret does not match"}
        writer.close()


async def test_other_messages_before_the_hello_end_the_connection() -> None:
    async with listening(swallow) as listener:
        reader, writer = await raw(listener.address)
        await read_frame(reader)
        writer.write(frame(msgspec.msgpack.encode(KeepAlive())))
        assert (await read_frame(reader))["reason"] == "a KeepAlive instead of a hello"
        assert await reader.read() == b""
        writer.close()


async def test_a_stranger_that_says_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening_side, "HANDSHAKE_S", 0.05)
    async with listening(swallow) as listener:
        reader, writer = await raw(listener.address)
        await read_frame(reader)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        await until(lambda: listener.ended[Cause.SILENT])


async def test_a_dial_to_a_listener_that_says_nothing_ends_at_its_limit() -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    address = f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(TimeoutError):
        await dial(address, role=Role.GATEWAY, name="g", incarnation="i", session=1, secret=SECRET, timeout_s=0.05)
    server.close()


async def test_an_authenticated_dialler_can_be_turned_away() -> None:
    async with listening(swallow, admit=lambda hello: f"no {hello.role} here") as listener:
        with pytest.raises(ConnectionClosed, match="no gateway here"):
            await connect(listener.address)


async def test_only_so_many_handshakes_at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening_side, "MAX_STRANGERS", 2)
    async with listening(swallow) as listener:
        strangers = [await raw(listener.address) for _ in range(2)]
        for reader, _ in strangers:
            await read_frame(reader)
        with pytest.raises(ConnectionClosed):
            await connect(listener.address)
        for _, writer in strangers:
            writer.close()
        await until(lambda: listener.ended[Cause.EOF] == 2)
        (await connect(listener.address)).close()


async def test_sockets_are_closed_to_other_users_and_stale_ones_replaced() -> None:
    with socket_folder() as folder:
        path = folder / "new" / "x.sock"
        async with listening(swallow, f"unix:{path}") as first:
            assert stat.S_IMODE(path.lstat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            async with listening(swallow, f"unix:{path}") as second:  # as after a kill: the file is there
                (await connect(second.address)).close()
            assert first.address == second.address
        folder.chmod(0o755)
        with pytest.raises(ValueError, match="open to other users"):
            await listen(f"unix:{folder}/x.sock", secret=SECRET, incarnation="i", welcome=lambda: None, handler=swallow)
        folder.chmod(0o700)


async def test_a_socket_in_a_folder_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket_folder() as folder:
        monkeypatch.setattr("os.geteuid", lambda: folder.stat().st_uid + 1)
        with pytest.raises(ValueError, match="one's own"):
            await listen(f"unix:{folder}/x.sock", secret=SECRET, incarnation="i", welcome=lambda: None, handler=swallow)


@pytest.mark.parametrize(
    ("address", "secret", "why"),
    [
        ("tcp:127.0.0.1:0", b"", "empty shared secret"),
        ("tcp:127.0.0.1:99999", SECRET, "neither unix:/path nor tcp:host:port"),
        ("http://127.0.0.1", SECRET, "neither unix:/path nor tcp:host:port"),
        ("unix:/" + "x" * 120, SECRET, "longer than 107 bytes"),
    ],
)
async def test_addresses_that_are_refused(address: str, secret: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        await listen(address, secret=secret, incarnation="i", welcome=lambda: None, handler=swallow)
