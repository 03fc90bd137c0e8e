"""Which cached block is given up first. Whatever the order, of a prefix its end goes before its start.

    lru         the least recently used
    s3fifo      new blocks wait in a short queue, those used meanwhile in a long one (Yang et al., SOSP 2023)
    lookahead   as lru, or, while that clearly finds more, the one of which the fewest uses are expected for the time
                that it would be kept

Each is told when blocks lose their last reference, when they are referenced again, and whom a prompt has found. What
keeps it simple: a table is released from its end, and whoever holds a block holds all blocks before it. So no cached
block was released after one before it, and the one that was released first of all is the end of a prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Protocol

from shoal.core.kv.lookahead import LookAhead
from shoal.core.kv.prefix import Entry


class Order(Protocol):
    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Entry]:
        """All whose blocks are cached."""
        ...

    def add(self, entries: Sequence[Entry]) -> None:
        """Their blocks have just lost their last reference. They are of one prefix, its end first."""
        ...

    def found(self, entries: Sequence[Entry], cached: Sequence[Entry], beyond: Sequence[bytes]) -> None:
        """A prompt has found this prefix. The blocks of `cached`, its last ones, are referenced again. `beyond`: keys
        of the prompt's blocks behind it."""
        ...

    def remove(self, entries: Sequence[Entry]) -> None:
        """Their blocks are referenced again for a copy. They are of one prefix, its start first."""
        ...

    def pop(self) -> Entry:
        """The entry to give up now. KeyError where there is none."""
        ...


class LeastRecentlyUsed:
    def __init__(self, num_blocks: int) -> None:
        self._queue: OrderedDict[int, Entry] = OrderedDict()  # block -> entry; next to go first

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._queue.values())

    def add(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._queue[entry.block] = entry

    def found(self, entries: Sequence[Entry], cached: Sequence[Entry], beyond: Sequence[bytes]) -> None:
        self.remove(cached)

    def remove(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            del self._queue[entry.block]

    def pop(self) -> Entry:
        return self._queue.popitem(last=False)[1]


class S3Fifo:
    """As in the paper, but that a block leaves its queue while it is referenced and comes back at the queue's end, and
    that a block whose turn it is goes after all that hang on it."""

    SMALL_SHARE = 10  # the small queue has one of so many blocks
    MOST_USES = 3  # more are not counted
    KEPT_USES = 2  # with so many a block passes from the small queue to the main one

    def __init__(self, num_blocks: int) -> None:
        self._num_small = num_blocks // self.SMALL_SHARE
        self._num_ghosts = num_blocks - self._num_small
        self._small: OrderedDict[int, Entry] = OrderedDict()
        self._main: OrderedDict[int, Entry] = OrderedDict()
        self._of_main: set[Entry] = set()  # belong to the main queue, cached or referenced
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()  # given up by the small queue
        self._below: dict[Entry, dict[Entry, None]] = {}  # the cached ones that hang on each
        self._path: list[Entry] = []  # they go next, the last one first

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __iter__(self) -> Iterator[Entry]:
        return chain(self._small.values(), self._main.values())

    def add(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if entry.key in self._ghosts:
                del self._ghosts[entry.key]
                self._of_main.add(entry)
            self._queue_of(entry)[entry.block] = entry
            if isinstance(entry.parent, Entry):
                self._below.setdefault(entry.parent, {})[entry] = None
        self._path.clear()

    def found(self, entries: Sequence[Entry], cached: Sequence[Entry], beyond: Sequence[bytes]) -> None:
        for entry in entries:
            entry.uses = min(self.MOST_USES, entry.uses + 1)
        self.remove(cached)

    def remove(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._take_out(entry)
        self._path.clear()

    def pop(self) -> Entry:
        path = self._path or [self._next()]
        while below := self._below.get(path[-1]):
            path.append(next(iter(below)))
        entry = path.pop()
        self._path = path
        self._take_out(entry)
        if entry in self._of_main:
            self._of_main.discard(entry)
        else:
            self._ghosts[entry.key] = None
            if len(self._ghosts) > self._num_ghosts:
                self._ghosts.popitem(last=False)
        return entry

    def _next(self) -> Entry:
        """Whose turn it is, in the one queue or the other."""
        while self._small or self._main:
            if self._small and (len(self._small) >= self._num_small or not self._main):
                block, entry = next(iter(self._small.items()))
                if entry.uses < self.KEPT_USES:
                    return entry
                del self._small[block]
                self._main[block] = entry
                self._of_main.add(entry)
                entry.uses = 0
            else:
                block, entry = next(iter(self._main.items()))
                if not entry.uses:
                    return entry
                self._main.move_to_end(block)
                entry.uses -= 1
        raise KeyError("no block is cached")

    def _queue_of(self, entry: Entry) -> OrderedDict[int, Entry]:
        return self._main if entry in self._of_main else self._small

    def _take_out(self, entry: Entry) -> None:
        del self._queue_of(entry)[entry.block]
        if isinstance(entry.parent, Entry):
            below = self._below[entry.parent]
            del below[entry]
            if not below:
                del self._below[entry.parent]


ORDERS: dict[str, Callable[[int], Order]] = {  # by name; made for so many blocks
    "lru": LeastRecentlyUsed,
    "lookahead": LookAhead,
    "s3fifo": S3Fifo,
}
