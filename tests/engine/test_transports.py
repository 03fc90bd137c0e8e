"""Ways to read another engine's memory: the same bytes, none for whoever has no leave, nothing is left behind."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from shoal.engine.transfer import tcp
from shoal.engine.transfer.nixl import Nixl, Unavailable
from shoal.engine.transfer.shm import Shm
from shoal.engine.transfer.tcp import Tcp
from shoal.engine.transfer.transport import WINDOW_BYTES, Memory, Pacer, Reader, Transport, TransportError
from tests.support.processes import running, wait_until

LIMIT_S = 10.0
BOTH = ["shm", "tcp"]
NO_NIXL = importlib.util.find_spec("nixl_cu13") is None and importlib.util.find_spec("nixl_cu12") is None
NIXL = pytest.param("nixl", marks=pytest.mark.skipif(NO_NIXL, reason="the extra `nixl` is not installed"))


@pytest.fixture(scope="module")
def agents() -> Iterator[tuple[Nixl, Nixl]]:
    """NIXL's own TCP, as between hosts; left to itself it would copy within the process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        pair = Nixl("owner"), Nixl("reader")
    yield pair
    for each in pair:
        each.close()


@pytest.fixture
def pair(kind: str, request: pytest.FixtureRequest) -> Iterator[tuple[Transport, Transport]]:
    """The owner's and the reader's."""
    if kind == "nixl":
        yield request.getfixturevalue("agents")
        return
    made: tuple[Transport, Transport] = (Shm(), Shm()) if kind == "shm" else (Tcp(), Tcp())
    yield made
    for each in made:
        each.close()


@pytest.fixture
def source() -> Iterator[Memory]:
    memory = Memory()
    memory.view[:] = np.random.default_rng(1).integers(0, 256, WINDOW_BYTES, dtype=np.uint8).data
    yield memory
    memory.close()


@pytest.fixture
def target() -> Iterator[Memory]:
    memory = Memory()
    yield memory
    memory.close()


def wait_read(reader: Reader) -> None:
    due_s = time.monotonic() + LIMIT_S
    while not reader.poll():
        assert time.monotonic() < due_s


def wait_refused(reader: Reader) -> None:
    with pytest.raises(TransportError):
        wait_read(reader)


@pytest.mark.parametrize("kind", [*BOTH, NIXL])
def test_ranges_arrive_exactly_and_nothing_else_changes(
    pair: tuple[Transport, Transport], source: Memory, target: Memory
) -> None:
    """Of any size, several asked for before the first is there, also the whole window."""
    owner, borrower = pair
    reader = borrower.open(owner.register(source), target, LIMIT_S)
    rng = random.Random(3)
    expected = bytearray(WINDOW_BYTES)
    sizes = [1, 4095, 1 << 20, 3 << 20]
    for _ in range(4):
        ranges = [(rng.randrange(WINDOW_BYTES - size), size) for size in sizes]
        for offset, size in ranges:
            reader.read(offset, size)
        for offset, size in ranges:
            wait_read(reader)
            expected[offset : offset + size] = source.view[offset : offset + size]
        assert target.view == expected
    source.view[5] ^= 1
    reader.read(0, WINDOW_BYTES)
    wait_read(reader)
    assert target.view == source.view
    assert reader.close()
    owner.withdraw(source)


@pytest.mark.parametrize("kind", [*BOTH, NIXL])
def test_two_readers_of_two_memories_do_not_meet(pair: tuple[Transport, Transport]) -> None:
    owner, borrower = pair
    sources, targets = [Memory(1 << 20) for _ in range(2)], [Memory(1 << 20) for _ in range(2)]
    for value, source in enumerate(sources, 1):
        source.view[:] = bytes([value]) * (1 << 20)
    doors = [owner.register(source) for source in sources]
    readers = [borrower.open(door, target, LIMIT_S) for door, target in zip(doors, targets, strict=True)]
    for reader in readers:
        reader.read(0, 1 << 20)
    for reader in reversed(readers):
        wait_read(reader)
    assert [target.view[-1] for target in targets] == [1, 2]
    assert readers[0].close()
    readers[1].read(0, 10)
    wait_read(readers[1])
    assert readers[1].close()
    for memory in sources:
        owner.withdraw(memory)
    for memory in (*sources, *targets):
        memory.close()


