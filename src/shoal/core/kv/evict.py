"""Which cached block is given up first: the least recently used one, and of a prefix always its end before its start.

The order needs no tree walk. A table of blocks is released from its end, and whoever holds a block holds all blocks
before it, so an entry always stands behind its children in the queue: its front is a leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from shoal.core.kv.prefix import Entry


class LeastRecentlyUsed:
    def __init__(self) -> None:
        self._queue: OrderedDict[int, Entry] = OrderedDict()  # block -> entry; next to go first

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._queue.values())

    def add(self, entry: Entry) -> None:
        """Its block has just lost its last reference."""
        self._queue[entry.block] = entry

    def remove(self, entry: Entry) -> None:
        """Its block is referenced again."""
        del self._queue[entry.block]

    def pop(self) -> Entry:
        """The entry to give up now. KeyError where there is none."""
        return self._queue.popitem(last=False)[1]
