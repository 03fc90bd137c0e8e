"""The host tier: blocks of main memory for the KV of parked requests, and for prefix blocks that the device gives up.

Every block is in exactly one of three states, at all times:

    free     holds nothing
    cached   holds a prefix block that anyone may ask for; given up, least recently used first, for those that need it
    owned    by one request that is parked, or by a copy on its way
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import islice

from shoal.core.kv.news import HOST
from shoal.core.kv.prefix import Chain, Entry, PrefixIndex, check


class HostEntry:
    """A prefix block; the fields that it shares with kv.prefix.Entry mean the same."""

    __slots__ = ("block", "check", "key", "live", "num_readers", "parent", "tokens")

    def __init__(self, key: bytes, parent: bytes, tokens: tuple[int, ...], check: int, block: int) -> None:
        self.key = key
        self.parent = parent  # key of the block before; empty for a prompt's first
        self.tokens = tokens
        self.check = check
        self.block = block
        self.num_readers = 0  # copies in flight that read it
        self.live = True  # False once the block was given up


class Known:
    """Blocks that were found for one that waits: the first of them is block `first` of its prefix."""

    __slots__ = ("entries", "first", "num_forgotten")

    def __init__(self, first: int, num_forgotten: int) -> None:
        self.first = first
        self.num_forgotten = num_forgotten  # when all of them were still there
        self.entries: list[HostEntry] = []


class HostTier:
    """Memory grows with the blocks ever used."""

    def __init__(self, num_blocks: int, index: PrefixIndex) -> None:
        """`index`: of the device's blocks, whose news tell of these too."""
        self.num_blocks = num_blocks
        self._index = index
        self._free: list[int] = []  # used before; blocks num_used .. num_blocks - 1 were never used
        self._num_used = 0
        self._cached: OrderedDict[bytes, HostEntry] = OrderedDict()  # by key, next to go first; a prefix from its end
        self._num_read = 0  # of them, those with readers
        self._num_forgotten = 0  # so far
        self.fresh: deque[HostEntry] | None = None  # cached since somebody looked; None: nobody looks

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_blocks - self._num_used

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return self.num_free + len(self._cached) - self._num_read

    def allocate(self, count: int) -> list[int]:
        """The caller has checked `num_available`."""
        idle = (entry for entry in self._cached.values() if not entry.num_readers)
        for entry in list(islice(idle, max(0, count - self.num_free))):
            self.forget(entry)
        again = [self._free.pop() for _ in range(min(count, len(self._free)))]
        first, self._num_used = self._num_used, self._num_used + count - len(again)
        assert self._num_used <= self.num_blocks, f"{count} host blocks of {self.num_blocks}"
        return again + list(range(first, self._num_used))

    def release(self, blocks: Iterable[int]) -> None:
        self._free += blocks

    # -- prefix blocks -------------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> HostEntry | None:
        return self._cached.get(key)

    def match(self, chain: Chain, tokens: list[int], block_tokens: int, end: int) -> list[HostEntry]:
        """Of a prefix, the blocks here that follow `chain.matched`, up to block `end`.

        As PrefixIndex.match, it goes on where it was: what was given up since is looked for only if anything was.
        """
        first, known = len(chain.matched), chain.hosted
        if known is None or first < known.first:
            known = chain.hosted = Known(first, self._num_forgotten)
        found = known.entries
        if first > known.first:
            del found[: first - known.first]
            known.first = first
        if known.num_forgotten != self._num_forgotten:
            known.num_forgotten = self._num_forgotten
            for place, each in enumerate(found):
                if not each.live:
                    del found[place:]
                    break
        before = found or chain.matched
        parent: int | bytes = before[-1].check if before else chain.scope
        keys, cached = chain.keys, self._cached
        for index in range(first + len(found), end):
            if index < len(keys) and keys[index] not in cached:
                break
            ids = tuple(tokens[index * block_tokens : (index + 1) * block_tokens])
            entry = cached.get(chain.key(index, ids))
            if entry is None:
                break
            parent = check(parent, ids)
            if entry.check != parent:
                self._index.collisions += 1
                break
            found.append(entry)
        return found

    def store(self, entry: Entry, block: int) -> None:
        """An owned block holds a copy of the entry's from now on, and is cached."""
        parent = entry.parent.key if isinstance(entry.parent, Entry) else b""
        kept = HostEntry(entry.key, parent, entry.tokens, entry.check, block)
        if self.keep(kept) and self.fresh is not None:
            self.fresh.append(kept)

    def keep(self, entry: HostEntry) -> bool:
        """Its block was owned, and is cached from now on. False: there is one of that key, so it is free."""
        if entry.key in self._cached:
            self._free.append(entry.block)
            return False
        self._cached[entry.key] = entry
        if self._index.news is not None:
            self._index.news.append((entry.key, entry.parent, HOST, True))
        return True

    def forget(self, entry: HostEntry) -> None:
        """Nobody reads it."""
        if self._cached.pop(entry.key, None) is entry:
            entry.live = False
            self._num_forgotten += 1
            self._free.append(entry.block)
            if self._index.news is not None:
                self._index.news.append((entry.key, b"", HOST, False))

    def used(self, keys: Iterable[bytes]) -> None:
        """Of one prefix, its end first and all up to its start: those that are cached are the last to go, in this
        order."""
        cached = self._cached
        for key in keys:
            if key in cached:
                cached.move_to_end(key)

    def hold(self, entries: Iterable[HostEntry]) -> None:
        """A copy reads them until `let_go`."""
        for entry in entries:
            self._num_read += not entry.num_readers
            entry.num_readers += 1

    def let_go(self, entries: Iterable[HostEntry]) -> None:
        for entry in entries:
            entry.num_readers -= 1
            self._num_read -= not entry.num_readers

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """`tables`: the host blocks of every owner. AssertionError where a block is lost or owned twice."""
        owned = [block for table in tables for block in table]
        cached = [entry.block for entry in self._cached.values()]
        taken = owned + cached
        assert len(set(taken)) == len(taken), f"a host block has two owners: {sorted(taken)}"
        assert not set(taken) & set(self._free), "a host block is both free and taken"
        assert len(set(self._free)) == len(self._free), "a host block is free twice"
        assert len(taken) + self.num_free == self.num_blocks, (
            f"{len(owned)} owned + {len(cached)} cached + {self.num_free} free host blocks, not {self.num_blocks}"
        )
        num_read = sum(entry.num_readers > 0 for entry in self._cached.values())
        assert num_read == self._num_read, f"{num_read} cached host blocks are read, not {self._num_read}"
