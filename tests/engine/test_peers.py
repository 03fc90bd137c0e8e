"""Blocks from one engine to another: never a wrong byte, never past the limit, nothing pinned or left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import msgspec
import pytest

from shoal.engine.transfer import fetch as fetch_module
from shoal.engine.transfer import lend
from shoal.engine.transfer.digest import digest
from shoal.engine.transfer.fetch import Fetched
from shoal.engine.transfer.lease import Range, cut_piece
from shoal.engine.transfer.lend import Lender
from shoal.engine.transfer.nixl import Nixl
from shoal.engine.transfer.shm import Shm, ShmReader
from shoal.engine.transfer.tcp import Tcp
from shoal.engine.transfer.transport import NUM_PLACES, PIECE_BYTES, Memory, Reader, Transport, TransportError
from shoal.wire.connection import Cause, Connection, ConnectionClosed
from shoal.wire.messages import Ask, Declined, KeepAlive, Offer, Part, Piece, Role, Taken
from tests.support.lending import (
    BLOCK_BYTES,
    INFO,
    LAYER_BYTES,
    LIMIT_S,
    NUM_LAYERS,
    OWNER,
    Destination,
    FakeStore,
    block_of,
    fetch,
    fetching,
    key_of,
    lending,
    order,
)
from tests.support.processes import running
from tests.support.wires import connect, end_of, next_of, until
from tests.support.wires import listening as wire_listening

PIECE_BLOCKS = PIECE_BYTES // BLOCK_BYTES
MANY = list(range(7, 7 + 5 * NUM_PLACES * PIECE_BLOCKS // 2))  # twice and a half around the window


@pytest.fixture(autouse=True)
async def nothing_left(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """I8. NIXL keeps descriptors of its own for as long as its process lives: its first connection makes some."""
    if "nixl" in request.node.name:
        yield
        return
    gc.collect()
    before = _residue()
    segments = set(os.listdir("/dev/shm"))
    yield
    with suppress(TimeoutError):
        await until(lambda: (gc.collect(), _residue())[1] == before)
    assert _residue() == before
    assert set(os.listdir("/dev/shm")) <= segments


def _residue() -> tuple[int, list[str]]:
    """Descriptors and threads, without those in which the event loop waits for something."""
    names = sorted(thread.name for thread in threading.enumerate())
    return len(os.listdir("/proc/self/fd")), [name for name in names if not name.startswith("asyncio_")]


# -- what comes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Shm, Tcp])
async def test_blocks_arrive_exactly(kind: Callable[[], Transport]) -> None:
    store = FakeStore()
    owns, reads = kind(), kind()
    async with lending(store, [owns]) as lender, fetching([reads]) as fetcher:
        outcome, destination = await fetch(fetcher, lender, MANY)
        again, _ = await fetch(fetcher, lender, MANY[:1])
        await until(lambda: not store.pins)
    owns.close()
    reads.close()
    assert (outcome.num_good, outcome.why, outcome.corrupt, outcome.way) == (len(MANY), "", False, kind.name)
    assert outcome.num_bytes == len(MANY) * BLOCK_BYTES and outcome.busy_ns > 0
    assert destination.placed == [(index, 0) for index in range(len(MANY))]
    assert again.num_good == 1 and lender.lent_bytes == (len(MANY) + 1) * BLOCK_BYTES


async def test_several_fetches_at_once_share_the_lender() -> None:
    store = FakeStore()
    async with lending(store, max_leases=2) as lender, fetching() as fetcher:
        some = [fetch(fetcher, lender, list(range(n, n + 12))) for n in (0, 100, 200, 300, 400, 500)]
        for outcome, _ in await asyncio.gather(*some):
            assert outcome.num_good == 12 and not outcome.why
        assert store.num_pins == 6


@pytest.mark.parametrize("num_held", [1, 10])
async def test_what_is_held_of_a_prefix_comes(num_held: int) -> None:
    async with lending(FakeStore(num_held)) as lender, fetching() as fetcher:
        outcome, _ = await fetch(fetcher, lender, range(20))
        assert (outcome.num_good, outcome.why) == (num_held, "the rest is not there any more")


async def test_the_second_way_is_taken_where_the_first_does_not_lead_there() -> None:
    """As between two machines: shm is offered and cannot be opened."""

    class Elsewhere(Shm):
        def register(self, memory: Memory) -> bytes:
            door = msgspec.msgpack.decode(super().register(memory))
            return msgspec.msgpack.encode(["another machine", *door[1:]])

    owns = [Elsewhere(), Tcp()]
    async with lending(FakeStore(), owns) as lender, fetching() as fetcher:
        outcome, _ = await fetch(fetcher, lender, MANY)
    owns[1].close()
    assert (outcome.num_good, outcome.way) == (len(MANY), "tcp")


async def test_without_a_way_in_common_nothing_comes() -> None:
    shm, tcp = Shm(), Tcp()
    async with lending(FakeStore(), [shm]) as lender, fetching([tcp]) as fetcher:
        outcome, _ = await fetch(fetcher, lender, range(3))
    tcp.close()
    assert (outcome.num_good, outcome.why) == (0, "both sides know no transport in common")


# -- who may -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "fields", "why"),
    [
        ({"secret": b"another secret"}, {}, "the shared secret does not match"),
        ({"hash_root": b"another model"}, {}, "another model, number format or block size"),
        ({}, {"incarnation": "an earlier one"}, "another one is there"),
        ({"num_layers": NUM_LAYERS * 2}, {}, "laid out in another way"),
        ({}, {"address": "tcp:127.0.0.1:1"}, "Connect call failed"),
        ({}, {"address": "tcp:192.0.2.1:1"}, "SHOAL_SECRET has 21 bytes"),
    ],
)
async def test_who_is_refused(settings: dict[str, Any], fields: dict[str, Any], why: str) -> None:
    destination = Destination(3)
    async with lending(FakeStore()) as lender, fetching(**settings) as fetcher:
        wanted = replace(order(lender.listener.address, range(3)), **fields)
        fetcher.start(wanted, destination.place, LIMIT_S, destination.tell)
        outcome = await destination.end()
    assert why in outcome.why and outcome.num_good == 0 and not destination.placed


async def test_blocks_that_are_not_there_are_declined() -> None:
    async with lending(FakeStore(0)) as lender, fetching() as fetcher:
        outcome, _ = await fetch(fetcher, lender, range(3))
        assert outcome.why == "declined: none of these blocks is here any more"


async def test_a_gateway_borrows_nothing() -> None:
    async with lending(FakeStore()) as lender:
        with pytest.raises(ConnectionClosed, match="blocks are for engines, not a gateway"):
            await connect(lender.listener.address)


async def test_leases_are_few_and_others_wait_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    async with lending(store, max_leases=1) as lender, fetching() as fetcher:
        first = await borrow(lender, [1, 2])
        await next_of(first, Offer)
        second, third = await borrow(lender, [3]), Destination(3)
        fetcher.start(order(lender.listener.address, range(3)), third.place, LIMIT_S, third.tell)
        monkeypatch.setattr(lend, "MAX_LINE", 2)
        await until(lambda: len(lender._line) == 2)
        outcome, _ = await fetch(fetcher, lender, range(3))
        assert outcome.why == "declined: too many others borrow blocks"
        assert store.num_pins == 1
        second.close()  # it does not hold up whoever is behind it
        first.close()
        assert (await third.end()).num_good == 3
        third.check(range(3))


# -- leases ------------------------------------------------------------------------------------------------------------


async def borrow(lender: Lender, numbers: list[int], **fields: Any) -> Connection:
    """By hand; the offer was not read yet."""
    connection = await connect(lender.listener.address, role=Role.ENGINE, name="borrower")
    connection.send(Ask(**{"incarnation": OWNER, "keys": tuple(map(key_of, numbers)), **fields}))
    return connection


async def test_a_lease_ends_with_its_connection() -> None:
    store = FakeStore()
    async with lending(store) as lender:
        connection = await borrow(lender, MANY)
        await next_of(connection, Offer)
        assert len(store.pins) == 1
        connection.close()
        await until(lambda: not store.pins)


async def test_a_borrower_that_stops_loses_its_lease_and_one_that_is_slow_keeps_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lend, "LEASE_S", 0.4)
    store = FakeStore()
    async with lending(store) as lender:
        silent, slow = await borrow(lender, MANY), await borrow(lender, MANY)
        for connection in (silent, slow):
            await next_of(connection, Offer)
        for _ in range(10):
            slow.send(KeepAlive())
            await asyncio.sleep(0.1)
        assert len(store.pins) == 1 and not slow.closed
        assert (await end_of(silent)).cause is Cause.EOF
        slow.close()
    assert [record.message for record in caplog.records] == ["peers.lease_expired"]


async def test_a_lease_ends_before_its_blocks_are_pinned() -> None:
    """The engine answers late: what it says then is about nobody."""
    store = FakeStore()
    store.answers = False
    async with lending(store) as lender:
        connection = await borrow(lender, MANY)
        await until(lambda: store.pins)
        (tell,) = store.pins.values()
        connection.close()
        await until(lambda: not store.pins)
        tell(MANY)
        second = await borrow(lender, MANY)
        await until(lambda: store.pins)
        store.pins[2](MANY[:2])
        assert len((await next_of(second, Piece)).parts) == 2
        second.close()
    assert {block for block, _ in store.taken} <= set(MANY[:2])


async def test_whoever_asks_for_an_earlier_life_is_declined() -> None:
    async with lending(FakeStore()) as lender:
        connection = await borrow(lender, [1], incarnation="an earlier one")
        assert "another one is here" in (await next_of(connection, Declined)).reason


def _read(reader: Reader) -> None:
    reader.read(0, 100)
    while not reader.poll():
        pass


async def test_nobody_reads_after_the_lease_is_over() -> None:
    store, owns, memory = FakeStore(), Tcp(), Memory()
    async with lending(store, [owns]) as lender:
        connection = await borrow(lender, MANY)
        offer = await next_of(connection, Offer)
        reader = Tcp().open(offer.doors["tcp"], memory, LIMIT_S)
        connection.close()
        await until(lambda: not store.pins)
        with pytest.raises(TransportError):
            _read(reader)
        reader.close()
    owns.close()
    memory.close()


async def test_whoever_waits_for_the_owner_keeps_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lend, "LEASE_S", 0.5)
    monkeypatch.setattr(fetch_module, "RENEW_S", 0.1)
    store = FakeStore()
    store.answers = False
    async with lending(store) as lender, fetching() as fetcher:
        destination = Destination(2)
        fetcher.start(order(lender.listener.address, [4, 5]), destination.place, LIMIT_S, destination.tell)
        await until(lambda: store.pins)
        await asyncio.sleep(1.0)
        store.pins[1]([4, 5])
        assert (await destination.end()).num_good == 2


async def test_a_window_in_which_something_may_still_land_is_not_used_again() -> None:
    class Restless(ShmReader):
        def close(self) -> bool:
            super().close()
            return False

    class RestlessShm(Shm):
        def open(self, door: bytes, target: Memory, limit_s: float) -> ShmReader:
            found = super().open(door, target, limit_s)
            return Restless(found._fd, target)

    async with lending(FakeStore()) as lender:
        async with fetching([RestlessShm()]) as fetcher:
            assert (await fetch(fetcher, lender, [1]))[0].num_good == 1
            assert not fetcher._memories
        async with fetching([Shm()]) as fetcher:
            assert (await fetch(fetcher, lender, [1]))[0].num_good == 1
            assert len(fetcher._memories) == 1


async def test_no_more_is_read_ahead_than_the_window_holds() -> None:
    """Back-pressure: a borrower that does not take its pieces gets no further ones."""
    store = FakeStore()
    async with lending(store) as lender:
        connection = await borrow(lender, MANY)
        for number in range(NUM_PLACES):
            assert (await next_of(connection, Piece)).number == number
        assert len(store.taken) == NUM_PLACES * PIECE_BLOCKS
        connection.send(Taken(number=0))
        assert (await next_of(connection, Piece)).number == NUM_PLACES
        connection.send(Taken(number=1))
        piece = await next_of(connection, Piece)
        assert len(store.taken) == (NUM_PLACES + 2) * PIECE_BLOCKS and not piece.last
        connection.close()


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (Taken(number=1), "piece 1 was not due"),
        (Taken(number=NUM_PLACES), "was not due"),
        (Ask(incarnation=OWNER, keys=(key_of(1),)), None),
    ],
)
async def test_a_borrower_that_makes_no_sense_is_cut_off(message: Any, cause: str | None) -> None:
    store = FakeStore()
    async with lending(store) as lender:
        connection = await borrow(lender, MANY)
        await next_of(connection, Piece)
        connection.send(message)
        if cause is not None:
            assert cause in (await next_of(connection, Declined)).reason
        await end_of(connection)
        await until(lambda: not store.pins)


@pytest.mark.parametrize("fields", [{"keys": ()}, {"keys": (b"k",) * (lend.MAX_KEYS + 1)}])
async def test_questions_without_an_answer(fields: dict[str, Any]) -> None:
    async with lending(FakeStore()) as lender:
        assert (await end_of(await borrow(lender, [1], **fields))).cause is Cause.EOF
        assert lender.listener.ended[Cause.MALFORMED] == 1


async def test_blocks_that_cannot_be_read_end_the_fetch(caplog: pytest.LogCaptureFixture) -> None:
    store = FakeStore()
    store.fails = True
    async with lending(store) as lender, fetching() as fetcher:
        outcome, _ = await fetch(fetcher, lender, range(3))
        assert outcome.why == "withdrawn: the blocks cannot be read"
        store.fails = False
        assert (await fetch(fetcher, lender, range(3)))[0].num_good == 3
    assert "peers.lending_failed" in [record.message for record in caplog.records]
    caplog.clear()  # its records hold the window


# -- faults ------------------------------------------------------------------------------------------------------------


class Wire:
    """A link for the bytes of one tcp transport: at byte `at` of what the owner sends, something happens."""

    def __init__(self, fault: str, at: int) -> None:
        self.fault = fault
        self.at = at
        self.done = False
        self.address = ""
        self.behind = 0  # port
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def up(self) -> AsyncIterator[Wire]:
        server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        self.address = f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_connection("127.0.0.1", self.behind)
        both = [asyncio.create_task(self._forward(reader, ours)), asyncio.create_task(self._harm(theirs, writer))]
        self._tasks.update(both)
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in both:
                task.cancel()
            writer.close()
            ours.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)

    async def _harm(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen = 0
        while data := await reader.read(1 << 18):
            place = self.at - seen
            seen += len(data)
            if 0 <= place < len(data) and not self.done:
                self.done = True
                if self.fault == "flip":
                    data = data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]
                elif self.fault == "garbage":
                    data = data[:place] + random.Random(1).randbytes(len(data) - place)
                elif self.fault == "lose":
                    data = data[:place] + data[place + 1 :]
                elif self.fault == "cut":
                    writer.write(data[:place])
                    return
                elif self.fault == "stall":
                    writer.write(data[:place])
                    await asyncio.Event().wait()
            writer.write(data)
            await writer.drain()


class Through(Tcp):
    """The reader's transport, that goes through a wire."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire

    def open(self, door: bytes, target: Memory, limit_s: float) -> Reader:
        address, number, key = msgspec.msgpack.decode(door)
        self._wire.behind = int(address.rpartition(":")[2])
        return super().open(msgspec.msgpack.encode([self._wire.address, number, key]), target, limit_s)


