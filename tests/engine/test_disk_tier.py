"""The disk tier: what was written is found again, and whatever goes wrong is a miss that is counted, never wrong bytes.

Files are real; faults are put between the store and `os`. KV-06, at the level of the store.
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shoal.core.kv.hashing import block_key
from shoal.engine.transfer import diskfile
from shoal.engine.transfer.breaker import RETRY_NS
from shoal.engine.transfer.disk import MOST_WRITES, DiskBlocks
from shoal.engine.transfer.diskfile import Layout
from shoal.engine.transfer.diskindex import DiskIndex, Entry, Held
from shoal.engine.transfer.diskjobs import Job, Jobs, Outcome
from shoal.engine.transfer.diskstate import DiskState

WAIT_S = 10.0
TOKENS = 4
BLOCK_BYTES = 3 * 5000  # three layers; no multiple of a page
CAPACITY = 1 << 20
ROOT = b"r" * 16
SCOPE = b"s" * 16
SLOTS = Layout.within(CAPACITY, ROOT, TOKENS, BLOCK_BYTES).num_slots


class Clock:
    def __init__(self) -> None:
        self.now_ns = 1_000_000_000_000

    def __call__(self) -> int:
        return self.now_ns


class Ear:
    """Hears what the store tells. `call` asks it and returns the outcome."""

    def __init__(self) -> None:
        self.heard: list[Outcome] = []
        self.dropped: list[bytes] = []
        self._told = threading.Condition()

    def __call__(self, outcome: Outcome) -> None:
        with self._told:
            self.heard.append(outcome)
            self._told.notify_all()

    def drop(self, keys: Sequence[bytes]) -> None:
        self.dropped += keys

    def next(self) -> Outcome:
        with self._told:
            assert self._told.wait_for(lambda: self.heard, WAIT_S), "nothing was told"
            return self.heard.pop(0)


class FaultyOs:
    """`os`, but for what a test replaces."""

    def __init__(self) -> None:
        self.calls: dict[str, Callable[..., Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return self.calls.get(name) or getattr(os, name)

    def fail(self, name: str, number: int) -> None:
        def call(*_: Any, **__: Any) -> Any:
            raise OSError(number, os.strerror(number))

        self.calls[name] = call

    def hold(self, name: str) -> Gate:
        """The next calls wait at a gate before they do anything."""
        gate = Gate()

        def call(*arguments: Any, **keywords: Any) -> Any:
            gate.wait()
            return getattr(os, name)(*arguments, **keywords)

        self.calls[name] = call
        return gate


class Gate:
    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self._opened = threading.Event()

    def wait(self) -> None:
        self.entered.release()
        assert self._opened.wait(WAIT_S)

    def open(self) -> None:
        self._opened.set()


class Tier:
    """A store, its ear and its clock; blocks are named by numbers."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, self.ear, self.clock = folder, Ear(), Clock()
        self.file = folder / "blocks"
        self.store = DiskBlocks(
            folder,
            **{
                "root": ROOT,
                "block_tokens": TOKENS,
                "block_bytes": BLOCK_BYTES,
                "capacity_bytes": CAPACITY,
                "dropped": self.ear.drop,
                "now_ns": self.clock,
                **settings,
            },
        )

    def write(self, number: int, parent: bytes = SCOPE) -> str:
        self.store.write(key(number, parent), tokens(number), parent, block(number), self.ear)
        return self.ear.next().reason

    def read(self, number: int, parent: bytes = SCOPE) -> str:
        """The reason. Whatever it is, the buffer has the right bytes, or is untouched."""
        into_NX = np.full((3, BLOCK_BYTES // 3), 7, np.uint8)
        self.store.read(key(number, parent), into_NX, self.ear)
        reason = self.ear.next().reason
        assert (into_NX == (7 if reason else block(number))).all()
        return reason

    def slot_at(self, number: int) -> int:
        """Where in the file the block is."""
        at = self.file.read_bytes().find(block(number).tobytes())
        assert at > 0
        return at

    def errors(self) -> dict[str, int]:
        return {reason: count for reason, count in self.store.errors.items() if count}

    def after_the_break(self) -> None:
        """The breaker is open; 30 s later the disk is tried again, and in use."""
        assert self.store.off
        self.clock.now_ns += RETRY_NS
        deadline_s = time.monotonic() + WAIT_S
        self.write(999_999)  # asks for the try
        while self.store.off:
            assert time.monotonic() < deadline_s
            threading.Event().wait(0.001)


def tokens(number: int) -> tuple[int, ...]:
    return (number, 1, 2, 3)


def key(number: int, parent: bytes = SCOPE) -> bytes:
    return block_key(parent, tokens(number))


def block(number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, (3, BLOCK_BYTES // 3), np.uint8)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> FaultyOs:
    faulty = FaultyOs()
    monkeypatch.setattr(diskfile, "os", faulty)
    return faulty


@pytest.fixture
def new(tmp_path: Path) -> Iterator[Callable[..., Tier]]:
    made: list[Tier] = []

    def make(folder: Path = tmp_path / "kv", **settings: Any) -> Tier:
        made.append(Tier(folder, **settings))
        return made[-1]

    yield make
    for tier in made:
        assert tier.store.close(WAIT_S)
        tier.store._state.index.check()


@pytest.fixture
def tier(new: Callable[..., Tier]) -> Tier:
    return new()


# -- what it is for ----------------------------------------------------------------------------------------------------


def test_what_was_written_is_read(tier: Tier) -> None:
    assert tier.write(1) == "" and tier.write(2, key(1)) == ""
    assert tier.read(2, key(1)) == tier.read(1) == ""
    assert tier.read(3) == "absent"
    assert tier.store.num_blocks == 2 and tier.store.num_bytes == 2 * 16384 <= tier.store.capacity_bytes
    assert tier.store.held() == [(key(2, key(1)), key(1), tokens(2)), (key(1), SCOPE, tokens(1))]
    assert not tier.errors() and not tier.ear.dropped


def test_token_ids_are_in_the_file_and_nowhere_else(new: Callable[..., Tier]) -> None:
    """They would take more memory than all else that is known of a block."""
    first = new()
    assert first.write(1) == ""
    first.store.close(WAIT_S)
    second = new()
    assert second.write(2, parent=key(1)) == ""
    assert [entry.held.tokens for entry in second.store._state.index] == [(), ()]
    assert [held.tokens for held in second.store.held()] == [tokens(1), tokens(2)]


def test_a_restart_finds_the_blocks_of_an_earlier_run(new: Callable[..., Tier]) -> None:
    first = new()
    for number in range(5):
        assert first.write(number) == ""
    assert first.store.close(WAIT_S)
    second = new()
    assert second.store.held() == [(key(number), SCOPE, tokens(number)) for number in range(5)]
    assert [second.read(number) for number in range(5)] == [""] * 5
    assert second.write(5) == "" and second.read(5) == ""
    assert not second.errors()


def test_a_restart_after_a_kill_finds_them_too(tmp_path: Path, new: Callable[..., Tier]) -> None:
    """The process is gone at once, with a block half written."""
    script = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from tests.engine.test_disk_tier import Tier, diskfile
tier = Tier(Path({str(tmp_path / "kv")!r}))
for number in range(5):
    assert tier.write(number) == ""
real = os.pwritev
def half(fd, buffers, at):
    if len(buffers[0]) > 10000:
        real(fd, [buffers[0][:5000]], at)
        os.kill(os.getpid(), 9)
    return real(fd, buffers, at)
os.pwritev = half
tier.write(5)
"""
    ended = subprocess.run([os.sys.executable, "-c", script], timeout=60, check=False)  # type: ignore[attr-defined]
    assert ended.returncode == -9
    tier = new()
    assert [tier.read(number) for number in range(6)] == [""] * 5 + ["absent"]
    assert not tier.errors()


def test_the_oldest_leaves_when_it_is_full_and_of_a_prefix_its_end(new: Callable[..., Tier]) -> None:
    tier = new()
    for number in range(SLOTS - 2):
        assert tier.write(number) == ""
    assert tier.write(1000) == "" and tier.write(1001, key(1000)) == ""
    for number in range(1, SLOTS - 2):
        assert tier.read(number) == ""  # all but block 0 and the prefix are newer now
    assert tier.write(2000) == tier.write(2001) == tier.write(2002) == ""
    assert tier.ear.dropped == [key(0), key(1001, key(1000)), key(1000)]
    assert tier.read(0) == "absent" and tier.read(1) == tier.read(2002) == ""
    assert tier.store.num_blocks == SLOTS
    assert tier.file.stat().st_size <= tier.store.capacity_bytes


def test_who_continues_a_prefix_does_not_drive_its_start_out(new: Callable[..., Tier]) -> None:
    tier = new()
    for number in range(SLOTS):
        assert tier.write(number) == ""
    assert tier.write(1000, key(0)) == ""  # block 0 is the oldest, and a leaf
    assert tier.ear.dropped == [key(1)]


def test_a_block_that_is_there_is_not_written_again(tier: Tier, faults: FaultyOs) -> None:
    assert tier.write(1) == ""
    faults.fail("pwritev", errno.EIO)
    assert tier.write(1) == ""
    assert tier.store.num_blocks == 1 and not tier.errors()


# -- KV-06, the ten cases ----------------------------------------------------------------------------------------------


def test_file_removed_behind_our_back(tier: Tier) -> None:
    for number in range(8):
        assert tier.write(number) == ""
    tier.file.unlink()
    assert [tier.read(number) for number in range(6)] == ["missing"] + ["off"] * 5  # until it has a name again
    assert tier.write(20) == "off"
    tier.after_the_break()
    assert sorted(tier.ear.dropped) == sorted(key(number) for number in range(8))
    assert tier.read(7) == "absent"
    assert tier.write(7) == tier.read(7) == ""
    assert tier.file.stat().st_nlink == 1
    assert tier.errors() == {"missing": 1}


def test_folder_removed_behind_our_back(tier: Tier) -> None:
    for number in range(8):
        assert tier.write(number) == ""
    for path in tier.folder.iterdir():
        path.unlink()
    tier.folder.rmdir()
    assert tier.write(20) == "missing"
    tier.after_the_break()
    assert tier.write(1) == tier.read(1) == "" and tier.file.exists()


def test_file_cut_to_half(tier: Tier) -> None:
    for number in range(8):
        assert tier.write(number) == ""
    os.truncate(tier.file, tier.slot_at(4) + 100)
    assert [tier.read(number) for number in range(8)] == [""] * 4 + ["cut"] * 4
    assert tier.errors() == {"cut": 4}
    assert sorted(tier.ear.dropped) == sorted(key(number) for number in range(4, 8))
    assert tier.write(4) == tier.read(4) == ""
    assert not tier.store.off


def test_file_cut_to_half_between_two_runs(new: Callable[..., Tier]) -> None:
    first = new()
    for number in range(8):
        assert first.write(number) == ""
    assert first.store.close(WAIT_S)
    os.truncate(first.file, first.slot_at(4) + 100)
    second = new()
    assert second.store.num_blocks == 4 and second.errors() == {"cut": 4}
    assert [second.read(number) for number in range(8)] == [""] * 4 + ["absent"] * 4
    assert second.write(7) == second.read(7) == ""
    assert second.store.close(WAIT_S)
    third = new()
    assert third.store.num_blocks == 5 and not third.errors()


def test_one_bit_flipped(tier: Tier) -> None:
    for number in range(3):
        assert tier.write(number) == ""
    flip(tier.file, tier.slot_at(1) + BLOCK_BYTES - 1)
    assert [tier.read(number) for number in range(3)] == ["", "corrupt", ""]
    assert tier.read(1) == "absent" and tier.ear.dropped == [key(1)]
    assert tier.errors() == {"corrupt": 1}
    assert tier.write(1) == tier.read(1) == ""


def test_a_file_with_five_damaged_blocks_is_not_believed_any_more(tier: Tier) -> None:
    for number in range(8):
        assert tier.write(number) == ""
    for number in range(6):
        flip(tier.file, tier.slot_at(number) + 100 * number)
    assert [tier.read(number) for number in range(8)] == ["corrupt"] * 5 + ["off"] * 3
    tier.after_the_break()
    assert sorted(tier.ear.dropped) == sorted(key(number) for number in range(8))
    assert tier.read(7) == "absent" and tier.errors() == {"corrupt": 5}


def test_five_errors_over_a_long_time_are_no_reason_to_stop(tier: Tier) -> None:
    for number in range(8):
        assert tier.write(number) == ""
    for number in range(8):
        flip(tier.file, tier.slot_at(number))
        assert tier.read(number) == "corrupt"
        tier.clock.now_ns += RETRY_NS // 4
    assert tier.store.num_openings == 0


def test_a_success_after_the_try_makes_all_well_again(tier: Tier) -> None:
    for number in range(10):
        assert tier.write(number) == ""
    tier.file.unlink()
    assert tier.read(0) == "missing"
    tier.after_the_break()
    assert tier.write(0) == tier.write(1) == ""
    flip(tier.file, tier.slot_at(0))
    assert tier.read(0) == "corrupt" and not tier.store.off and tier.read(1) == ""


def test_one_bit_of_a_record_flipped(new: Callable[..., Tier]) -> None:
    """Wherever it is: the key, the parent, the token ids, the digest."""
    first = new()
    assert first.write(1) == first.write(2) == ""
    assert first.store.close(WAIT_S)
    whole = first.file.read_bytes()
    for byte in range(0, 92, 7):
        first.file.write_bytes(whole)
        flip(first.file, diskfile.PAGE + byte)
        again = new()
        assert again.errors() == {"corrupt": 1}
        assert again.read(1) == "absent" and again.read(2) == ""
        assert again.store.close(WAIT_S)


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))


@pytest.mark.parametrize(
    "other",
    [{"root": b"q" * 16}, {"block_bytes": 8192}, {"block_tokens": 8}, {"capacity_bytes": 2 * CAPACITY}],
    ids=lambda other: next(iter(other)),
)
def test_header_of_another_model_or_layout(new: Callable[..., Tier], other: dict[str, Any]) -> None:
    first = new(**other)
    first.store.write(
        key(1),
        tuple(range(other.get("block_tokens", TOKENS))),
        SCOPE,
        bytes(first.store._layout.block_bytes),
        first.ear,
    )
    assert first.ear.next().reason == ""
    assert first.store.close(WAIT_S)
    tier = new()
    assert tier.store.held() == [] and tier.errors() == {"foreign": 1}
    assert tier.read(1) == "absent" and tier.write(1) == tier.read(1) == ""


@pytest.mark.parametrize(
    "junk", [b"", b"shoal kv", bytes(5000), "link", "link to one of ours", "folder", "fifo"], ids=str
)
def test_something_else_by_the_name_of_our_file(tmp_path: Path, new: Callable[..., Tier], junk: bytes | str) -> None:
    folder, target = tmp_path / "kv", tmp_path / "target"
    folder.mkdir(mode=0o700)
    target.write_bytes(b"somebody's")
    if junk == "link":
        (folder / "blocks").symlink_to(target)
    elif junk == "folder":
        (folder / "blocks").mkdir()
    elif junk == "link to one of ours":
        elsewhere = new(tmp_path / "elsewhere")
        assert elsewhere.write(1) == "" and elsewhere.store.close(WAIT_S)
        target.write_bytes(elsewhere.file.read_bytes())
        (folder / "blocks").symlink_to(target)
    elif junk == "fifo":
        os.mkfifo(folder / "blocks")
    else:
        assert isinstance(junk, bytes)
        (folder / "blocks").write_bytes(junk)
    somebodys = target.read_bytes()
    tier = new()
    assert tier.store.held() == []
    assert tier.errors() == ({"io": 1} if junk == "folder" else {"foreign": 1})
    assert tier.write(1) == ("off" if junk == "folder" else "")
    assert target.read_bytes() == somebodys


def test_no_space_left(tmp_path: Path, new: Callable[..., Tier], faults: FaultyOs) -> None:
    """On a tmpfs of 1 MB, with a capacity of 4 MB; where none can be mounted, `pwritev` says what it would say."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False, timeout=10).returncode == 0
    if not mounted:
        faults.calls["pwritev"] = full_after(1 << 20)
    try:
        tier = new(folder / "kv", capacity_bytes=4 << 20)
        reasons = [tier.write(number) for number in range(100)]
        first = reasons.index("full")
        assert 50 < first < 64  # 1 MB in slots of 16 KB
        assert reasons == [""] * first + ["full"] + [""] * (99 - first)  # others make room in the file as it is
        assert tier.errors() == {"full": 1} and not tier.store.off
        assert tier.store.num_blocks == first
        assert all(tier.read(number) == "" for number in range(100 - first, 100) if number != first)
        tier.clock.now_ns += RETRY_NS  # then it is tried again whether there is room
        assert tier.write(200) == "full" and tier.errors() == {"full": 2}
        assert tier.write(201) == tier.read(201) == ""
        assert tier.store.close(WAIT_S)
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True, timeout=10)


def full_after(num_bytes: int) -> Callable[..., int]:
    def pwritev(fd: int, buffers: list[Any], at: int) -> int:
        if at + sum(map(len, buffers)) > num_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.pwritev(fd, buffers, at)

    return pwritev


def test_a_device_without_any_room(tier: Tier, faults: FaultyOs) -> None:
    faults.calls["pwritev"] = full_after(0)
    assert [tier.write(number) for number in range(4)] == ["full"] * 4
    assert tier.errors() == {"full": 1}  # the others found no slot to try
    faults.calls.clear()
    tier.clock.now_ns += RETRY_NS
    assert tier.write(1) == tier.read(1) == ""


def test_a_read_that_takes_5_s(tier: Tier, faults: FaultyOs) -> None:
    """It is a miss after the limit, and its bytes, when they come, go nowhere. Nobody waits: other calls return."""
    for number in range(3):
        assert tier.write(number) == ""
    gate = faults.hold("preadv")
    buffer = np.full(BLOCK_BYTES, 7, np.uint8)
    tier.store.read(key(1), buffer, tier.ear)
    assert gate.entered.acquire(timeout=WAIT_S)
    tier.clock.now_ns += 1_000_000_000
    tier.store.expire()
    assert tier.ear.next() == Outcome(key(1), "slow")
    assert tier.errors() == {"slow": 1}
    assert tier.write(4) == ""  # by the other thread
    gate.open()
    faults.calls.clear()
    assert tier.read(2) == tier.read(1) == ""
    assert (buffer == 7).all() and not tier.ear.heard


def test_a_read_is_given_up_without_being_asked(new: Callable[..., Tier], faults: FaultyOs) -> None:
    tier = new(limit_ns=20_000_000, now_ns=time.monotonic_ns)
    assert tier.write(1) == ""
    gate = faults.hold("preadv")
    assert tier.read(1) == "slow"
    gate.open()


def test_both_threads_hang_and_no_call_waits(tier: Tier, faults: FaultyOs) -> None:
    for number in range(10):
        assert tier.write(number) == ""
    gate = faults.hold("preadv")
    buffers = [np.full(BLOCK_BYTES, 7, np.uint8) for _ in range(6)]
    for number in range(2):
        tier.store.read(key(number), buffers[number], tier.ear)
        assert gate.entered.acquire(timeout=WAIT_S)
    for number in range(2, 6):
        tier.store.read(key(number), buffers[number], tier.ear)
    for number in range(20, 20 + MOST_WRITES + 2):
        tier.store.write(key(number), tokens(number), SCOPE, block(number), tier.ear)
    assert [tier.ear.next() for _ in range(2)] == [Outcome(key(20 + MOST_WRITES + n), "busy") for n in range(2)]
    tier.clock.now_ns += 1_000_000_000
    tier.store.expire()
    told = [tier.ear.next() for _ in range(6 + MOST_WRITES)]
    assert [outcome.reason for outcome in told] == ["slow"] * 2 + ["busy"] * (4 + MOST_WRITES)
    gate.open()
    faults.calls.clear()
    assert tier.read(5) == tier.write(20) == tier.read(20) == ""
    assert all((buffer == 7).all() for buffer in buffers)


def test_a_slow_write_lets_go_of_the_buffer_and_is_not_found(tier: Tier, faults: FaultyOs) -> None:
    gate = faults.hold("pwritev")
    mine = block(1)
    tier.store.write(key(1), tokens(1), SCOPE, mine, tier.ear)
    assert gate.entered.acquire(timeout=WAIT_S)
    tier.store.write(key(1), tokens(1), SCOPE, mine, tier.ear)
    assert tier.ear.next().reason == "busy"
    tier.clock.now_ns += 1_000_000_000
    tier.store.expire()
    assert tier.ear.next().reason == "slow"
    mine[:] = 0
    gate.open()
    faults.calls.clear()
    assert tier.write(2) == ""
    assert tier.read(1) == "absent"
    assert tier.write(1) == tier.read(1) == ""


def test_the_same_key_is_evicted_twice(tier: Tier) -> None:
    assert tier.write(1) == ""
    tier.store.forget([key(1), key(1), key(2)], tier.ear)
    assert {tier.ear.next().reason for _ in range(3)} == {""}
    assert tier.ear.dropped == [key(1)] and tier.read(1) == "absent" and not tier.errors()


def test_100_leftover_files_of_a_killed_process(tmp_path: Path, new: Callable[..., Tier]) -> None:
    first = new()
    assert first.write(1) == ""
    assert first.store.close(WAIT_S)
    for number in range(100):
        (first.folder / f"blocks.{number:016x}").write_bytes(b"unfinished")
    (first.folder / "notes.txt").write_text("not ours, so not touched")
    second = new()
    assert sorted(path.name for path in first.folder.iterdir()) == ["blocks", "lock", "notes.txt"]
    assert second.read(1) == ""


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EIO])
def test_folder_read_only(new: Callable[..., Tier], faults: FaultyOs, number: int) -> None:
    """From the start on, and until it is not."""

    def open_(path: Any, flags: int, *rest: Any, **keywords: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number))
        return os.open(path, flags, *rest, **keywords)

    faults.calls["open"] = open_
    tier = new()
    assert tier.store.off and tier.errors() == {"io": 1}
    assert tier.write(1) == "off" and tier.read(1) == "absent"
    tier.clock.now_ns += RETRY_NS
    assert tier.write(1) == "off"
    until(lambda: tier.errors() == {"io": 2})
    faults.calls.clear()
    tier.after_the_break()
    assert tier.write(1) == tier.read(1) == ""


