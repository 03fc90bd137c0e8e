"""Comm through memory that the ranks of one host share; kernels/ranks.h does the work.

The memory is a file without a name: rank 0 makes it, the others inherit its descriptor, and it goes with the last of
them, however that ends. Pages are taken when they are first touched, so only what is really sent costs memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.engine.kernels.library import Kernels, Member, address
from shoal.engine.parallel.comm import LIMIT_S, Aborted, Alone, Comm, CommError, Comms
from shoal.engine.parallel.layout import AXES, Layout

SLOT_BYTES = 4 << 20
PIECE_BYTES = 1 << 20
SPIN_NS = 50_000  # what a rank is late in most steps
_PIECES = 4  # kPieces of ranks.h
_LINE_BYTES, _CHANNEL_BYTES = 64, 192  # sizes of Arrival and Channel
_PAGE = 4096


class Memory:
    """What all ranks of a replica share. Its first number says whether it is over with them."""

    def __init__(self, layout: Layout, fds: tuple[int, int] | None = None) -> None:
        """`fds`: of rank 0's; they are this object's from here on. None: this is rank 0."""
        self.layout = layout
        self.fds = (_unnamed_file(), _unnamed_file()) if fds is None else fds  # the memory, and network.py's file
        self._places, size = _places(layout)
        if fds is None:
            os.ftruncate(self.fds[0], size)
        self._mapped = mmap.mmap(self.fds[0], size)
        self._bytes = np.frombuffer(self._mapped, np.uint8)
        self._aborted = self._bytes[:4].view(np.int32)

    def abort(self) -> None:
        """Every wait of every rank ends now."""
        self._aborted[0] = 1

    @property
    def aborted(self) -> bool:
        return bool(self._aborted[0])

    def comms(self, rank: int, kernels: Kernels, *, spin_ns: int = SPIN_NS, limit_s: float = LIMIT_S) -> Comms:
        def comm(axis: str) -> Comm:
            ranks = next(ranks for of, ranks in self._places if of == axis and rank in ranks)
            if len(ranks) == 1:
                return Alone()
            start = address(self._bytes)
            parts = [start + offset for offset in self._places[axis, ranks]]
            member = Member(
                *parts, start, ranks.index(rank), len(ranks), SLOT_BYTES, PIECE_BYTES, int(limit_s * 1e9), spin_ns
            )
            return SharedMemory(member, kernels, ranks, self)

        return Comms(*map(comm, AXES))

    def close(self) -> None:
        """The mapping goes with the last array that uses it."""
        fds, self.fds = self.fds, (-1, -1)
        for fd in fds:
            if fd >= 0:
                os.close(fd)


class SharedMemory:
    """A Comm."""

    def __init__(self, member: Member, kernels: Kernels, ranks: tuple[int, ...], memory: Memory) -> None:
        self.rank: int = member.rank
        self.size: int = member.size
        self.moved_bytes = 0
        self._member = member
        self._handle = ctypes.byref(member)
        self._kernels = kernels
        self._ranks = ranks
        self._memory = memory  # kept: the member points to it
        self._widths: dict[tuple[int, ...], np.ndarray] = {}

    def begin(self, digest: int) -> None:
        self._member.tag = digest

    def all_reduce(self, x: Tensor) -> Tensor:
        assert x.is_contiguous() and x.dtype in (torch.float32, torch.bfloat16)
        is_bf16 = x.dtype == torch.bfloat16
        self._check(self._kernels.all_reduce(self._handle, x.data_ptr(), x.numel(), is_bf16))
        self.moved_bytes += x.nbytes * (self.size - 1)
        return x

    def all_gather(self, x_RW: Tensor, widths: Sequence[int], out: Tensor) -> Tensor:
        assert x_RW.is_contiguous() and out.is_contiguous()
        assert x_RW.dtype == out.dtype and out.shape == (len(x_RW), sum(widths)) and x_RW.shape[1] == widths[self.rank]
        key = (*widths, x_RW.element_size())
        sizes = self._widths.get(key)
        if sizes is None:
            sizes = self._widths[key] = np.array(widths, np.int64) * x_RW.element_size()
            assert sizes.max() <= SLOT_BYTES, "a row is larger than a slot"
        self._check(self._kernels.all_gather(self._handle, x_RW.data_ptr(), len(x_RW), address(sizes), out.data_ptr()))
        self.moved_bytes += x_RW.nbytes * (self.size - 1)
        return out

    def send(self, x: Tensor, to: int) -> None:
        assert x.is_contiguous()
        self._check(self._kernels.send(self._handle, x.data_ptr(), x.nbytes, to))
        self.moved_bytes += x.nbytes

    def receive(self, x: Tensor, source: int) -> Tensor:
        assert x.is_contiguous()
        self._check(self._kernels.receive(self._handle, x.data_ptr(), x.nbytes, source))
        return x

    def _check(self, outcome: int) -> None:
        if not outcome:
            return
        other = self._ranks[self._member.culprit]
        if outcome == 2:
            raise Aborted("another rank has failed")
        if outcome == 1:
            limit_s = self._member.limit_ns / 1e9
            raise CommError(f"rank {other} did not come to where it was waited for within {limit_s:g} s")
        raise CommError(f"rank {other} computes something else than rank {self._ranks[self.rank]}")


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):  # not bounded by the size of /dev/shm, which is small in containers
        return os.memfd_create("shoal-ranks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _places(layout: Layout) -> tuple[dict[tuple[str, tuple[int, ...]], tuple[int, int, int, int]], int]:
    """Of each group: where arrivals, slots, channels and pieces are; and the size of all."""
    places: dict[tuple[str, tuple[int, ...]], tuple[int, int, int, int]] = {}
    end = _PAGE
    for axis in AXES:
        for ranks in layout.groups(axis):
            n = len(ranks)
            sizes = (n * _LINE_BYTES, n * 2 * SLOT_BYTES, n * n * _CHANNEL_BYTES, n * n * _PIECES * PIECE_BYTES)
            offsets = []
            for size in sizes if n > 1 else (0,) * len(sizes):
                offsets.append(end)
                end += -(-size // _PAGE) * _PAGE
            places[axis, ranks] = (offsets[0], offsets[1], offsets[2], offsets[3])
    return places, end
