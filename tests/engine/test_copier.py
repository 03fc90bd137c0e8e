"""The thread that copies KV blocks: its order, its pieces, its pace and its end. The memory is a stand-in."""

from __future__ import annotations

import threading
from collections import deque

import pytest

from shoal.core.plan import Copied, KvOp
from shoal.engine.transfer.copier import Copier, pieces

WAIT_S = 10.0


class FakeHost:
    """Remembers what was copied. With a gate, each piece waits for a permit."""

    num_blocks = num_device_blocks = 64
    block_bytes = 1 << 20

    def __init__(self, *, gated: bool = False, fails_at: int = -1) -> None:
        self.pieces: list[tuple[bool, int, int, int]] = []
        self.fails_at = fails_at
        self.entered = threading.Semaphore(0)
        self.permits = threading.Semaphore(0)
        self.gated = gated

    def copy(self, *, out: bool, device_block: int, host_block: int, count: int) -> list[int]:
        self.entered.release()
        assert not self.gated or self.permits.acquire(timeout=WAIT_S)
        if len(self.pieces) == self.fails_at:
            raise OSError("the memory is gone")
        self.pieces.append((out, device_block, host_block, count))
        return []


class Ear:
    """Hears what a copier tells."""

    def __init__(self) -> None:
        self.heard: deque[Copied | Exception] = deque()
        self.told = threading.Semaphore(0)

    def __call__(self, outcome: Copied | Exception) -> None:
        self.heard.append(outcome)
        self.told.release()

    def next(self) -> Copied | Exception:
        assert self.told.acquire(timeout=WAIT_S)
        return self.heard.popleft()


def op(number: int, device: tuple[int, ...], host: tuple[int, ...], out: bool = True) -> KvOp:
    return KvOp(number, "a", out, device, host)


@pytest.mark.parametrize(
    ("device", "host", "most", "expected"),
    [
        ((), (), 4, []),
        ((7,), (3,), 4, [(7, 3, 1)]),
        ((5, 6, 7), (0, 1, 2), 4, [(5, 0, 3)]),
        ((5, 6, 7), (0, 1, 2), 2, [(5, 0, 2), (7, 2, 1)]),  # a piece has at most so many
        ((5, 6, 9), (0, 1, 2), 4, [(5, 0, 2), (9, 2, 1)]),  # a hole on the device
        ((5, 6, 7), (0, 4, 5), 4, [(5, 0, 1), (6, 4, 2)]),  # a hole on the host
        ((7, 6), (1, 0), 4, [(7, 1, 1), (6, 0, 1)]),  # downwards is not side by side
        ((5, 6, 7), (0, 1, 2), 1, [(5, 0, 1), (6, 1, 1), (7, 2, 1)]),
    ],
)
def test_blocks_side_by_side_go_in_one_piece(
    device: tuple[int, ...], host: tuple[int, ...], most: int, expected: list[tuple[int, int, int]]
) -> None:
    assert list(pieces(op(1, device, host), most)) == expected


def test_copies_are_made_and_told_in_order() -> None:
    host, ear = FakeHost(), Ear()
    copier = Copier(host)
    copier.start(op(1, (0, 1, 2, 3, 4, 5), (10, 11, 12, 13, 14, 15)), ear)
    copier.start(op(2, (9,), (3,)), ear)
    copier.start(op(3, (8,), (10,), out=False), ear)
    told = [ear.next() for _ in range(3)]
    assert copier.close(WAIT_S)
    assert [each.number for each in told if isinstance(each, Copied)] == [1, 2, 3]
    assert all(each.busy_ns > 0 for each in told if isinstance(each, Copied))
    # blocks of 1 MB, and pieces of 4 MB at most
    assert host.pieces == [(True, 0, 10, 4), (True, 4, 14, 2), (True, 9, 3, 1), (False, 8, 10, 1)]


def test_a_copy_that_fails_is_told_and_nothing_is_copied_after_it() -> None:
    host, ear = FakeHost(gated=True, fails_at=1), Ear()
    copier = Copier(host)
    for number in (1, 2, 3):
        copier.start(op(number, (number,), (number,)), ear)
    host.permits.release(3)
    first, second = ear.next(), ear.next()
    assert isinstance(first, Copied) and first.number == 1
    assert isinstance(second, OSError)
    assert copier.close(WAIT_S)
    assert len(host.pieces) == 1 and not ear.heard


def test_closing_gives_up_what_is_not_done_and_tells_nothing_more() -> None:
    host, ear = FakeHost(gated=True), Ear()
    copier = Copier(host)
    copier.start(op(1, (0, 2, 4), (0, 2, 4)), ear)
    copier.start(op(2, (6,), (6,)), ear)
    assert host.entered.acquire(timeout=WAIT_S)
    assert not copier.close(0.01)  # the first piece is under way: its memory must not go
    host.permits.release()
    assert copier.close(WAIT_S)
    assert len(host.pieces) == 1 and not ear.heard


def test_closing_before_the_first_copy_needs_no_thread() -> None:
    before = threading.active_count()
    assert Copier(FakeHost()).close(0.0)
    assert threading.active_count() == before


def test_a_rate_makes_a_copy_last_and_does_not_hold_the_end_up() -> None:
    """Four blocks of 1 MB at 100 MB a second take 42 ms; at 1 KB a second they would take an hour."""
    ear = Ear()
    copier = Copier(FakeHost(), max_bytes_per_s=100_000_000)
    copier.start(op(1, (0, 2, 4, 6), (0, 2, 4, 6)), ear)
    copied = ear.next()
    assert isinstance(copied, Copied) and copied.busy_ns >= 41_900_000
    assert copier.close(WAIT_S)

    host = FakeHost()
    slow = Copier(host, max_bytes_per_s=1000)
    slow.start(op(1, (0, 2, 4, 6), (0, 2, 4, 6)), ear)
    assert host.entered.acquire(timeout=WAIT_S)
    assert slow.close(WAIT_S)
    assert len(host.pieces) == 1 and not ear.heard


def test_the_rate_is_measured_both_ways_and_a_slow_one_in_one_block_each() -> None:
    host = FakeHost()
    assert Copier(host).measure() > 0
    assert host.pieces[0] == (True, 0, 0, 16)  # 16 MB
    assert host.pieces[1:] == [(out, block, block, 1) for out in (True, False) for block in range(16)]
    host = FakeHost()
    rate = Copier(host, max_bytes_per_s=5 << 20).measure()
    assert len(host.pieces) == 3
    assert 0.5 * (5 << 20) < rate <= 5 << 20