def until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.001)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_call_raises(tier: Tier, faults: FaultyOs, call: str) -> None:
    """An error of the disk, or one that nobody expects: the breaker opens, and closes after a try that went well."""
    for number in range(8):
        assert tier.write(number) == ""
    do = tier.write if call == "pwritev" else tier.read
    base = 20 if call == "pwritev" else 0

    def call_(*_: Any) -> Any:
        raise RuntimeError("a transfer failed")

    faults.fail(call, errno.EIO)
    assert [do(base + number) for number in range(3)] == ["io"] * 3
    faults.calls[call] = call_
    assert [do(base + number) for number in range(3, 6)] == ["io", "io", "off"]
    assert tier.store.num_openings == 1
    tier.clock.now_ns += RETRY_NS - 1
    assert do(base + 5) == "off"
    tier.clock.now_ns += 1
    assert do(base + 5) == "off"
    until(lambda: not tier.store.off)
    assert do(base + 5) == "io" and tier.store.off  # one is enough this time
    faults.calls.clear()
    tier.after_the_break()
    assert tier.read(7) == ""  # what the file holds was not in doubt
    assert tier.write(base + 5) == tier.read(base + 5) == ""
    assert tier.errors() == {"io": 6}


def test_what_is_in_line_when_the_breaker_opens_is_not_tried(tier: Tier, faults: FaultyOs) -> None:
    for number in range(8):
        assert tier.write(number) == ""
    gate = Gate()

    def preadv(*_: Any) -> int:
        gate.wait()
        raise OSError(errno.EIO, "Input/output error")

    faults.calls["preadv"] = preadv
    buffers = [np.full(BLOCK_BYTES, 7, np.uint8) for _ in range(8)]
    for number in range(8):
        tier.store.read(key(number), buffers[number], tier.ear)
    gate.open()
    reasons = Counter(tier.ear.next().reason for _ in range(8))
    assert reasons in ({"io": 5, "off": 3}, {"io": 6, "off": 2})  # one more may have been under way
    assert tier.errors() == {"io": reasons["io"]}