GREETING = 16


async def harmed(fault: str, at: int, limit_s: float = LIMIT_S) -> Fetched:
    owns = Tcp()
    store = FakeStore()
    async with Wire(fault, at).up() as wire:
        reads = Through(wire)
        async with lending(store, [owns]) as lender, fetching([reads]) as fetcher:
            outcome, destination = await fetch(fetcher, lender, MANY, limit_s)
            await until(lambda: not store.pins)
            num_placed = len(destination.placed)
            after, _ = await fetch(fetcher, lender, MANY[:1], limit_s)
            assert after.num_good == 1
            assert len(destination.placed) == num_placed
        reads.close()
    owns.close()
    return outcome


@pytest.mark.parametrize("block", [0, 1, PIECE_BLOCKS, len(MANY) - 1])
async def test_a_flipped_bit_on_the_wire_is_noticed(block: int) -> None:
    outcome = await harmed("flip", GREETING + block * BLOCK_BYTES + 4711)
    assert (outcome.num_good, outcome.corrupt) == (block, True)
    assert outcome.why == f"block {block} came with another digest than it left with"


@pytest.mark.parametrize("fault", ["flip", "garbage", "lose", "cut", "stall"])
async def test_whatever_happens_on_the_wire_no_wrong_byte_is_used(fault: str) -> None:
    """At random places; destinations are checked by `fetch`. A limit that is too short ends it, with what is good."""
    rng = random.Random(fault)
    for _ in range(4):
        at = GREETING + rng.randrange(len(MANY) * BLOCK_BYTES)
        whole = (at - GREETING) // BLOCK_BYTES
        began_s = time.monotonic()
        outcome = await harmed(fault, at, 0.5 if fault in ("stall", "lose") else LIMIT_S)
        assert time.monotonic() - began_s < 3.0
        assert outcome.num_good <= whole and outcome.why
        if fault in ("flip", "garbage"):
            assert outcome.num_good == whole and outcome.corrupt