@pytest.mark.parametrize("kind", [*BOTH, NIXL])
def test_doors_that_lead_nowhere_are_refused(pair: tuple[Transport, Transport], source: Memory, target: Memory) -> None:
    owner, borrower = pair
    door = owner.register(source)
    rng = random.Random(5)
    damaged = [b"", b"\xc1", door[:-1], msgspec.msgpack.encode([1, 2]), rng.randbytes(40)]
    for each in damaged:
        with pytest.raises(TransportError):
            borrower.open(each, target, 1.0)
    owner.withdraw(source)
    assert not any(target.view)


def test_shm_finds_no_other_file_and_no_other_machine(source: Memory, target: Memory) -> None:
    transport = Shm()
    boot_id, pid, fd, inode, num_bytes = msgspec.msgpack.decode(transport.register(source))
    other = Memory()
    wrong = [
        ("another", pid, fd, inode, num_bytes),
        (boot_id, pid, other.fd, inode, num_bytes),
        (boot_id, pid, fd, inode, num_bytes + 1),
        (boot_id, 1 << 30, fd, inode, num_bytes),
        (boot_id, pid, 1 << 20, inode, num_bytes),
    ]
    num_fds = len(os.listdir("/proc/self/fd"))
    for door in wrong:
        with pytest.raises(TransportError):
            transport.open(msgspec.msgpack.encode(door), target, 1.0)
    assert len(os.listdir("/proc/self/fd")) == num_fds
    other.close()


def test_memory_has_no_name_and_ends_with_its_last_user(source: Memory, target: Memory) -> None:
    """I8: killed or not, nothing of it stays."""
    before = set(os.listdir("/dev/shm"))
    script = (
        "import time; from shoal.engine.transfer.shm import Shm; from shoal.engine.transfer.transport import Memory\n"
        "m = Memory(); m.view[:3] = b'abc'; print('door', Shm().register(m).hex(), flush=True); time.sleep(60)"
    )
    with running([sys.executable, "-c", script]) as owner:
        door = bytes.fromhex(owner.wait_line(r"door (\w+)\n").group(1))
        reader = Shm().open(door, target, 1.0)
        owner.kill(signal.SIGKILL)
        owner.wait()
    reader.read(0, 3)
    assert reader.poll() and target.view[:3] == b"abc"
    assert reader.close()
    with pytest.raises(TransportError):
        Shm().open(door, target, 1.0)
    assert set(os.listdir("/dev/shm")) <= before


# -- tcp ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def owner() -> Iterator[Tcp]:
    transport = Tcp()
    yield transport
    transport.close()


def test_a_withdrawn_memory_is_out_of_reach_at_once(owner: Tcp, source: Memory, target: Memory) -> None:
    door = owner.register(source)
    reader, idle = Tcp().open(door, target, 1.0), Tcp().open(door, target, 1.0)
    reader.read(0, 100)
    wait_read(reader)
    owner.withdraw(source)
    wait_refused_after_read(reader)
    wait_refused_after_read(idle)
    late = Tcp().open(door, target, 1.0)  # the greeting is one-sided: the first read tells
    wait_refused_after_read(late)
    assert target.view[100:200] == bytes(100)
    for each in (reader, idle, late):
        each.close()


def wait_refused_after_read(reader: Reader) -> None:
    try:
        reader.read(100, 100)
    except TransportError:
        return
    wait_refused(reader)


def test_tcp_wants_the_key(owner: Tcp, source: Memory, target: Memory, caplog: pytest.LogCaptureFixture) -> None:
    address, number, key = msgspec.msgpack.decode(owner.register(source))
    for wrong in ((address, number, bytes(32)), (address, number + 1, key)):
        reader = Tcp().open(msgspec.msgpack.encode(wrong), target, 1.0)
        wait_refused_after_read(reader)
        reader.close()
    assert not any(target.view[:200])
    assert [record.message for record in caplog.records].count("tcp.refused") == 2


@pytest.mark.parametrize("asked", [(0, 0), (0, WINDOW_BYTES + 1), (WINDOW_BYTES, 1), (1 << 63, 1), (1, (1 << 64) - 1)])
def test_nothing_beside_the_memory_is_read(owner: Tcp, source: Memory, target: Memory, asked: tuple[int, int]) -> None:
    reader = Tcp().open(owner.register(source), target, 1.0)
    reader._sock.sendall(tcp._RANGE.pack(*asked))
    reader._sock.settimeout(LIMIT_S)
    assert reader._sock.recv(1) == b""
    reader.close()


