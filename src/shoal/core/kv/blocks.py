"""The pool of KV blocks. Every block is in exactly one of three states, at all times:

    free         holds nothing that anyone could ask for
    cached       referenced by nobody, but a prefix hit would find it; given up when free blocks run out
    referenced   by one table or more

Memory grows with the blocks ever used, not with the pool: ids are first handed out when nothing else is free.
"""

from __future__ import annotations

from collections.abc import Iterable

from shoal.core.kv.evict import LeastRecentlyUsed
from shoal.core.kv.prefix import Entry, PrefixIndex


class BlockPool:
    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        self.num_blocks = num_blocks
        self._index = index
        self._cached = LeastRecentlyUsed()
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

    def acquire(self, entries: Iterable[Entry]) -> list[int]:
        """The blocks of a prefix hit, for one more owner."""
        blocks = []
        for entry in entries:
            block = entry.block
            if self._refs[block] == 0:
                self._cached.remove(entry)
            self._refs[block] += 1
            blocks.append(block)
        return blocks

    def release(self, table: list[int]) -> None:
        """An owner gives its whole table back, last block first (evict.py says why)."""
        refs, entry_at, cache = self._refs, self._index.at, self._cached.add
        for block in reversed(table):
            left = refs[block] = refs[block] - 1
            if not left:
                entry = entry_at(block)
                if entry is None:
                    self._free.append(block)
                else:
                    cache(entry)

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
        self._check_entries({block: place for place, block in enumerate(cached)})

    def _check_entries(self, place: dict[int, int]) -> None:
        """`place`: cached block -> its place in the eviction queue."""
        for entry in self._index:
            assert entry.live and self._index.at(entry.block) is entry, f"entry of block {entry.block} is not live"
            assert self._refs[entry.block] or entry.block in place, f"block {entry.block} has an entry but is lost"
            parent = entry.parent
            if isinstance(parent, Entry):
                assert parent.live, f"block {entry.block} is cached, the block before it is not"
                if parent.block in place:
                    assert place.get(entry.block, len(place)) < place[parent.block], "a prefix goes before its end"