async def test_a_fault_that_the_owner_carried_along_is_noticed() -> None:
    """Its digest is from when the block was made."""
    store = FakeStore()
    store.known = {2: digest(block_of(3)), 1: digest(block_of(1))}
    async with lending(store) as lender, fetching() as fetcher:
        outcome, _ = await fetch(fetcher, lender, range(5))
        assert (outcome.num_good, outcome.corrupt) == (2, True)


NO_NIXL = find_spec("nixl_cu13") is None and find_spec("nixl_cu12") is None
NIXL = pytest.param("nixl", marks=pytest.mark.skipif(NO_NIXL, reason="the extra `nixl` is not installed"))


@pytest.fixture(scope="module")
def agent() -> Iterator[Nixl]:
    """One for all tests: NIXL keeps some descriptors for as long as the process lives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        made = Nixl("reader")
    yield made
    made.close()


@pytest.fixture
def reads(kind: str, request: pytest.FixtureRequest) -> Iterator[Transport]:
    if kind == "nixl":
        yield request.getfixturevalue("agent")
        return
    made: Transport = Shm() if kind == "shm" else Tcp()
    yield made
    made.close()


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["shm", "tcp", NIXL])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_an_owner_that_is_killed_or_stopped_in_the_middle(reads: Transport, number: int) -> None:
    """Another process. The fetch keeps what was good, is told within its limit, and leaves nothing; then another owner
    is there."""
    command = [sys.executable, "-m", "tests.support.lending", "tcp:127.0.0.1:0", reads.name]
    with running(command, {"UCX_TLS": "tcp"}) as owner:
        found = await asyncio.to_thread(owner.wait_line, r"lends at (\S+)")
        async with fetching([reads], max_bytes_per_s=40_000_000) as fetcher:
            destination = Destination(len(MANY))
            began_s = time.monotonic()
            fetcher.start(order(found.group(1), MANY), destination.place, 1.5, destination.tell)
            await until(lambda: destination.placed)
            os.kill(owner.pid, number)
            outcome = await destination.end()
            assert time.monotonic() - began_s < 2.0
            destination.check(MANY)
            assert 0 < outcome.num_good < len(MANY) and outcome.why
    with running(command, {"UCX_TLS": "tcp"}) as owner:
        found = await asyncio.to_thread(owner.wait_line, r"lends at (\S+)")
        async with fetching([reads]) as fetcher:
            destination = Destination(len(MANY))
            fetcher.start(order(found.group(1), MANY), destination.place, LIMIT_S, destination.tell)
            outcome = await destination.end()
            destination.check(MANY)
            assert (outcome.num_good, outcome.why, outcome.way) == (len(MANY), "", reads.name)


def parts(*ranges: tuple[int, int, int]) -> tuple[Part, ...]:
    """As they should be, of blocks 0, 1, ..."""
    return tuple(Part(*each, b"") for each in ranges)


NOT_NEXT, NOT_ASKED = "what came is not the next piece", "a piece holds what was not asked for"
NONSENSE = [
    ([Piece(number=1, parts=())], NOT_NEXT),
    ([Piece(number=0, parts=()), Piece(number=0, parts=())], NOT_NEXT),
    ([Offer(num_layers=NUM_LAYERS, block_bytes=BLOCK_BYTES, doors={})], NOT_NEXT),
    ([KeepAlive()], "malformed"),  # an owner never says that
    ([Piece(number=0, parts=parts((3, 0, 6)))], NOT_ASKED),
    ([Piece(number=0, parts=parts((-1, 0, 6)))], NOT_ASKED),
    ([Piece(number=0, parts=parts((0, 1, 5)))], NOT_ASKED),
    ([Piece(number=0, parts=parts((0, 0, 7)))], NOT_ASKED),
    ([Piece(number=0, parts=parts((0, 0, 0)))], NOT_ASKED),
    ([Piece(number=0, parts=parts((0, 0, -1)))], NOT_ASKED),
    ([Piece(number=0, parts=parts((0, 0, 6), (0, 0, 6)))], NOT_ASKED),
    ([Piece(number=0, parts=parts((0, 0, 6)))], "another digest"),
    ([Piece(number=0, parts=(), last=True)], "the rest is not there any more"),
]


async def fooled(said: list[Any], destination: Destination, limit_s: float) -> Fetched:
    """What comes of an owner that has the secret, says this, and whose window is full of zeros."""
    memory, shm = Memory(), Shm()

    async def fool(connection: Connection) -> None:
        await next_of(connection, Ask)
        doors = {"shm": shm.register(memory)}
        connection.send(Offer(num_layers=NUM_LAYERS, block_bytes=BLOCK_BYTES, doors=doors))
        for message in said:
            connection.send(message)
        await end_of(connection, LIMIT_S)

    async with wire_listening(fool) as listener, fetching() as fetcher:
        listener._welcome = lambda: INFO
        wanted = order(listener.address, range(3), incarnation="listener")
        fetcher.start(wanted, destination.place, limit_s, destination.tell)
        outcome = await destination.end()
    memory.close()
    return outcome


@pytest.mark.parametrize(("said", "why"), NONSENSE, ids=range(len(NONSENSE)))
async def test_an_owner_that_talks_nonsense_fools_nobody(said: list[Any], why: str) -> None:
    destination = Destination(3)
    outcome = await fooled(said, destination, LIMIT_S)
    assert why in outcome.why and outcome.num_good == 0 and not destination.placed


async def test_an_owner_that_overwrites_what_was_not_taken_is_left() -> None:
    """Five pieces for four places, while the first is still being placed: whatever is in the window has no meaning."""
    layer = digest(bytes(LAYER_BYTES))
    said = [Piece(number=n, parts=(Part(0, n, 1, layer),)) for n in range(NUM_PLACES + 1)]
    destination = Destination(3, gated=True)
    asyncio.get_running_loop().call_later(0.3, destination.gate.set)
    outcome = await fooled(said, destination, LIMIT_S)
    assert outcome.why == "a piece came before there was room for it"
    assert (outcome.num_good, outcome.num_bytes) == (0, NUM_PLACES * LAYER_BYTES)


async def test_a_bad_frame_ends_the_fetch() -> None:
    async def babble(connection: Connection) -> None:
        await next_of(connection, Ask)
        connection._transport.write(b"\0\0\0\4abcd")
        await end_of(connection)

    async with wire_listening(babble) as listener, fetching() as fetcher:
        listener._welcome = lambda: INFO
        destination = Destination(3)
        wanted = order(listener.address, range(3), incarnation="listener")
        fetcher.start(wanted, destination.place, LIMIT_S, destination.tell)
        assert "malformed" in (await destination.end()).why


# -- limits ------------------------------------------------------------------------------------------------------------


async def test_the_limit_holds_while_the_owner_pins() -> None:
    store = FakeStore()
    store.answers = False
    async with lending(store) as lender, fetching() as fetcher:
        began_s = time.monotonic()
        outcome, _ = await fetch(fetcher, lender, range(3), 0.2)
        assert outcome.why == "it took longer than its limit" and time.monotonic() - began_s < 1.0
        await until(lambda: not store.pins)


async def test_the_limit_runs_while_others_are_served() -> None:
    async with lending(FakeStore(), max_leases=9) as lender, fetching() as fetcher:
        blocked = [Destination(1, gated=True) for _ in range(4)]
        for each in blocked:
            fetcher.start(order(lender.listener.address, [1]), each.place, LIMIT_S, each.tell)
        outcome, _ = await fetch(fetcher, lender, range(3), 0.2)
        assert outcome.why == "it took longer than its limit"
        for each in blocked:
            each.gate.set()
            assert (await each.end()).num_good == 1


async def test_what_is_placed_when_the_limit_comes_is_waited_for() -> None:
    """Once it was told, nobody touches the destination: the caller may hand the blocks to somebody else."""
    async with lending(FakeStore()) as lender, fetching() as fetcher:
        destination = Destination(20, gated=True)
        fetcher.start(order(lender.listener.address, range(20)), destination.place, 0.2, destination.tell)
        await asyncio.sleep(0.5)
        assert destination.outcome is None
        destination.gate.set()
        outcome = await destination.end()
        assert outcome.num_good == len(destination.placed) == 1
        destination.check(range(20))


async def test_closing_gives_up_and_tells_nothing() -> None:
    store = FakeStore(gated=True)
    async with lending(store) as lender:
        async with fetching() as fetcher:
            destination = Destination(20)
            fetcher.start(order(lender.listener.address, range(20)), destination.place, LIMIT_S, destination.tell)
            await until(lambda: store.pins)
        assert destination.outcome is None
        store.gated = False
        store.permits.release(10)


@pytest.mark.parametrize("side", ["lender", "fetcher"])
async def test_a_cap_holds(side: str) -> None:
    """20 blocks of 369 KB in pieces of 5 at 20 MB/s: all but the first piece wait, 0.28 s together. The first does
    not, so a short fetch is as fast as it goes."""
    cap = {"max_bytes_per_s": 20_000_000}
    async with (
        lending(FakeStore(), **(cap if side == "lender" else {})) as lender,
        fetching(**(cap if side == "fetcher" else {})) as fetcher,
    ):
        outcome, _ = await fetch(fetcher, lender, range(20))
        assert outcome.num_good == 20
        assert 0.26 < outcome.busy_ns / 1e9 < 2.0


def test_pieces_are_cut() -> None:
    """Ten layers go into a piece. Blocks of four stay whole; one of 25 is cut."""
    layer_bytes = PIECE_BYTES // 10
    small = deque(Range(number, number, 0, 4) for number in range(3))
    assert [len(cut_piece(small, layer_bytes)) for _ in range(2)] == [2, 1]
    large = deque([Range(0, 9, 0, 25), Range(1, 8, 0, 4)])
    cuts = [cut_piece(large, layer_bytes) for _ in range(3)]
    assert cuts == [
        [Range(0, 9, 0, 10)],
        [Range(0, 9, 10, 10)],
        [Range(0, 9, 20, 5), Range(1, 8, 0, 4)],
    ]


def test_layers_that_fit_into_no_piece_are_refused_at_the_start() -> None:
    store = FakeStore()
    store.block_bytes = (PIECE_BYTES + 1) * NUM_LAYERS
    with pytest.raises(ValueError, match="a layer of a block has"):
        Lender(store, [])
