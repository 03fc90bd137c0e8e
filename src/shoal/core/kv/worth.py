"""What keeping a cached block is worth: learned from which others came back, and when.

Two things tell what to expect of blocks that were released together:

    kind   how often their prefix was used, and whether anything that was released hangs on it: a prompt that nobody
           went on with is used again less often than a conversation of many turns or what many prompts begin with
    age    how many blocks were released since

For every kind and age it is counted how many blocks were used again, those that were given up meanwhile included. The
worth is the most uses for the blocks' time that keeping them on for some time can bring (Gittins' index; the hit
density of Beckmann et al., NSDI 2018, is the same for all of the time). Nothing about the load is assumed: where what
was used just now comes back first, the oldest are worth least, as lru has it; where everyone comes back after a pause
that is longer than blocks could be kept, some are worth being kept through it.
"""

from __future__ import annotations

from collections.abc import Sequence

POOL_UNITS = 64  # ages are counted in this part of the pool's blocks
NUM_AGES = 18  # two for each doubling: 0, 1, 2, 3, 4-5, 6-7, 8-11, ..., the last from 6 pools on
_WIDTHS = [1, 1] + [1 << max(0, age // 2 - 1) for age in range(2, NUM_AGES)]
NUM_USES, NUM_SHARED = 5, 7  # kinds of ends of prefixes, by doublings of their uses, and of what others hang on
NUM_KINDS = NUM_USES + NUM_SHARED
POOL_LESSONS = 16  # times that worths are computed while as many blocks as the pool has are released
LEAST_PAUSE = 64  # blocks between two of them
KEPT = 0.99  # of what was counted, at each of them
DOUBT = 1.0  # each kind is believed to be like all others until it has had so many blocks, in pools


def kind_of(uses: int, shared: bool) -> int:
    """`uses`: of the first of the blocks."""
    doublings = uses.bit_length()
    return NUM_USES + min(doublings, NUM_SHARED - 1) if shared else min(doublings, NUM_USES - 1)


class Worths:
    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._unit = max(1, num_blocks // POOL_UNITS)
        self._pause = max(LEAST_PAUSE, num_blocks // POOL_LESSONS) // NUM_AGES  # between two ticks
        self.now = 0  # blocks released so far
        self._next_tick = 0
        self._tick_age = 0
        self._num_released = [0.0] * NUM_KINDS  # blocks
        self._num_used = [[0.0] * NUM_AGES for _ in range(NUM_KINDS)]
        self.of = [[0.0] * NUM_AGES for _ in range(NUM_KINDS)]  # by kind and age
        self.least_first = [(0.0, kind, age) for age in range(NUM_AGES)[::-1] for kind in range(NUM_KINDS)]

    def age(self, since: int) -> int:
        units = (self.now - since) // self._unit
        bits = units.bit_length()
        return units if bits < 2 else min(NUM_AGES - 1, 2 * bits - 2 + (units >> bits - 2 & 1))

    def released(self, kind: int, count: int) -> None:
        self._num_released[kind] += count
        self.now += count

    def used(self, kind: int, since: int, count: int) -> None:
        """Of what was released then."""
        self._num_used[kind][self.age(since)] += count

    def tick(self) -> int | None:
        """When it is time for it: of which age the blocks should be looked at again, some of which are older now. It
        takes its turn with all ages, the highest first; worths have changed where it is 0. None: not yet."""
        if self.now < self._next_tick:
            return None
        self._next_tick += self._pause
        if not self._tick_age:
            self._learn()
        age, self._tick_age = self._tick_age, (self._tick_age or NUM_AGES - 1) - 1
        return age

    def _learn(self) -> None:
        used = [sum(column) for column in zip(*self._num_used, strict=True)]
        usual = _hazards(sum(self._num_released), used)
        doubt = DOUBT * self._num_blocks
        for kind, num_released in enumerate(self._num_released):
            if num_released:
                self.of[kind] = _worths(num_released, self._num_used[kind], usual, doubt)
                self._num_released[kind] *= KEPT
                self._num_used[kind] = [KEPT * count for count in self._num_used[kind]]
        self.least_first = sorted(
            [(worth, kind, age) for kind, worths in enumerate(self.of) for age, worth in enumerate(worths)]
        )


def _hazards(num_released: float, num_used: Sequence[float]) -> list[float]:
    """By age: of the blocks that came to it, the share used at it."""
    hazards, left = [], num_released
    for count in num_used:
        hazards.append(count / left if left > count else float(count > 0))
        left -= count
    return hazards


def _worths(num_released: float, num_used: Sequence[float], usual: Sequence[float], doubt: float) -> list[float]:
    """By age: the most uses per block and time, over all times for which a block of that age can be kept on. `doubt`
    blocks that fared as usual are taken for granted."""
    parts, left = [], num_released
    for count, hazard, width in zip(num_used, usual, _WIDTHS, strict=True):
        uses = count + doubt * hazard
        parts.append((uses, max(1e-9, left + doubt - uses / 2) * width))
        left, doubt = left - count, doubt * (1 - hazard)
    worths, ahead = [], list[tuple[float, float]]()
    for uses, time in reversed(parts):
        while ahead and ahead[-1][0] * time > uses * ahead[-1][1]:  # it pays to wait for what comes then
            more_uses, more_time = ahead.pop()
            uses, time = uses + more_uses, time + more_time
        ahead.append((uses, time))
        worths.append(uses / time)
    return worths[::-1]
