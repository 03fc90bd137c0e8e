"""How ranks exchange tensors: what the model asks for, and the groups of one rank.

On one host through shared memory (shared.py); where our kernels cannot be had, and between GPUs, by torch.distributed
(network.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

LIMIT_S = 5.0  # of every wait within a step, unless steps are planned for more than a tenth of it


class CommError(Exception):
    """A rank that was waited for did not come, or is somewhere else; the message says which."""


class Aborted(CommError):
    """Another rank has failed before, and knows why."""


class Comm(Protocol):
    """A group of ranks, of which this is number `rank`. All of them call the same collectives in the same order.

    Every call raises CommError when it waited for too long.
    """

    rank: int
    size: int
    moved_bytes: int  # that this rank gave to others, so far

    def begin(self, digest: int) -> None:
        """A step begins; ranks whose digests (64 bits) differ find out at the next collective at the latest."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """x, contiguous, becomes the sum of all ranks' x: the same bits everywhere."""
        ...

    def all_gather(self, x_RW: Tensor, widths: Sequence[int], out: Tensor) -> Tensor:
        """`out` [R, sum of widths], contiguous, gets each rank's [R, its width], side by side in the order of ranks."""
        ...

    def send(self, x: Tensor, to: int) -> None:
        """Returns when x may be written again, mostly before the other rank has it."""
        ...

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Fills x, contiguous and as large as what was sent."""
        ...


class Alone:
    """A group of one."""

    rank, size, moved_bytes = 0, 1, 0

    def begin(self, digest: int) -> None:
        pass

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x_RW: Tensor, widths: Sequence[int], out: Tensor) -> Tensor:
        return out.copy_(x_RW)

    def send(self, x: Tensor, to: int) -> None:
        raise AssertionError("there is no other rank")

    def receive(self, x: Tensor, source: int) -> Tensor:
        raise AssertionError("there is no other rank")


@dataclass(frozen=True, slots=True)
class Comms:
    """A rank's groups along the axes of its layout."""

    layer: Comm
    cp: Comm
    pp: Comm

    def begin(self, digest: int) -> None:
        """Stages are at different steps."""
        for comm in (self.layer, self.cp):
            comm.begin(digest)

    @property
    def moved_bytes(self) -> int:
        return self.layer.moved_bytes + self.cp.moved_bytes + self.pp.moved_bytes
