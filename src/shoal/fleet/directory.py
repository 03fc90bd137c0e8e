"""Which replica holds which prefix blocks, as far as they have told: hints for the router, never the truth.

A block is known by the first 64 bits of its key; whoever reads KV compares whole keys. Entries lie in flat arrays (23
bytes each, 8 more in the table that finds them), since two million Python objects would be four times as much, and the
garbage collector would walk through them.

    slot      key   parent   children   holders   hit          the parent of a prompt's first block is slot 0
    table     hash of a key -> slot, open addressing           (Knuth, The Art of Computer Programming, vol. 3, 6.4)

Entries form a tree, and only leaves are given up. Where it is full, a hand goes round and takes the first leaf that no
lookup has found since it came by last (Corbató's clock), the ends of prefixes before their beginnings.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import unpack
from typing import NamedTuple

from shoal.core.kv.hashing import KEY_BYTES, NO_KEY
from shoal.core.kv.news import DEVICE, TIERS
from shoal.fleet.holders import NOBODY, SET_BYTES, HolderSets, Masks

MAX_ENTRIES = 2_000_000
_LOOKS = 256  # leaves and others that the hand looks at for one new entry
_RUN = 4096  # the hand goes through so many neighbours from the last to the first: prefixes lie there in order


class Held(NamedTuple):
    """How many leading blocks of a prompt a replica has in this tier or a faster one."""

    device: int
    host: int
    disk: int

    @property
    def blocks(self) -> int:
        """In any tier."""
        return self.disk


class Directory:
    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self.num_given_up = 0  # entries that made place for others
        self.num_left_out = 0  # blocks told of that could not be entered: the one before is unknown, or all is full
        self._max_entries = max_entries
        self._mask = (1 << (2 * max_entries).bit_length()) - 1
        self._table = array("I", bytes(4 * (self._mask + 1)))
        self._keys = array("Q", [0])
        self._parents = array("I", [0])
        self._children = array("I", [0])
        self._holders = array("H", [0])
        self._hit = bytearray(1)
        self._free = array("I")
        self._sets = HolderSets()
        self._bits: dict[str, int] = {}  # replica -> its bit in the masks
        self._names: dict[int, str] = {}  # and back
        self._run = min(_RUN, 1 << max_entries.bit_length() - 1) - 1
        self._hand = 0
        self._untidy = 0  # slots below this may hold entries that a lost replica left behind

    # -- what it knows -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Entries, those included that a lost replica left behind."""
        return len(self._keys) - 1 - len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks that somebody holds."""
        return len(self) - self._sets.num_uses_of_nobody()

    @property
    def num_bytes(self) -> int:
        """Of memory."""
        columns = (self._table, self._keys, self._parents, self._children, self._holders, self._hit, self._free)
        return sum(column.__sizeof__() for column in columns) + SET_BYTES * len(self._sets.masks)

    def holders(self, chain: Sequence[bytes]) -> dict[str, Held]:
        """`chain`: keys of a prompt's blocks from the first on. Only replicas that hold the first one."""
        table, keys, mask = self._table, self._keys, self._mask
        holders, masks = self._holders, self._sets.masks
        walk, before, last = _Walk(), -1, 0
        for depth, key in enumerate(_hints(b"".join(chain))):
            place = key & mask
            slot = table[place]
            while slot and keys[slot] != key:
                place = (place + 1) & mask
                slot = table[place]
            number = holders[slot]
            if number != before:
                if not walk.step(masks[number], depth):
                    break
                before = number
            last = slot
        else:
            walk.step(NOBODY, len(chain))
        self._hit[last] = 1
        return {self._names[bit]: walk.held(bit) for bit in walk.depths[-1]}

    # -- what it is told -----------------------------------------------------------------------------------------------

    def tell(self, replica: str, keys: bytes, parents: bytes, tiers: bytes) -> None:
        """The replica holds each of these blocks in these tiers (bits, core.kv.news) and in no others; 0: in none.

        `keys`, `parents`: whole keys, one after the other; NO_KEY where a block is a prompt's first. A parent comes
        before its children. ValueError where the lengths do not fit.
        """
        if not len(keys) == len(parents) == KEY_BYTES * len(tiers) or max(tiers, default=0) > sum(TIERS):
            raise ValueError(f"{len(keys)} bytes of keys, {len(parents)} of parents, {len(tiers)} blocks")
        bit = self._bit(replica)
        changed, holders = self._sets.changed, self._holders
        previous, slot = 0, 0
        for key, parent, where in zip(_hints(keys), _hints(parents), tiers, strict=True):
            # A prompt's blocks come in a row: the one before is mostly the parent.
            before = 0 if not parent else slot if slot and parent == previous else self._find(parent)
            slot = self._find(key)
            if not slot and where:
                slot = self._enter(key, before) if before or not parent else 0
                if not slot:
                    self.num_left_out += 1
            previous = key
            if slot:
                holders[slot] = changed(holders[slot], bit, where)
                if not self._sets.anywhere[holders[slot]]:
                    self._prune(slot)
                    slot = 0

    def sent(self, replica: str, chain: Sequence[bytes]) -> None:
        """A prompt went to a replica that does not tell what it stores: it will hold its blocks, one may guess."""
        parents = (NO_KEY, *chain[:-1])[: len(chain)]
        self.tell(replica, b"".join(chain), b"".join(parents), bytes([DEVICE]) * len(chain))

    def forget(self, replica: str) -> None:
        """It is gone, or holds something else now. Takes a look at each set of holders, of which there are 65,536 at
        most; what nobody holds any more keeps its place until `tidy` comes by."""
        bit = self._bits.pop(replica, 0)
        if bit:
            del self._names[bit]
            self._sets.clear(bit)
            self._untidy = len(self._keys)

    def tidy(self, num_slots: int = 4000) -> None:
        """Frees, among so many slots, those that nobody holds and nothing depends on. To be called now and then."""
        end = max(self._untidy - num_slots, 1)
        for slot in range(self._untidy - 1, end - 1, -1):
            self._prune(slot)
        self._untidy = end if end > 1 else 0

    # -- inside --------------------------------------------------------------------------------------------------------

    def _bit(self, replica: str) -> int:
        bit = self._bits.get(replica)
        if bit is None:
            taken = sum(self._bits.values())
            bit = self._bits[replica] = ~taken & (taken + 1)  # the lowest that is free
            self._names[bit] = replica
        return bit

    def _find(self, key: int) -> int:
        """Slot of a key; 0 where there is none."""
        table, keys, mask = self._table, self._keys, self._mask
        place = key & mask
        slot = table[place]
        while slot and keys[slot] != key:
            place = (place + 1) & mask
            slot = table[place]
        return slot

    def _enter(self, key: int, parent: int) -> int:
        """A slot for a key that has none, held by nobody yet; 0 where there is no room."""
        self._children[parent] += 1  # first, so that the parent is not what makes room
        slot = self._take_slot()
        if not slot:
            self._children[parent] -= 1
            return 0
        self._keys[slot], self._parents[slot], self._hit[slot] = key, parent, 0
        self._children[slot] = 0
        self._holders[slot] = self._sets.use_nobody()
        place = key & self._mask
        while self._table[place]:
            place = (place + 1) & self._mask
        self._table[place] = slot
        return slot

    def _take_slot(self) -> int:
        if not self._free and len(self._keys) > self._max_entries:
            self._make_room()
        if self._free:
            return self._free.pop()
        if len(self._keys) > self._max_entries:
            return 0
        for column in (self._keys, self._parents, self._children, self._holders, self._hit):
            column.append(0)
        return len(self._keys) - 1

    def _make_room(self) -> None:
        """Gives one leaf up. After _LOOKS slots it lets it be: a hint is lost, and the next call goes on from here."""
        end = (len(self._keys) | self._run) + 1
        for _ in range(_LOOKS):
            slot = self._hand ^ self._run
            self._hand = (self._hand + 1) % end
            if not 0 < slot < len(self._keys) or self._children[slot]:
                continue
            if self._hit[slot] and self._sets.anywhere[self._holders[slot]]:
                self._hit[slot] = 0
                continue
            self._prune(self._remove(slot))
            self.num_given_up += 1
            return

    def _prune(self, slot: int) -> None:
        """Removes an entry that nobody holds and nothing depends on, and those before it that it leaves like that."""
        anywhere, holders, children, table = self._sets.anywhere, self._holders, self._children, self._table
        while slot and not children[slot] and not anywhere[holders[slot]] and table[self._place(slot)] == slot:
            slot = self._remove(slot)

    def _remove(self, slot: int) -> int:
        """Its parent."""
        self._unlink(self._place(slot))
        self._sets.release(self._holders[slot])
        parent = self._parents[slot]
        self._children[parent] -= 1
        self._free.append(slot)
        return parent

    def _place(self, slot: int) -> int:
        """Where the table names the slot; an empty place where it does not."""
        table, mask = self._table, self._mask
        place = self._keys[slot] & mask
        while table[place] and table[place] != slot:
            place = (place + 1) & mask
        return place

    def _unlink(self, hole: int) -> None:
        """Empties a place of the table. Whatever was pushed beyond it moves up, so that lookups need no tombstones."""
        table, keys, mask = self._table, self._keys, self._mask
        place = (hole + 1) & mask
        while table[place]:
            home = keys[table[place]] & mask
            if (place - home) & mask >= (place - hole) & mask:
                table[hole] = table[place]
                hole = place
            place = (place + 1) & mask
        table[hole] = 0


class _Walk:
    """Down a chain: who holds everything so far, in each tier or a faster one, and how far the others came."""

    def __init__(self) -> None:
        self._still = [0, 0, 0]
        self.depths: tuple[dict[int, int], ...] = ({}, {}, {})  # bit -> blocks, of those that came to their end

    def step(self, masks: Masks, depth: int) -> bool:
        """The block at this depth is held so. False: nobody goes on."""
        here = 0
        for tier, mask in enumerate(masks):
            here |= mask
            if not depth:
                self._still[tier] = here
                continue
            ended = self._still[tier] & ~here
            self._still[tier] &= here
            while ended:
                bit = ended & -ended
                self.depths[tier][bit] = depth
                ended ^= bit
        return self._still[-1] != 0

    def held(self, bit: int) -> Held:
        on_device, in_host, on_disk = [depths.get(bit, 0) for depths in self.depths]
        return Held(on_device, in_host, on_disk)


def _hints(keys: bytes) -> tuple[int, ...]:
    """The first half of each key."""
    return unpack(f"<{len(keys) // 8}Q", keys)[::2]
