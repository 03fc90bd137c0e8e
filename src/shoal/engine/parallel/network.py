"""Comm by torch.distributed: NCCL between GPUs, gloo where our kernels cannot be had.

Ranks find each other through a file without a name, which they inherit, and gloo listens on this host alone. Measured
for the 37 KB of a step of 16 rows: 365 µs, where shared memory takes 13 (bench/allreduce.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from shoal.engine.device import Device
from shoal.engine.parallel.comm import LIMIT_S, Aborted, Alone, Comm, CommError, Comms
from shoal.engine.parallel.layout import AXES, Layout

JOIN_LIMIT_S = 60.0  # some ranks may start later than others


def join(layout: Layout, rank: int, device: Device, store: int, *, limit_s: float = LIMIT_S) -> Comms:
    """`store`: descriptor of the file. Returns when all ranks have come. What this process joined before is over."""
    if dist.is_initialized():
        dist.destroy_process_group()
    device.make_current()
    if not device.is_cuda:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if device.is_cuda else "gloo",
        store=dist.FileStore(f"/proc/self/fd/{store}", layout.size),
        rank=rank,
        world_size=layout.size,
        timeout=timedelta(seconds=JOIN_LIMIT_S),
    )
    comms: dict[str, Comm] = {}
    for axis in AXES:
        comms[axis] = Alone()
        for ranks in layout.groups(axis):
            group = None
            if len(ranks) > 1:  # by every rank, in one order
                group = dist.new_group(list(ranks), timeout=timedelta(seconds=limit_s))
            if group is not None and rank in ranks:
                comms[axis] = Network(group, ranks, rank, device)
    return Comms(**comms)


class Network:
    """A Comm."""

    def __init__(self, group: dist.ProcessGroup, ranks: tuple[int, ...], rank: int, device: Device) -> None:
        self.rank = ranks.index(rank)
        self.size = len(ranks)
        self.moved_bytes = 0
        self._group = group
        self._ranks = ranks
        self._device = device

    def begin(self, digest: int) -> None:
        """On a GPU it would wait for the step before."""
        if self._device.is_cuda:
            return
        own = torch.tensor([[digest & 0xFFFFFFFF, digest >> 32]])
        all_ranks = self.all_gather(own, [2] * self.size, own.new_empty(1, 2 * self.size))
        for other, both in zip(self._ranks, all_ranks.view(-1, 2), strict=True):
            if not torch.equal(both, own[0]):
                raise CommError(f"rank {other} computes something else than rank {self._ranks[self.rank]}")

    def all_reduce(self, x: Tensor) -> Tensor:
        try:
            dist.all_reduce(x, group=self._group)
        except RuntimeError as error:
            raise _failure(error) from None
        self.moved_bytes += x.nbytes * (self.size - 1)
        return x

    def all_gather(self, x_RW: Tensor, widths: Sequence[int], out: Tensor) -> Tensor:
        widest = max(widths)
        own = x_RW if x_RW.shape[1] == widest else pad(x_RW, (0, widest - x_RW.shape[1]))
        parts = [torch.empty_like(own) for _ in widths]
        try:
            dist.all_gather(parts, own, group=self._group)
        except RuntimeError as error:
            raise _failure(error) from None
        for part, to in zip(parts, out.split(list(widths), 1), strict=True):
            to.copy_(part[:, : to.shape[1]])
        self.moved_bytes += x_RW.nbytes * (self.size - 1)
        return out

    def send(self, x: Tensor, to: int) -> None:
        try:
            dist.send(x, self._ranks[to], group=self._group)
        except RuntimeError as error:
            raise _failure(error) from None
        self.moved_bytes += x.nbytes

    def receive(self, x: Tensor, source: int) -> Tensor:
        try:
            dist.recv(x, self._ranks[source], group=self._group)
        except RuntimeError as error:
            raise _failure(error) from None
        return x


def _failure(error: RuntimeError) -> CommError:
    """gloo's own words name no rank."""
    words = str(error).splitlines()[0]
    if "timed out" in words.lower() or "timeout" in words.lower():
        return CommError(f"another rank did not come to where it was waited for: {words}")
    return Aborted(f"another rank is gone: {words}")
