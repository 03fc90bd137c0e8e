"""Which block of the disk tier lies where, and which one makes room: the least recently used of those that no other
block continues, so that of a prefix the end goes before the start. Holds no bytes and does no input or output.

    slots   0 1 2 3 4 5 6 7 8        a place for one block in the file
            └─ given out ─┘ └ grow   lowest first, so the file grows only when nothing in it is free
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from shoal.core.plan import Held


class Entry:
    __slots__ = ("digest", "held", "live", "slot", "use")

    def __init__(self, held: Held, digest: bytes, slot: int, use: int) -> None:
        self.held = held
        self.digest = digest
        self.slot = slot
        self.use = use  # the greater, the later it was used last
        self.live = True  # False once its slot may hold something else


class DiskIndex:
    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._most = num_slots  # less while the disk has no room for more
        self._next = 0  # slots from here on were never given out
        self._free: list[int] = []  # heap of slots before it
        self._entries: dict[bytes, Entry] = {}
        self._num_children: dict[bytes, int] = {}  # key of a parent, here or not -> entries that continue it
        self._leaves: list[tuple[int, bytes]] = []  # heap of (use, key); what is out of date is passed over
        self._uses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def load(self, entries: list[Entry]) -> list[int]:
        """What an earlier run left, into an empty index. Of two with one key the later one is taken; returns the slots
        of the others."""
        assert not self._entries and self._next == 0
        by_key = {entry.held.key: entry for entry in sorted(entries, key=lambda entry: (entry.use, entry.slot))}
        taken = {entry.slot for entry in by_key.values()}
        self._next = max(taken, default=-1) + 1
        self._free = [slot for slot in range(self._next) if slot not in taken]
        for entry in by_key.values():
            self.add(entry)
        return [entry.slot for entry in entries if by_key[entry.held.key] is not entry]

    def new_use(self) -> int:
        self._uses += 1
        return self._uses

    def touch(self, entry: Entry) -> None:
        entry.use = self.new_use()
        self._offer(entry)

    def add(self, entry: Entry) -> None:
        """Its key is not in the index, and its slot was given out. Its token ids are forgotten: the record has them."""
        key, parent = entry.held.key, entry.held.parent
        assert key not in self._entries
        entry.held = entry.held._replace(tokens=())
        self._entries[key] = entry
        self._num_children[parent] = self._num_children.get(parent, 0) + 1
        self._uses = max(self._uses, entry.use)
        self._offer(entry)

    def remove(self, entry: Entry) -> None:
        """Its slot stays given out: whoever removes an entry writes to the slot next, or releases it."""
        entry.live = False
        del self._entries[entry.held.key]
        parent = entry.held.parent
        self._num_children[parent] -= 1
        if not self._num_children[parent]:
            del self._num_children[parent]
            if parent in self._entries:
                self._offer(self._entries[parent])

    def take_slot(self) -> tuple[int, Entry | None] | None:
        """A slot to write to, and the entry that makes room for it, which is removed. None: no slot can be had."""
        if self._free:
            return heapq.heappop(self._free), None
        if self._next < self._most:
            self._next += 1
            return self._next - 1, None
        victim = self._pop()
        if victim is None:
            return None
        self.remove(victim)
        return victim.slot, victim

    def release(self, slot: int) -> None:
        heapq.heappush(self._free, slot)

    def refuse(self, slot: int) -> bool:
        """The disk has no room for the slot. True: it is one the file would have grown by, and grows by no more now."""
        if slot != self._next - 1:
            self.release(slot)
            return False
        self._next = self._most = slot
        return True

    def grow(self) -> None:
        """The disk may have room again."""
        self._most = self.num_slots

    def _offer(self, entry: Entry) -> None:
        """Let it be a candidate at its place in the order, if it is a leaf."""
        if entry.held.key in self._num_children:
            return
        heapq.heappush(self._leaves, (entry.use, entry.held.key))
        if len(self._leaves) > 2 * len(self._entries) + 64:
            self._leaves = [(each.use, key) for key, each in self._entries.items() if key not in self._num_children]
            heapq.heapify(self._leaves)

    def _pop(self) -> Entry | None:
        while self._leaves:
            use, key = heapq.heappop(self._leaves)
            entry = self._entries.get(key)
            if entry is not None and entry.use == use and key not in self._num_children:
                return entry
        # only entries that are their own ancestors, which a damaged file might claim
        return min(self._entries.values(), key=lambda entry: entry.use, default=None)

    def check(self) -> None:
        """AssertionError where the parts contradict each other. For tests."""
        slots = [entry.slot for entry in self] + self._free
        assert len(slots) == len(set(slots)) and all(0 <= slot < self._next for slot in slots)
        assert self._next <= self._most <= self.num_slots
        children: dict[bytes, int] = {}
        for entry in self:
            assert entry.live
            children[entry.held.parent] = children.get(entry.held.parent, 0) + 1
        assert children == self._num_children
        offered = set(self._leaves)
        assert all((entry.use, key) in offered for key, entry in self._entries.items() if key not in children)
