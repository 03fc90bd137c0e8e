"""The eviction order `lookahead`: lru, until giving up what is worth least (worth.py) is clearly better.

It remembers what the pool would hold if it had always gone by age, as lru does, and what it would hold if it had always
gone by worth: of both the keys only. What a prompt finds more in one of the two is evidence. The pool goes by worth
while the evidence for it is more than chance would bring, and by age otherwise: exactly as lru as long as worth was
never clearly ahead. When it changes over it keeps what it holds, and only the next victims are others.

A run are blocks that one owner released together and that have the same past. Of a run the end goes first, and prompts
use its start; so the three pools differ only in how many blocks at its end they have given up:

    its end   0 .. gone   given up     gone .. left   held     left ..   referenced again   its start
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from math import sqrt

from shoal.core.kv.prefix import Entry
from shoal.core.kv.worth import KEPT, NUM_AGES, NUM_KINDS, Worths, kind_of

REMEMBERED = 3  # blocks that were given up are remembered until so many pools were released after they were
MARGIN = 1.25  # by worth, too, the oldest run goes unless it is worth so many times the least
CLEAR = 2.25  # standard deviations that worth must be ahead,
ENOUGH = 0.1  # and this part of what is found by age
REAL, BY_AGE, BY_WORTH = range(3)  # the pool, and those that it could be


class Run:
    __slots__ = ("above", "age", "entries", "gone", "keys", "kind", "left", "since")

    def __init__(self) -> None:
        self.kind = 0
        self.since = 0  # on the clock of released blocks
        self.age = [0, 0, 0]  # in whose cell it is, by pool
        self.entries: list[Entry] = []  # that the real pool holds; the start of the prefix first
        self.keys: list[bytes] = []  # of all its blocks, the end of the prefix first
        self.above = b""  # key of the block before those that are left
        self.gone = [0, 0, 0]  # blocks, by pool
        self.left = 0


class Held:
    """What one of the pools holds: its runs, the oldest first. By age, the first one goes first."""

    def __init__(self, pool: int) -> None:
        self.pool = pool
        self.size = 0  # blocks
        self.runs: OrderedDict[Run, None] = OrderedDict()
        self.victim: Run | None = None
        self.num_next = 0  # blocks at its end that go next

    def add(self, run: Run) -> None:
        self.size += run.left
        self.runs[run] = None

    def drop(self, run: Run) -> None:
        """Nothing of it is held any more."""
        del self.runs[run]

    def take(self, run: Run, left: int) -> int:
        """How many blocks it held of those that are referenced again: all but the run's last `left`."""
        gone = run.gone[self.pool]
        count = run.left - max(left, gone)
        if count <= 0:
            return 0
        self.size -= count
        if run is self.victim:
            self.num_next = 0
        if left <= gone:
            self.drop(run)
        else:
            self.hang(run, run.keys[left])
        return count

    def hang(self, run: Run, above: bytes) -> None:
        """On this block from now on."""

    def shrink(self, size: int) -> None:
        """Gives up all above `size` blocks."""
        while self.size > size:
            if not self.num_next:
                self.choose()
            run = self.victim
            assert run is not None
            count = min(self.num_next, self.size - size)
            self.num_next -= count
            self.size -= count
            gone = run.gone[self.pool] = run.gone[self.pool] + count
            if gone == run.left:
                self.drop(run)

    def choose(self) -> None:
        """The next victim. On the end of the oldest of all nothing hangs, or that would be older still."""
        run = self.victim = next(iter(self.runs))
        self.num_next = run.left - run.gone[self.pool]