def test_nothing_is_begun_while_the_file_is_replaced() -> None:
    state = DiskState(4, 1000, dropped=lambda keys: None, now_ns=Clock())
    state.put(Job("erase", Entry(Held(key(1), SCOPE, tokens(1)), b"", 0, 0), None))
    state.reopening = True
    assert state.take(closing=False) is None and state.take(closing=True) is None
    state.reopened(OSError(errno.EIO, "Input/output error"))
    assert state.take(closing=False) is not None and state.off


def test_calls_that_do_less_than_they_were_asked_are_no_errors(tier: Tier, faults: FaultyOs) -> None:
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)
        faults.calls[name] = lambda fd, buffers, at, real=real: real(fd, [buffers[0][:1000]], at)
    for number in range(3):
        assert tier.write(number) == tier.read(number) == ""


# -- who else might use the folder -------------------------------------------------------------------------------------


def test_two_engines_do_not_share_a_folder(new: Callable[..., Tier]) -> None:
    tier = new()
    assert tier.write(1) == ""
    with pytest.raises(ValueError, match=r"^kv_disk_folder: another engine uses .*/kv; each needs a folder of its own"):
        Tier(tier.folder)
    assert tier.read(1) == ""
    assert tier.store.close(WAIT_S)
    assert new().read(1) == ""