def test_a_door_leads_to_a_number_and_off_this_machine_only_for_who_is_reached_there(
    source: Memory, target: Memory
) -> None:
    """Names would be looked up without a limit; and an engine that keeps to its machine is sent nowhere else."""
    owner = Tcp("localhost")
    assert msgspec.msgpack.decode(owner.register(source))[0].startswith("tcp:127.0.0.1:")
    owner.close()
    for address, why in (
        ("tcp:localhost:1", "no number and port"),
        ("unix:/run/x.sock", "no number and port"),
        ("tcp:192.0.2.1:1", "is not on this machine, and tcp:127.0.0.1:0 is"),
    ):
        with pytest.raises(TransportError, match=why):
            Tcp().open(msgspec.msgpack.encode((address, 1, bytes(32))), target, 0.1)


def test_strangers_are_few_and_do_not_stay(owner: Tcp, source: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "HELLO_S", 0.3)
    monkeypatch.setattr(tcp, "MAX_STRANGERS", 3)
    port = int(msgspec.msgpack.decode(owner.register(source))[0].rpartition(":")[2])
    socks = [socket.create_connection(("127.0.0.1", port), LIMIT_S) for _ in range(3)]
    assert all(len(sock.recv(16, socket.MSG_WAITALL)) == 16 for sock in socks)
    with socket.create_connection(("127.0.0.1", port), LIMIT_S) as fourth:
        assert fourth.recv(1) == b""
    socks[0].sendall(b"x" * 39)  # not all of a greeting
    for sock in socks:
        assert sock.recv(1) == b""
        sock.close()


def test_an_owner_that_stops_makes_nobody_wait(source: Memory, target: Memory) -> None:
    """A poll waits for a moment only, and what had come by then stays."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp:127.0.0.1:{server.getsockname()[1]}"
        opened: list[Reader] = []
        door = msgspec.msgpack.encode((address, 1, bytes(32)))
        opening = threading.Thread(target=lambda: opened.append(Tcp().open(door, target, LIMIT_S)))
        opening.start()
        sock, _ = server.accept()
        with sock:
            sock.sendall(bytes(16))
            opening.join(LIMIT_S)
            reader = opened[0]
            reader.read(0, 10)
            sock.sendall(b"abc")
            began_s = time.monotonic()
            assert not reader.poll() and not reader.poll()
            assert time.monotonic() - began_s < 1.0
            sock.sendall(b"defghij")
            wait_read(reader)
            assert target.view[:11] == b"abcdefghij\0"
    reader.close()


@pytest.mark.parametrize("kind", BOTH)
def test_nothing_is_left_behind(kind: str, target: Memory) -> None:
    """I8: descriptors and threads as before, after readers that were closed and readers that were not."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        transport: Transport = Shm() if kind == "shm" else Tcp()
        source = Memory()
        readers = [transport.open(transport.register(source), target, 1.0) for _ in range(3)]
        for reader in readers:
            reader.read(0, 1 << 20)
        wait_read(readers[0])
        readers[0].close()
        transport.withdraw(source)
        for reader in readers[1:]:
            reader.close()
        transport.close()
        source.close()
    gc.collect()
    wait_until(lambda: (len(os.listdir("/proc/self/fd")), threading.active_count()) == before, LIMIT_S)


# -- nixl --------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(NO_NIXL, reason="the extra `nixl` is not installed")
def test_an_agent_that_lends_nothing_takes_no_processor_time(agents: tuple[Nixl, Nixl]) -> None:
    """NIXL's own progress thread would keep a core busy for ever."""
    began = time.process_time()
    threading.Event().wait(0.5)
    assert time.process_time() - began < 0.2


def test_without_nixl_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.engine.transfer.nixl._BUILDS", ("nixl_of_nowhere",))
    with pytest.raises(Unavailable, match="the extra `nixl` is not installed"):
        Nixl("x")


# -- pace --------------------------------------------------------------------------------------------------------------


class Clock:
    now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def test_bytes_are_spread_over_time_whoever_moves_them() -> None:
    """At 1000 bytes a second, 100 bytes have 0.1 s; whoever comes while it runs waits for its end. Time that nobody
    used is not made up for."""
    clock = Clock()
    pacer = Pacer(1000, clock)
    assert [pacer.delay_s(100), pacer.delay_s(300), pacer.delay_s(100)] == [0.0, 0.1, 0.4]
    clock.now_ns = 450_000_000
    assert pacer.delay_s(100) == pytest.approx(0.05)
    clock.now_ns = 10_000_000_000
    assert [pacer.delay_s(100), pacer.delay_s(100)] == [0.0, 0.1]
    assert Pacer(0, clock).delay_s(1 << 40) == 0.0
