"""The pool of KV blocks. Every block is in exactly one of three states, at all times:

    free         holds nothing that anyone could ask for
    cached       referenced by nobody, but a prefix hit would find it; given up when free blocks run out
    referenced   by one table or more

Memory grows with the blocks ever used, not with the pool: ids are first handed out when nothing else is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.core.kv.evict import LeastRecentlyUsed, Order
from shoal.core.kv.prefix import Entry, PrefixIndex


class BlockPool:
    def __init__(self, num_blocks: int, index: PrefixIndex, order: Order | None = None) -> None:
        """`order`: in which cached blocks are given up; least recently used first where none is given."""
        self.num_blocks = num_blocks
        self._index = index
        self._cached = LeastRecentlyUsed(num_blocks) if order is None else order
        self._free: list[int] = []  # used before; blocks len(refs) .. num_blocks - 1 were never used
        self._refs: list[int] = []

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_blocks - len(self._refs)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._cached) + len(self._free) + self.num_blocks - len(self._refs)

    def allocate(self, count: int) -> list[int]:
        """Blocks for one new owner, with unknown content. The caller has checked `num_available`."""
        free, refs = self._free, self._refs
        num_kept = max(0, len(free) - count)
        blocks = free[num_kept:][::-1]  # the last one first
        del free[num_kept:]
        for block in blocks:
            refs[block] = 1
        first = len(refs)
        end = min(self.num_blocks, first + count - len(blocks))
        blocks += range(first, end)
        refs += [1] * (end - first)
        while len(blocks) < count:
            blocks.append(self._give_up())
        return blocks

    def take(self) -> int:
        """`allocate` of one block."""
        if self._free:
            block = self._free.pop()
            self._refs[block] = 1
            return block
        if len(self._refs) < self.num_blocks:
            self._refs.append(1)
            return len(self._refs) - 1
        return self._give_up()

    def _give_up(self) -> int:
        """The cached block whose turn it is, for a new owner."""
        entry = self._cached.pop()
        self._index.remove(entry)
        self._refs[entry.block] = 1
        return entry.block

    def num_cached_of(self, entries: Iterable[Entry]) -> int:
        """How many of these hits would leave the cache, and hence `num_available`, when acquired."""
        refs = self._refs
        return sum([1 for entry in entries if refs[entry.block] == 0])

    def acquire(self, entries: Sequence[Entry], beyond: Sequence[bytes] | None = None) -> list[int]:
        """The blocks of a prefix, from its start, for one more owner. `beyond`: a prompt has found it, whose blocks
        behind it have these keys, as far as they are known; None: they are copied or lent."""
        refs = self._refs
        cached = [entry for entry in entries if refs[entry.block] == 0]
        if beyond is None:
            self._cached.remove(cached)
        else:
            self._cached.found(entries, cached, beyond)
        blocks = [entry.block for entry in entries]
        for block in blocks:
            refs[block] += 1
        return blocks

    def release(self, table: list[int]) -> None:
        """An owner gives its whole table back, last block first (evict.py says why)."""
        refs, entry_at, free = self._refs, self._index.at, self._free
        entries = []
        for block in reversed(table):
            left = refs[block] = refs[block] - 1
            if not left:
                entry = entry_at(block)
                if entry is None:
                    free.append(block)
                else:
                    entries.append(entry)
        self._cached.add(entries)

    def num_sole(self, table: list[int]) -> int:
        """How many blocks become available when this table is released."""
        refs = self._refs
        return sum([1 for block in table if refs[block] == 1])

    def check(self, tables: Iterable[list[int]]) -> None:
        """`tables`: every live block table. AssertionError where a block is not in exactly one state."""
        expected = [0] * len(self._refs)
        for table in tables:
            assert len(set(table)) == len(table), f"a table names a block twice: {table}"
            for block in table:
                assert 0 <= block < len(expected), f"block {block} was never handed out"
                expected[block] += 1
        for block, (refs, want) in enumerate(zip(self._refs, expected, strict=True)):
            assert refs == want, f"block {block} has {refs} references, {want} tables name it"
        free = set(self._free)
        cached = [entry.block for entry in self._cached]
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & set(cached), f"both free and cached: {free & set(cached)}"
        num_referenced = sum(1 for refs in self._refs if refs)
        assert all(self._refs[block] == 0 for block in (*free, *cached)), "a free or cached block is referenced"
        assert all(self._index.at(block) is None for block in free), "a free block has an entry"
        total = self.num_free + self.num_cached + num_referenced
        assert total == self.num_blocks, f"free + cached + referenced = {total}, the pool has {self.num_blocks}"
        assert len(cached) == len(set(cached)) == len(self._cached), "the eviction order counts its blocks wrongly"
        self._check_entries(set(cached))

    def _check_entries(self, cached: set[int]) -> None:
        for entry in self._index:
            assert entry.live and self._index.at(entry.block) is entry, f"entry of block {entry.block} is not live"
            assert self._refs[entry.block] or entry.block in cached, f"block {entry.block} has an entry but is lost"
            parent = entry.parent
            if isinstance(parent, Entry):
                assert parent.live, f"block {entry.block} is cached, the block before it is not"
                assert parent.block not in cached or entry.block in cached, "a prefix is cached, its end referenced"