def test_folder_and_files_are_private(tmp_path: Path, new: Callable[..., Tier]) -> None:
    tier = new()
    assert tier.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in tier.folder.iterdir()} == {0o600}
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    with pytest.raises(ValueError, match=r"^kv_disk_folder: others have access to "):
        Tier(shared)
    assert not list(shared.iterdir()) and shared.stat().st_mode & 0o777 == 0o755
    (tmp_path / "link").symlink_to(tier.folder)
    with pytest.raises(ValueError, match=r"^kv_disk_folder: .* is a link"):
        Tier(tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^kv_disk_folder: .* no folder"):
        Tier(tmp_path / "file")


def test_a_capacity_that_holds_no_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^kv_disk_folder: 10000 bytes hold no block, it takes"):
        Tier(tmp_path / "kv", capacity_bytes=10000)
    assert not (tmp_path / "kv").exists()


def test_what_is_forgotten_is_gone_from_the_file(tier: Tier, new: Callable[..., Tier]) -> None:
    for number in range(4):
        assert tier.write(number) == ""
    tier.store.forget([key(1), key(2)], tier.ear)
    assert {tier.ear.next().reason for _ in range(2)} == {""}
    raw = tier.file.read_bytes()
    assert [raw.find(block(number).tobytes()) > 0 for number in range(4)] == [True, False, False, True]
    assert [raw.find(key(number)) > 0 for number in range(4)] == [True, False, False, True]
    assert tier.store.close(WAIT_S)
    assert {held.key for held in new().store.held()} == {key(0), key(3)}


def test_what_is_forgotten_while_it_is_read_is_no_error(tier: Tier, faults: FaultyOs) -> None:
    assert tier.write(1) == ""
    gate = faults.hold("preadv")
    buffer = np.full(BLOCK_BYTES, 7, np.uint8)
    tier.store.read(key(1), buffer, tier.ear)
    assert gate.entered.acquire(timeout=WAIT_S)
    tier.store.forget([key(1)], tier.ear)
    assert tier.ear.next()[:2] == (key(1), "")  # by the other thread
    gate.open()
    assert tier.ear.next()[:2] == (key(1), "absent")
    assert (buffer == 7).all() and not tier.errors()


def test_what_is_forgotten_while_it_is_written_is_gone_too(
    tier: Tier, new: Callable[..., Tier], faults: FaultyOs
) -> None:
    gate = faults.hold("pwritev")
    for number in (1, 2):
        tier.store.write(key(number), tokens(number), SCOPE, block(number), tier.ear)
    assert gate.entered.acquire(timeout=WAIT_S)
    tier.store.forget([key(1), key(2)], tier.ear)
    told = [tier.ear.next() for _ in range(3)]
    assert told == [
        Outcome(key(1), "forgotten"),
        Outcome(key(2), "forgotten"),
        Outcome(key(2), ""),
    ]  # 2 was still in line
    assert not tier.store.close(0.01)
    gate.open()
    last = tier.ear.next()
    assert last[:2] == (key(1), "")
    assert tier.file.read_bytes().find(block(1).tobytes()) < 0
    assert tier.store.close(WAIT_S)
    assert new().store.held() == []


def test_forgetting_what_could_not_be_written_is_answered(new: Callable[..., Tier], faults: FaultyOs) -> None:
    """Also while its thread still keeps the pace."""
    tier = new(write_bytes_per_s=BLOCK_BYTES)
    faults.fail("pwritev", errno.EIO)
    assert tier.write(1) == "io"
    tier.store.forget([key(1)], tier.ear)
    assert tier.ear.next() == Outcome(key(1), "")


# -- its end -----------------------------------------------------------------------------------------------------------


def test_closing_gives_up_what_hangs_and_tells_nothing_more(tier: Tier, faults: FaultyOs) -> None:
    for number in range(3):
        assert tier.write(number) == ""
    gate = faults.hold("preadv")
    buffers = [np.full(BLOCK_BYTES, 7, np.uint8) for _ in range(3)]
    for number in range(3):
        tier.store.read(key(number), buffers[number], tier.ear)
    assert gate.entered.acquire(timeout=WAIT_S)
    assert not tier.store.close(0.01)
    gate.open()
    assert tier.store.close(WAIT_S)
    assert not tier.ear.heard and all((buffer == 7).all() for buffer in buffers)


def test_writes_are_paced_and_reads_are_not(new: Callable[..., Tier]) -> None:
    tier = new(write_bytes_per_s=BLOCK_BYTES, limit_ns=3_600_000_000_000, now_ns=time.monotonic_ns)
    for number in range(3):
        tier.store.write(key(number), tokens(number), SCOPE, block(number), tier.ear)
    assert tier.ear.next().reason == ""
    began_s = time.monotonic()
    assert tier.read(0) == ""  # a second before the next write
    assert time.monotonic() - began_s < 0.9 and tier.store.num_blocks == 1
    assert tier.store.close(WAIT_S)
    assert time.monotonic() - began_s < 0.9


def test_reads_go_before_all_else_and_one_write_at_a_time() -> None:
    jobs = Jobs(limit_ns=1000)
    entries = [Entry(Held(key(number), SCOPE, tokens(number)), b"", number, 0) for number in range(5)]
    for kind, entry in zip(("write", "write", "erase", "read", "read"), entries, strict=True):
        jobs.put(Job(kind, entry, None), 0)  # type: ignore[arg-type]
    taken = [jobs.take(closing=False) for _ in range(5)]
    assert [job and job.kind for job in taken] == ["read", "read", "erase", "write", None]
    assert taken[3] is not None
    jobs.ended(taken[3])
    last = jobs.take(closing=False)
    assert last is not None and last.key == key(1)


# -- anything ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_the_index_agrees_with_one_that_looks_at_everything(seed: int) -> None:
    """Who makes room: of those that nobody here continues, the one with the oldest use."""
    rng = random.Random(seed)
    index, uses, parents = DiskIndex(12), {}, {}
    for _ in range(400):
        number = rng.randrange(30)
        parent = rng.choice([SCOPE, *parents, bytes([rng.randrange(30)])])
        entry = index.get(bytes([number]))
        if entry is not None and rng.random() < 0.7:
            index.touch(entry)
            uses[entry.held.key] = entry.use
        elif entry is not None:
            index.remove(entry)
            index.release(entry.slot)
            del uses[entry.held.key], parents[entry.held.key]
        elif parent != bytes([number]) and bytes([number]) not in parents.values():  # no entry is its own ancestor
            victims = sorted((use, key) for key, use in uses.items() if key not in parents.values())
            taken = index.take_slot()
            assert taken is not None
            slot, victim = taken
            assert (victim is None) == (len(uses) < 12)
            if victim is not None:
                assert (victim.use, victim.held.key) == victims[0]
                del uses[victim.held.key], parents[victim.held.key]
            made = Entry(Held(bytes([number]), parent, ()), b"", slot, index.new_use())
            index.add(made)
            uses[made.held.key], parents[made.held.key] = made.use, parent
        assert {entry.held.key: entry.use for entry in index} == uses
        index.check()


def test_entries_that_are_their_own_ancestors_leave_too() -> None:
    index = DiskIndex(2)
    index.load([Entry(Held(b"a", b"b", ()), b"", 0, 1), Entry(Held(b"b", b"a", ()), b"", 1, 2)])
    taken = [index.take_slot() for _ in range(3)]
    assert [each and each[0] for each in taken] == [0, 1, None]


def test_of_two_records_with_one_key_the_later_counts() -> None:
    index = DiskIndex(4)
    unused = index.load([Entry(Held(b"a", SCOPE, ()), b"", slot, use) for slot, use in ((0, 5), (2, 9), (3, 7))])
    entry = index.get(b"a")
    assert entry is not None and entry.slot == 2 and unused == [0, 3]
    index.check()


@pytest.mark.parametrize("seed", range(20))
def test_no_read_ever_returns_wrong_bytes(new: Callable[..., Tier], faults: FaultyOs, seed: int) -> None:
    """Random calls, with random faults of the disk and of what lies on it, and restarts."""
    rng, lock = random.Random(seed), threading.Lock()

    def faulty(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(fd: int, buffers: list[Any], at: int) -> int:
            with lock:
                kind = rng.random()
            if kind < 0.03:
                raise OSError(rng.choice([errno.EIO, errno.ENOSPC, errno.EROFS]), "as chance would have it")
            if kind < 0.06 and len(buffers[0]) > 1:  # short
                return int(real(fd, [buffers[0][: len(buffers[0]) // 2]], at))
            if kind < 0.08 and name == "pwritev":  # said to be written, but it is not
                return sum(map(len, buffers))
            return int(real(fd, buffers, at))

        return call

    def mischief(tier: Tier) -> None:
        if not tier.file.exists():
            return
        size = tier.file.stat().st_size
        kind = rng.random()
        if kind < 0.6:
            flip(tier.file, rng.randrange(size)) if size else None
        elif kind < 0.8:
            os.truncate(tier.file, rng.randrange(size + 1))
        else:
            tier.file.unlink()

    tier = new()
    num_read = 0
    for _ in range(4):
        faults.calls = {name: faulty(name) for name in ("preadv", "pwritev")}
        for _ in range(60):
            number = rng.randrange(SLOTS + 20)
            match rng.choices(("write", "read", "forget", "damage", "later"), (40, 45, 5, 2, 8))[0]:
                case "write":
                    tier.write(number)
                case "read":
                    num_read += tier.read(number) == ""
                case "forget":
                    tier.store.forget([key(number)], tier.ear)
                    tier.ear.next()
                case "damage":
                    mischief(tier)
                case "later":
                    tier.clock.now_ns += RETRY_NS
            assert tier.store.num_bytes <= tier.store.capacity_bytes
        assert tier.store.close(WAIT_S)
        faults.calls.clear()
        tier = new()
        num_read += sum(tier.read(number) == "" for number in range(SLOTS + 20))
    assert num_read > 10
