"""The eviction order `lookahead`: first goes the block of which the fewest uses are expected for the time it is kept.

A run are blocks that one owner released together and that have the same past. Two things tell what to expect of it:

    kind   how often its prefix was used, and whether anything that was released hangs on it: a prompt that nobody went
           on with is used again less often than a conversation of many turns or what many prompts begin with
    age    how many blocks were released since it was

For every kind and age it is counted how many blocks were used again, those that were given up meanwhile included. The
worth of a run is the most uses for the blocks' time that keeping it on for some time can bring (Gittins' index; the
hit density of Beckmann et al., NSDI 2018, is the same for all of the time). Nothing about the load is assumed: where
what was used just now comes back first, the oldest go first, as with lru; where everyone comes back after a pause that
is longer than blocks could be kept, some are kept through it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

from shoal.core.kv.prefix import Entry

POOL_UNITS = 64  # ages are counted in this part of the pool's blocks
NUM_AGES = 18  # two for each doubling: 0, 1, 2, 3, 4-5, 6-7, 8-11, ..., the last from 6 pools on
_WIDTHS = [1, 1] + [1 << max(0, age // 2 - 1) for age in range(2, NUM_AGES)]
NUM_USES, NUM_SHARED = 5, 7  # kinds of ends of prefixes, by doublings of their uses, and of what others hang on
NUM_KINDS = NUM_USES + NUM_SHARED
POOL_LESSONS = 16  # times that worths are computed while as many blocks as the pool has are released
LEAST_PAUSE = 64  # blocks between two of them
KEPT = 0.99  # of what was counted, at each of them
DOUBT = 1.0  # each kind is believed to be like all others until it has had so many blocks, in pools
GHOSTS = 2  # pools of blocks that were given up are remembered
MARGIN = 1.25  # the oldest run goes unless it is worth so many times the least


class Run:
    __slots__ = ("age", "entries", "kind", "since")

    def __init__(self) -> None:
        self.kind = 0
        self.since = 0  # on the clock of released blocks
        self.age = 0  # in whose cell it is
        self.entries: deque[Entry] = deque()  # the end of the prefix first


class LookAhead:
    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._unit = max(1, num_blocks // POOL_UNITS)
        self._pause = max(LEAST_PAUSE, num_blocks // POOL_LESSONS)  # between two lessons
        self._size = 0
        self._now = 0  # blocks released so far
        self._next_lesson = self._pause
        self._cells: list[list[dict[Run, None]]] = [  # by kind and age, the oldest run first
            [{} for _ in range(NUM_AGES)] for _ in range(NUM_KINDS)
        ]
        self._least_first = [(0.0, kind, age) for age in range(NUM_AGES)[::-1] for kind in range(NUM_KINDS)]
        self._worths = [[0.0] * NUM_AGES for _ in range(NUM_KINDS)]
        self._victim: Run | None = None
        self._num_released = [0.0] * NUM_KINDS  # blocks
        self._num_used = [[0.0] * NUM_AGES for _ in range(NUM_KINDS)]
        self._ghosts: OrderedDict[bytes, tuple[int, int, int]] = OrderedDict()  # given up: kind, since, uses

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Entry]:
        return (entry for ages in self._cells for cell in ages for run in cell for entry in run.entries)

    # -- what happens to blocks ----------------------------------------------------------------------------------------

    def add(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        ghosts, last, runs = self._ghosts, -2, list[Run]()
        for entry in entries:
            uses = entry.uses
            if not uses and entry.key in ghosts:
                kind, since, uses = ghosts.pop(entry.key)
                entry.uses = uses = uses + 1
                self._num_used[kind][self._age(since)] += 1
            # Each turn of a conversation uses all turns before it: with more than that, others hang on the block too.
            if uses > last + 1:
                run = Run()
                runs.append(run)
            last = uses
            run.entries.append(entry)
            entry.run = run
        self._size += len(entries)
        for run in runs:
            self._start(run, run is not runs[0])
        if self._now >= self._next_lesson:
            self._next_lesson = self._now + self._pause
            self._grow_older()
            self._learn()

    def _start(self, run: Run, shared: bool) -> None:
        first = run.entries[-1]
        doublings = first.uses.bit_length()
        run.kind = NUM_USES + min(doublings, NUM_SHARED - 1) if shared else min(doublings, NUM_USES - 1)
        run.since = self._now
        self._cells[run.kind][0][run] = None
        self._num_released[run.kind] += len(run.entries)
        self._now += len(run.entries)
        if isinstance(first.parent, Entry):
            first.parent.num_below += 1

    def used(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            entry.uses += 1

    def remove(self, entries: Sequence[Entry], used: bool) -> None:
        place, end = 0, len(entries)
        while place < end:
            first = entries[place]
            run, begun = first.run, place
            assert run is not None and run.entries[-1] is first, f"block {first.block} is not the start of its run"
            take = run.entries.pop
            while place < end and entries[place].run is run:
                take().run = None
                place += 1
            self._size -= place - begun
            if used:
                self._num_used[run.kind][self._age(run.since)] += place - begun
            if isinstance(first.parent, Entry):
                first.parent.num_below -= 1
            if run.entries:
                entries[place - 1].num_below += 1
            else:
                del self._cells[run.kind][run.age][run]

    def pop(self) -> Entry:
        run = self._victim
        if run is None or not run.entries or run.entries[0].num_below:
            run = self._victim = self._least()
        entry = run.entries.popleft()
        entry.run = None
        self._size -= 1
        if not run.entries:
            del self._cells[run.kind][run.age][run]
            if isinstance(entry.parent, Entry):
                entry.parent.num_below -= 1
        ghosts = self._ghosts
        ghosts[entry.key] = run.kind, run.since, entry.uses
        if len(ghosts) > GHOSTS * self._num_blocks:
            ghosts.popitem(last=False)
        return entry

    # -- what to expect ------------------------------------------------------------------------------------------------

    def _least(self) -> Run:
        """Of the oldest of each cell at whose end nothing hangs, that of least worth."""
        oldest = self._oldest()
        enough = self._worths[oldest.kind][oldest.age] / MARGIN
        for worth, kind, age in self._least_first:
            if worth >= enough:
                break
            for run in self._cells[kind][age]:
                if not run.entries[0].num_below:
                    return run
                break
        return oldest

    def _oldest(self) -> Run:
        """Nothing hangs on it, or that would be older still."""
        found: list[Run] = []
        for ages in self._cells:
            for cell in reversed(ages):
                if cell:
                    found.append(next(iter(cell)))
                    break
        if not found:
            raise KeyError("no block is cached")
        return min(found, key=lambda run: run.since)

    def _age(self, since: int) -> int:
        units = (self._now - since) // self._unit
        bits = units.bit_length()
        return units if bits < 2 else min(NUM_AGES - 1, 2 * bits - 2 + (units >> bits - 2 & 1))

    def _grow_older(self) -> None:
        for ages in self._cells:
            for age in range(NUM_AGES - 2, -1, -1):
                cell = ages[age]
                while cell:
                    run = next(iter(cell))
                    now = self._age(run.since)
                    if now == age:
                        break
                    del cell[run]
                    run.age = now
                    ages[now][run] = None

    def _learn(self) -> None:
        used = [sum(column) for column in zip(*self._num_used, strict=True)]
        usual = _hazards(sum(self._num_released), used)
        for kind in range(NUM_KINDS):
            if not self._num_released[kind]:
                continue
            self._worths[kind] = _worths(
                self._num_released[kind], self._num_used[kind], usual, DOUBT * self._num_blocks
            )
            self._num_released[kind] *= KEPT
            self._num_used[kind] = [KEPT * count for count in self._num_used[kind]]
        self._least_first = sorted(
            [(worth, kind, age) for kind, worths in enumerate(self._worths) for age, worth in enumerate(worths)]
        )
        self._victim = None


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