class HeldByWorth(Held):
    def __init__(self, pool: int, worths: Worths) -> None:
        super().__init__(pool)
        self._worths = worths
        self._cells: list[list[OrderedDict[Run, None]]] = [  # by kind and age, the oldest run first
            [OrderedDict() for _ in range(NUM_AGES)] for _ in range(NUM_KINDS)
        ]
        self._below: dict[bytes, int] = {}  # runs that hang on a block

    def add(self, run: Run) -> None:
        super().add(run)
        self._cells[run.kind][0][run] = None
        self._below[run.above] = self._below.get(run.above, 0) + 1

    def drop(self, run: Run) -> None:
        super().drop(run)
        del self._cells[run.kind][run.age[self.pool]][run]
        self._unhang(run)

    def hang(self, run: Run, above: bytes) -> None:
        self._unhang(run)
        self._below[above] = self._below.get(above, 0) + 1

    def _unhang(self, run: Run) -> None:
        left = self._below[run.above] = self._below[run.above] - 1
        if not left:
            del self._below[run.above]

    def choose(self) -> None:
        run = self.victim = self._least()
        keys, below, gone = run.keys, self._below, run.gone[self.pool]
        end = gone + 1
        while end < run.left and keys[end] not in below:
            end += 1
        self.num_next = end - gone

    def _least(self) -> Run:
        """Of the oldest of each cell on whose end nothing hangs, that of least worth."""
        oldest = next(iter(self.runs))
        enough = self._worths.of[oldest.kind][oldest.age[self.pool]] / MARGIN
        for worth, kind, age in self._worths.least_first:
            if worth >= enough:
                break
            for run in self._cells[kind][age]:
                if run.keys[run.gone[self.pool]] not in self._below:
                    return run
                break
        return oldest

    def grow_older(self, age: int) -> None:
        """Those whose age was this."""
        for ages in self._cells:
            cell = ages[age]
            while cell:
                run = next(iter(cell))
                now = self._worths.age(run.since)
                if now == age:
                    break
                del cell[run]
                run.age[self.pool] = now
                ages[now][run] = None


