"""The host tier: blocks of main memory that hold the KV of parked requests while the device's blocks serve others."""

from __future__ import annotations

from collections.abc import Iterable


class HostTier:
    """Every block is free or belongs to one request. Memory grows with the blocks ever used."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: list[int] = []  # used before; blocks num_used .. num_blocks - 1 were never used
        self._num_used = 0

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_blocks - self._num_used

    def allocate(self, count: int) -> list[int]:
        """The caller has checked `num_free`."""
        again = [self._free.pop() for _ in range(min(count, len(self._free)))]
        first, self._num_used = self._num_used, self._num_used + count - len(again)
        assert self._num_used <= self.num_blocks, f"{count} host blocks of {self.num_blocks}"
        return again + list(range(first, self._num_used))

    def release(self, blocks: Iterable[int]) -> None:
        self._free += blocks

    def check(self, tables: Iterable[list[int]]) -> None:
        """`tables`: the host blocks of every request. AssertionError where a block is lost or owned twice."""
        owned = [block for table in tables for block in table]
        assert len(set(owned)) == len(owned), f"a host block has two owners: {sorted(owned)}"
        assert not set(owned) & set(self._free), "a host block is both free and owned"
        assert len(set(self._free)) == len(self._free), "a host block is free twice"
        assert len(owned) + self.num_free == self.num_blocks, (
            f"{len(owned)} owned + {self.num_free} free host blocks, the tier has {self.num_blocks}"
        )
