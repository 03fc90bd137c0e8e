"""Which block holds the KV of which prefix.

    scope ── entry 0 ── entry 1 ── entry 2           an entry: key, token ids, block, and the entry before it
                     └─ entry 1' ── entry 2'

A hit is not believed on its key alone: token ids and the entry before must be the same, so two prefixes whose keys
collide never read each other's KV; such a lookup is a miss and counts in `collisions`.

Only a filled block gets an entry, and only where its owner's table holds the block of the entry before it too.
Therefore whoever references a block references the whole prefix before it, and a live entry has a live parent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shoal.core.kv.hashing import block_key
from shoal.core.kv.news import DEVICE, KvEvent

if TYPE_CHECKING:
    from shoal.core.kv.host import Known
    from shoal.core.kv.lookahead import Run


class Entry:
    __slots__ = ("block", "check", "key", "live", "parent", "run", "tokens", "uses")

    def __init__(self, key: bytes, parent: Entry | bytes, tokens: tuple[int, ...], block: int) -> None:
        self.key = key
        self.parent = parent  # bytes: the scope's key, before the first block
        self.tokens = tokens
        self.block = block
        self.check: int = hash((parent.check if isinstance(parent, Entry) else parent, tokens))  # without a call
        self.live = True  # False once the block was given to someone else
        # What the eviction orders note, each for itself:
        self.uses = 0  # by prompts that found it
        self.run: Run | None = None  # since it was released last

    def path(self) -> list[Entry]:
        """The entries of its prefix, from the first to this one, whether or not they are live."""
        path: list[Entry] = []
        entry: Entry | bytes = self
        while isinstance(entry, Entry):
            path.append(entry)
            entry = entry.parent
        return path[::-1]


def check(parent: Entry | bytes | int, tokens: tuple[int, ...]) -> int:
    """A second digest of a whole prefix, beside its key: it tells prefixes apart whose keys collide where the entries
    before a block are not at hand. `parent`: the entry before, or its check; before the first, the scope's key."""
    return hash((parent.check if isinstance(parent, Entry) else parent, tokens))


class Chain:
    """One request's prefix keys, each computed once, and how far its own blocks are in the index."""

    __slots__ = ("closed", "hosted", "keys", "matched", "num_entries", "scope", "tail")

    def __init__(self, scope: bytes, keys: Sequence[bytes] = ()) -> None:
        self.scope = scope
        self.keys = list(keys)  # of its first blocks
        self.matched: list[Entry] = []  # while it waits: the hits found so far
        self.hosted: Known | None = None  # and those in the host tier behind them
        self.tail: Entry | bytes = scope  # while it runs: entry of its block num_entries - 1
        self.num_entries = 0
        self.closed = False  # another block holds the same content, so its later blocks get no entries

    def key(self, index: int, tokens: tuple[int, ...]) -> bytes:
        """Key of block `index`, whose token ids are given; asked in order."""
        keys = self.keys
        if index == len(keys):
            keys.append(block_key(keys[-1] if keys else self.scope, tokens))
        return keys[index]

    def beyond_hits(self, tokens: list[int], block_tokens: int, end: int) -> list[bytes]:
        """Keys of the blocks behind those that are matched, up to block `end`."""
        for index in range(len(self.keys), end):
            self.key(index, tuple(tokens[index * block_tokens : (index + 1) * block_tokens]))
        return self.keys[len(self.matched) : end]

    @property
    def next_key(self) -> bytes | None:
        """Of the block behind those that are matched, where it is known."""
        place = len(self.matched)
        return self.keys[place] if place < len(self.keys) else None

    def beyond(
        self, tokens: list[int], block_tokens: int, end: int
    ) -> Iterator[tuple[int, bytes, tuple[int, ...], int]]:
        """Index, key, token ids and check of the blocks behind those that are matched, up to block `end`."""
        parent: int | bytes = self.matched[-1].check if self.matched else self.scope
        for index in range(len(self.matched), end):
            ids = tuple(tokens[index * block_tokens : (index + 1) * block_tokens])
            parent = check(parent, ids)
            yield index, self.key(index, ids), ids, parent

    def adopt(self, entries: list[Entry]) -> None:
        """The request starts with the blocks of these hits."""
        self.num_entries = len(entries)
        self.tail = entries[-1] if entries else self.scope
        self.matched = []
        self.hosted = None
        self.closed = False


class PrefixIndex:
    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._by_key: dict[bytes, Entry] = {}
        self._by_block: dict[int, Entry] = {}
        self.collisions = 0
        self.news: list[KvEvent] | None = None  # not taken yet; None: nobody takes any

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._by_key.values())

    def at(self, block: int) -> Entry | None:
        """The entry whose KV this block holds."""
        return self._by_block.get(block)

    def find(self, key: bytes) -> Entry | None:
        """For whoever knows nothing but the key."""
        return self._by_key.get(key)

    def match(self, chain: Chain, tokens: list[int], max_blocks: int) -> list[Entry]:
        """The longest known prefix of `tokens`, at most `max_blocks` blocks of it.

        Asked again while the request waits, it goes on where it was: only what was evicted since is taken back.
        """
        matched = chain.matched
        while matched and not matched[-1].live:
            matched.pop()
        size, keys, by_key = self._block_tokens, chain.keys, self._by_key
        parent = matched[-1] if matched else chain.scope
        for index in range(len(matched), max_blocks):
            if index < len(keys) and keys[index] not in by_key:
                break  # the usual end
            block_tokens = tuple(tokens[index * size : (index + 1) * size])
            entry = by_key.get(keys[index] if index < len(keys) else chain.key(index, block_tokens))
            if entry is None:
                break
            if entry.tokens != block_tokens or entry.parent != parent:
                self.collisions += 1
                break
            matched.append(entry)
            parent = entry
        return matched

    def extend(self, chain: Chain, tokens: list[int], blocks: list[int], num_filled: int) -> None:
        """Enters the owner's blocks [chain.num_entries, num_filled), whose KV is there."""
        if chain.closed:
            return
        size, by_key, by_block, keys, tail = self._block_tokens, self._by_key, self._by_block, chain.keys, chain.tail
        for index in range(chain.num_entries, num_filled):
            block_tokens = tuple(tokens[index * size : (index + 1) * size])
            key = keys[index] if index < len(keys) else chain.key(index, block_tokens)
            if key in by_key:
                chain.closed = True  # computed twice at the same time, or a collision
                break
            block = blocks[index]
            tail = by_key[key] = by_block[block] = Entry(key, tail, block_tokens, block)
            chain.num_entries = index + 1
            if self.news is not None:
                self.news.append((key, keys[index - 1] if index else b"", DEVICE, True))
        chain.tail = tail

    def remove(self, entry: Entry) -> None:
        """The block is given to someone else."""
        entry.live = False
        del self._by_key[entry.key], self._by_block[entry.block]
        if self.news is not None:
            self.news.append((entry.key, b"", DEVICE, False))

    def take_news(self) -> list[KvEvent]:
        """What was stored and dropped since the call before, in order. From the first call on, which brings nothing."""
        news, self.news = self.news, []
        return news or []