class LookAhead:
    def __init__(self, num_blocks: int) -> None:
        self.by_worth = False  # how the pool goes
        self._found = 0.0  # cached blocks that prompts would have found by age
        self._ahead = 0.0  # and so many more by worth
        self._noise = 0.0  # the squares of what each of them would have found more or less, added up
        self._memory = REMEMBERED * num_blocks
        self._worths = Worths(num_blocks)
        self._pool = HeldByWorth(REAL, self._worths)
        self._if_by_age = Held(BY_AGE)
        self._if_by_worth = HeldByWorth(BY_WORTH, self._worths)
        self._room = -1  # blocks cached when the last one was given up, which the other pools have to follow; -1: none
        self._ghosts: dict[bytes, tuple[Run, int, int]] = {}  # given up: run, place in it, uses
        self._released: deque[Run] = deque()  # in order, as far as they are remembered

    def __len__(self) -> int:
        return self._pool.size

    def __iter__(self) -> Iterator[Entry]:
        return (entry for run in self._pool.runs for entry in run.entries)

    def add(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        self._follow()
        ghosts, worths, last, runs = self._ghosts, self._worths, -2, list[Run]()
        for entry in entries:
            uses = entry.uses
            if entry.key in ghosts:
                old, place, uses_before = ghosts.pop(entry.key)
                if place < old.left and not old.entries:
                    worths.used(old.kind, old.since, old.left - place)
                    self._take(old, place)
                entry.uses = uses = uses_before + 1 + uses
            # Each turn of a conversation uses all turns before it: with more than that, others hang on the block too.
            if uses > last + 1:
                run = Run()
                runs.append(run)
                of_run = run.entries
            last = uses
            of_run.append(entry)
            entry.run = run
        for run in runs:
            self._start(run, run is not runs[0])
        self._forget()
        while (age := worths.tick()) is not None:
            self._pool.grow_older(age)
            self._if_by_worth.grow_older(age)
            if not age:
                self._pool.num_next = self._if_by_worth.num_next = 0
                self._found *= KEPT
                self._ahead *= KEPT
                self._noise *= KEPT

    def _start(self, run: Run, shared: bool) -> None:
        first = run.entries[-1]
        run.kind = kind_of(first.uses, shared)
        run.since = self._worths.now
        run.left = len(run.entries)
        run.keys = [entry.key for entry in run.entries]
        run.above = first.parent.key if isinstance(first.parent, Entry) else first.parent
        self._pool.add(run)
        self._if_by_age.add(run)
        self._if_by_worth.add(run)
        self._worths.released(run.kind, run.left)
        self._released.append(run)
        run.entries.reverse()

    def _forget(self) -> None:
        first, runs, ghosts = self._worths.now - self._memory, self._released, self._ghosts
        while runs[0].since <= first:
            run = runs.popleft()
            for key in run.keys[: run.gone[REAL]]:
                if key in ghosts and ghosts[key][0] is run:
                    del ghosts[key]

    def found(self, entries: Sequence[Entry], cached: Sequence[Entry], beyond: Sequence[bytes]) -> None:
        for entry in entries:
            entry.uses += 1
        self._follow()
        num_by_age = num_by_worth = 0
        go_on_by_age = go_on_by_worth = True
        for run, left in self._leave(cached) + self._given_up(beyond):
            count = run.left - left
            self._worths.used(run.kind, run.since, count)
            by_age, by_worth = self._take(run, left)
            if go_on_by_age:
                num_by_age += by_age
                go_on_by_age = by_age == count
            if go_on_by_worth:
                num_by_worth += by_worth
                go_on_by_worth = by_worth == count
        if num_by_age or num_by_worth:
            self._compare(num_by_age, num_by_worth)

    def remove(self, entries: Sequence[Entry]) -> None:
        self._follow()
        for run, left in self._leave(entries):
            self._take(run, left)

    def pop(self) -> Entry:
        real = self._pool
        if not real.num_next:
            if not real.size:
                raise KeyError("no block is cached")
            if self.by_worth:
                real.choose()
            else:
                Held.choose(real)
        run = real.victim
        assert run is not None
        entry = run.entries.pop()
        gone = run.gone[REAL]
        if run.since > self._worths.now - self._memory:
            self._ghosts[entry.key] = run, gone, entry.uses
        run.gone[REAL] = gone + 1
        real.num_next -= 1
        real.size -= 1
        if not run.entries:
            real.drop(run)
        self._room = real.size
        return entry

    # -- the runs of a prefix ------------------------------------------------------------------------------------------

    def _leave(self, entries: Sequence[Entry]) -> list[tuple[Run, int]]:
        """The real pool's entries, the start of the prefix first, leave their runs; how much is left of each."""
        taken, place, end = list[tuple[Run, int]](), 0, len(entries)
        while place < end:
            first, begun = entries[place], place
            run = first.run
            assert run is not None and run.entries[0] is first, f"block {first.block} is not the start of its run"
            while place < end and entries[place].run is run:
                place += 1
            del run.entries[: place - begun]
            taken.append((run, run.left - (place - begun)))
        return taken

    def _given_up(self, keys: Sequence[bytes]) -> list[tuple[Run, int]]:
        """The same for a prefix, as far as it is remembered, of which the real pool holds nothing."""
        ends: dict[Run, int] = {}
        for key in keys:
            ghost = self._ghosts.get(key)
            if ghost is None:
                break
            run, place, _ = ghost
            if place >= run.left or run.entries:  # another prefix, of which this one has a key
                break
            ends[run] = place
        return list(ends.items())

    def _take(self, run: Run, left: int) -> tuple[int, int]:
        """All but the run's last `left` blocks are referenced again. How many would be held by age, and by worth."""
        self._pool.take(run, left)
        would = self._if_by_age.take(run, left), self._if_by_worth.take(run, left)
        run.left, run.above = left, run.keys[left]
        return would

    # -- by age or by worth --------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """The other two pools have room for as many blocks as the real one."""
        if self._room >= 0:
            self._if_by_age.shrink(self._room)
            self._if_by_worth.shrink(self._room)
            self._room = -1

    def _compare(self, num_by_age: int, num_by_worth: int) -> None:
        """A prompt would have found so many cached blocks. If only chance decided which way each difference goes, their
        sum would spread like the root of the noise."""
        more = num_by_worth - num_by_age
        self._found += num_by_age
        self._ahead += more
        self._noise += more * more
        by_worth = self._ahead > (0.0 if self.by_worth else max(CLEAR * sqrt(self._noise), ENOUGH * self._found))
        if by_worth != self.by_worth:
            self.by_worth = by_worth
            self._pool.num_next = 0
