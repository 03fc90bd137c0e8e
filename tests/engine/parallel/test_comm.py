"""What ranks exchange through shared memory. Threads stand for ranks: their calls hold no lock of Python's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.engine.kernels.build import Unavailable
from shoal.engine.kernels.library import Kernels
from shoal.engine.parallel.comm import Aborted, Comm, CommError
from shoal.engine.parallel.layout import Layout
from shoal.engine.parallel.shared import PIECE_BYTES, SLOT_BYTES, Memory

pytestmark = pytest.mark.torch

WAIT_S = 30.0


class Ranks:
    """A tensor-parallel group of so many threads."""

    def __init__(self, size: int, limit_s: float = WAIT_S) -> None:
        try:
            kernels = Kernels(1)
        except Unavailable as reason:
            pytest.skip(str(reason))
        layout = Layout(tp=size)
        self.memories = [Memory(layout)]
        self.memories += [Memory(layout, tuple(map(os.dup, self.memories[0].fds))) for _ in range(size - 1)]
        self.comms: list[Comm] = [
            memory.comms(rank, kernels, limit_s=limit_s).layer for rank, memory in enumerate(self.memories)
        ]
        self._threads = ThreadPoolExecutor(size)

    def all(self, call: Callable[[Comm], Any]) -> list[Any]:
        """What each rank's call returned, or raised."""

        def one(comm: Comm) -> Any:
            try:
                return call(comm)
            except CommError as error:
                return error

        return [future.result(WAIT_S) for future in [self._threads.submit(one, comm) for comm in self.comms]]

    def close(self) -> None:
        self._threads.shutdown()
        for memory in self.memories:
            memory.close()


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    group = Ranks(request.param)
    yield group
    group.close()


@pytest.fixture
def pair() -> Iterator[Ranks]:
    group = Ranks(2, limit_s=0.3)
    yield group
    group.close()


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 7, 8, 16 * 576, SLOT_BYTES // 4 + 5, 2 * SLOT_BYTES // 4])
def test_a_sum_is_that_of_all_in_their_order_and_the_same_bits_everywhere(
    ranks: Ranks, count: int, dtype: torch.dtype
) -> None:
    expected = torch.zeros(count)
    for rank in range(len(ranks.comms)):
        expected = values(rank, count, dtype=dtype).float() + expected
    for found in ranks.all(lambda comm: comm.all_reduce(values(comm.rank, count, dtype=dtype))):
        assert torch.equal(found, expected.to(dtype))


