"""Every combination of replicas and tiers that some block is held in: kept once, named by a small number.

Thousands of blocks have the same holders, so the directory keeps two bytes a block for them, and a replica is taken out
of all blocks at once by taking it out of the combinations.
"""

from __future__ import annotations

MAX_SETS = 1 << 16  # their numbers have two bytes in the directory
SET_BYTES = 400  # about what one takes, for up to some hundred replicas

Masks = tuple[int, int, int]  # bit r: replica r holds the block on the device, in the host tier, on disk
NOBODY: Masks = (0, 0, 0)


class HolderSets:
    """Counts who uses which; set 0 is nobody and always there."""

    def __init__(self) -> None:
        self.masks: list[Masks] = [NOBODY]
        self.anywhere: list[int] = [0]  # the three of a set in one
        self._uses = [0]
        self._ids = {NOBODY: 0}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self.masks) - len(self._free)

    def changed(self, old: int, bit: int, tiers: int) -> int:
        """The set that differs from `old` in that the replica holds the block in `tiers` (bits, core.kv.news) alone.
        One use goes from the old to the new; where there is no room for one more set, nothing changes."""
        on_device, in_host, on_disk = self.masks[old]
        new = (
            on_device | bit if tiers & 1 else on_device & ~bit,
            in_host | bit if tiers & 2 else in_host & ~bit,
            on_disk | bit if tiers & 4 else on_disk & ~bit,
        )
        number = self._ids.get(new)
        if number is None:
            number = self._make(new)
            if number is None:
                return old
        if number != old:
            self._uses[number] += 1
            self.release(old)
        return number

    def release(self, number: int) -> None:
        """One use less."""
        self._uses[number] -= 1
        if not self._uses[number] and number:
            if self._ids.get(self.masks[number]) == number:
                del self._ids[self.masks[number]]
            self.masks[number], self.anywhere[number] = NOBODY, 0
            self._free.append(number)

    def use_nobody(self) -> int:
        """One use more of set 0, which a new block begins with."""
        self._uses[0] += 1
        return 0

    def clear(self, bit: int) -> None:
        """Takes a replica out of all sets. Two that are equal afterwards stay two until their users go."""
        keep = ~bit
        self._ids = {NOBODY: 0}
        for number, (on_device, in_host, on_disk) in enumerate(self.masks):
            if number and self._uses[number]:
                left = (on_device & keep, in_host & keep, on_disk & keep)
                self.masks[number] = left
                self.anywhere[number] &= keep
                self._ids.setdefault(left, number)

    def num_uses_of_nobody(self) -> int:
        return sum([uses for uses, bits in zip(self._uses, self.anywhere, strict=True) if not bits])

    def _make(self, masks: Masks) -> int | None:
        if self._free:
            number = self._free.pop()
        elif len(self.masks) < MAX_SETS:
            number = len(self.masks)
            self.masks.append(NOBODY)
            self.anywhere.append(0)
            self._uses.append(0)
        else:
            return None
        self.masks[number] = masks
        self.anywhere[number] = masks[0] | masks[1] | masks[2]
        self._ids[masks] = number
        return number
