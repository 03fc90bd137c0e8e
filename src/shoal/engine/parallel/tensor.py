"""Layers of which each tensor-parallel rank has a part (Shoeybi et al., arXiv:1909.08053).

Queries, keys, values, gates and ups are split by outputs: a rank's part is a smaller layer and needs nothing of this.
What follows them is split by inputs: the parts' results are added, once per half layer.
The vocabulary is split: rows of the embedding are added (all but one rank have zeros), scores are gathered, so that
every rank samples the same token from the same numbers.

Shape letters: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from torch import Tensor, where

from shoal.engine.device import Device
from shoal.engine.model.linear import Linear
from shoal.engine.parallel.comm import Comm
from shoal.engine.parallel.layout import Part, Split


class SplitInputs:
    """A layer's `add`, of which each rank has some of the inputs; a bias is the first rank's."""

    def __init__(self, layer: Linear, comm: Comm, mine: Part | None = None) -> None:
        """`mine`: of the inputs that `add` is given, those that are this rank's; None: all."""
        self._layer = layer
        self._comm = comm
        self._mine = mine

    def add(self, x_MK: Tensor, residual_MN: Tensor) -> Tensor:
        """All have the same residual; the first rank's is the one that counts."""
        if self._comm.rank:
            residual_MN.zero_()
        if self._mine is not None:
            x_MK = x_MK[:, self._mine.first : self._mine.end].contiguous()
        return self._comm.all_reduce(self._layer.add(x_MK, residual_MN))


class SplitVocabulary:
    """The embedding, the output matrix or both, of which each rank has some of the rows."""

    def __init__(self, layer: Linear, vocab_size: int, split: Split, comm: Comm, device: Device) -> None:
        self.num_rows = vocab_size
        self._layer = layer
        self._part = split.part(vocab_size)
        self._widths = [split.part(vocab_size, rank).size for rank in range(split.size)]
        self._comm = comm
        self._device = device

    def rows(self, ids_M: Tensor) -> Tensor:
        first, end, _ = self._part
        mine_M = (ids_M >= first) & (ids_M < end)
        x_MK = self._layer.rows(where(mine_M, ids_M - first, 0))
        return self._comm.all_reduce(x_MK.masked_fill_(~mine_M.unsqueeze(1), 0))

    def scores(self, x_MK: Tensor, norm_K: Tensor) -> Tensor:
        own = self._layer.scores(x_MK, norm_K)
        out = self._device.buffer(len(own), self.num_rows, own.dtype)
        return self._comm.all_gather(own, self._widths, out)


class Elsewhere:
    """The embedding or the output matrix, where another stage has it."""

    def __init__(self, vocab_size: int) -> None:
        self.num_rows = vocab_size

    def rows(self, ids_M: Tensor) -> Tensor:
        raise AssertionError("another stage has the embedding")

    def scores(self, x_MK: Tensor, norm_K: Tensor) -> Tensor:
        raise AssertionError("another stage has the output matrix")