def test_calls_follow_each_other_at_any_pace(ranks: Ranks) -> None:
    """A slow rank still reads what a fast one gave, though that has gone on to the next call."""

    def many(comm: Comm) -> bool:
        good = True
        for number in range(300):
            if number % (7 + comm.rank) == 0:
                time.sleep(0.0005)
            x = torch.full((40,), float(number + comm.rank))
            expected = sum(float(number + rank) for rank in range(comm.size))
            good &= bool((comm.all_reduce(x) == expected).all())
        return good

    assert all(ranks.all(many))


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_a_gather_puts_parts_of_any_width_side_by_side(ranks: Ranks, rows: int) -> None:
    widths = [4096, 5000, 3][: len(ranks.comms)]
    expected = torch.cat([values(rank, rows, width) for rank, width in enumerate(widths)], 1)

    def gather(comm: Comm) -> Tensor:
        return comm.all_gather(values(comm.rank, rows, widths[comm.rank]), widths, torch.empty(rows, sum(widths)))

    for found in ranks.all(gather):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("count", [1, 1000, 3 * PIECE_BYTES // 4, 9 * PIECE_BYTES // 4 + 3])
def test_what_is_sent_arrives_in_order(ranks: Ranks, count: int) -> None:
    """Around the circle, twice, and more than there is room for."""

    def turn(comm: Comm) -> list[Tensor]:
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        found = []
        for number in range(2):
            if comm.rank:
                found.append(comm.receive(torch.empty(count), before))
                comm.send(values(10 * number + comm.rank, count), after)
            else:
                comm.send(values(10 * number, count), after)
                found.append(comm.receive(torch.empty(count), before))
        return found

    size = len(ranks.comms)
    for rank, found in enumerate(ranks.all(turn)):
        for number, x in enumerate(found):
            assert torch.equal(x, values(10 * number + (rank - 1) % size, count))


def test_a_sender_goes_on_while_there_is_room(pair: Ranks) -> None:
    comm = pair.comms[0]
    for number in range(4):
        comm.send(torch.full((4,), float(number)), 1)
    with pytest.raises(CommError, match="rank 1 did not come"):
        comm.send(torch.zeros(4), 1)
    assert [float(pair.comms[1].receive(torch.empty(4), 0)[0]) for _ in range(4)] == [0, 1, 2, 3]


def test_dis_02_ranks_that_are_in_different_steps_find_out_before_they_add(pair: Ranks) -> None:
    def step(comm: Comm) -> Tensor:
        comm.begin(1000 + comm.rank)
        return comm.all_reduce(torch.ones(8))

    for found in pair.all(step):
        assert isinstance(found, CommError) and "something else" in str(found)


def test_dis_02_a_rank_that_skips_a_call_is_found_at_the_next(pair: Ranks) -> None:
    def step(comm: Comm) -> Tensor:
        comm.begin(7)
        if comm.rank == 0:
            comm.all_reduce(torch.ones(8))
        return comm.all_gather(torch.ones(1, 8), [8, 8], torch.empty(1, 16))

    assert all(isinstance(found, CommError) for found in pair.all(step))


def test_a_message_of_another_size_is_refused(pair: Ranks) -> None:
    pair.comms[0].send(torch.ones(8), 1)
    with pytest.raises(CommError, match="something else"):
        pair.comms[1].receive(torch.ones(9), 0)


def test_a_rank_that_does_not_come_is_named_after_the_limit(pair: Ranks) -> None:
    began_s = time.monotonic()
    with pytest.raises(CommError, match=r"rank 1 did not come to where it was waited for within 0\.3 s"):
        pair.comms[0].all_reduce(torch.ones(8))
    assert 0.25 < time.monotonic() - began_s < 5
    with pytest.raises(CommError, match="rank 0 did not come"):
        pair.comms[1].receive(torch.ones(8), 0)


def test_an_abort_ends_every_wait() -> None:
    group = Ranks(2)
    waiting = threading.Event()
    raised: list[BaseException] = []

    def wait() -> None:
        waiting.set()
        try:
            group.comms[0].all_reduce(torch.ones(8))
        except Aborted as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait(WAIT_S)
    group.memories[1].abort()
    thread.join(WAIT_S)
    assert raised
    with pytest.raises(Aborted):
        group.comms[1].receive(torch.ones(8), 0)
    group.close()


def test_a_rank_alone_needs_nobody() -> None:
    alone = Ranks(1).comms[0]
    x = torch.ones(2, 3)
    assert alone.all_reduce(x) is x
    assert torch.equal(alone.all_gather(x, [3], torch.empty(2, 3)), x)


# -- by torch.distributed ----------------------------------------------------------------------------------------------

NETWORK = """
import os, sys
import torch
from shoal.engine.config import EngineConfig
from shoal.engine.device import choose
from shoal.engine.parallel import network
from shoal.engine.parallel.comm import CommError
from shoal.engine.parallel.layout import AXES, Layout

rank, store = map(int, sys.argv[1:])
device = choose(EngineConfig(kernels="off", device="cpu", threads=1))
comm = getattr(network.join(Layout(tp=3), rank, device, store, limit_s=20), AXES[0])
comm.begin(1 << 63 | 5)
for dtype in (torch.float32, torch.bfloat16):
    assert (comm.all_reduce(torch.full((7,), rank + 1.0, dtype=dtype)) == 6).all()
widths = [4, 1, 3]
found = comm.all_gather(torch.full((2, widths[rank]), float(rank)), widths, torch.empty(2, 8))
assert found.tolist() == [[0.0] * 4 + [1.0] + [2.0] * 3] * 2
if rank:
    assert (comm.receive(torch.empty(5), rank - 1) == rank - 1).all()
if rank < 2:
    comm.send(torch.full((5,), float(rank)), rank + 1)
try:
    comm.begin(rank)
    raise AssertionError("nobody noticed")
except CommError as error:
    assert "computes something else" in str(error)
if rank == 2:
    os._exit(0)  # as a rank does: gloo may abort where the interpreter ends by itself
try:
    comm.all_reduce(torch.ones(7))
    raise AssertionError("nobody noticed")
except CommError as error:
    assert "is gone" in str(error)
os._exit(0)
"""


def test_the_same_by_torch_distributed() -> None:
    store = os.memfd_create("store")
    processes = [
        subprocess.Popen([sys.executable, "-c", NETWORK, str(rank), str(store)], pass_fds=(store,)) for rank in range(3)
    ]
    try:
        assert [process.wait(WAIT_S) for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
        os.close(store)
