"""The digest of a moved block: its value, that it notices changes, and that it holds nobody up."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from shoal.engine.transfer.digest import DIGEST_BYTES, digest

WAIT_S = 10.0


def test_it_is_xxh3_of_128_bits() -> None:
    """Test vectors of the reference implementation: it must not change, files and other engines depend on it."""
    assert digest(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert len(digest(b"a")) == DIGEST_BYTES


def test_all_kinds_of_buffers_with_the_same_bytes_have_one_digest() -> None:
    block_NX = np.arange(30 * 512, dtype=np.uint8).reshape(30, 512)
    raw = block_NX.tobytes()
    for same in (raw, bytearray(raw), memoryview(raw), block_NX, block_NX.reshape(-1), memoryview(block_NX)):
        assert digest(same) == digest(raw)


@pytest.mark.torch
def test_a_tensor_is_read_through_its_numpy_view() -> None:
    import torch

    host_HNX = torch.arange(2 * 30 * 512, dtype=torch.uint8).view(2, 30, 512)
    assert digest(host_HNX[1].numpy()) == digest(bytes(host_HNX[1].reshape(-1).tolist()))


def test_bytes_that_are_not_in_one_piece_are_refused() -> None:
    block_NX = np.zeros((4, 512), np.uint8)
    with pytest.raises(BufferError):
        digest(block_NX[:, ::2])
    with pytest.raises(BufferError):
        digest(block_NX.T)


def test_every_flipped_bit_and_every_exchange_of_layers_is_noticed() -> None:
    block_NX = np.random.default_rng(0).integers(0, 256, (4, 96), np.uint8)
    right = digest(block_NX)
    for byte in range(block_NX.size):
        for bit in range(8):
            block_NX.reshape(-1)[byte] ^= 1 << bit
            assert digest(block_NX) != right
            block_NX.reshape(-1)[byte] ^= 1 << bit
    assert digest(block_NX) == right
    assert digest(np.ascontiguousarray(block_NX[[1, 0, 2, 3]])) != right


@pytest.fixture
def nobody_is_interrupted() -> Iterator[None]:
    """Another thread gets Python's lock when it is given back, not when time is up."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("nobody_is_interrupted")
def test_other_threads_run_while_it_computes() -> None:
    """Some tries, since on a busy machine a thread that may run need not run within the 5 ms that 64 MB take."""
    data = np.zeros(64 << 20, np.uint8)

    def ran_meanwhile() -> bool:
        began, ended = threading.Event(), []

        def work() -> None:
            began.set()
            digest(data)
            ended.append(time.perf_counter_ns())

        thread = threading.Thread(target=work)
        thread.start()
        assert began.wait(WAIT_S)
        now_ns = time.perf_counter_ns()
        thread.join(WAIT_S)
        return now_ns < ended[0]

    assert any(ran_meanwhile() for _ in range(10))
