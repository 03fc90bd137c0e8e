"""The orders of eviction: what holds for each of them, and what each of them is for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import pytest

from shoal.core.kv import worth
from shoal.core.kv.blocks import BlockPool
from shoal.core.kv.evict import ORDERS, LeastRecentlyUsed, Order, S3Fifo
from shoal.core.kv.lookahead import LookAhead
from shoal.core.kv.prefix import Chain, Entry, PrefixIndex
from shoal.core.kv.worth import Worths


class Pool:
    """A block pool with blocks of one token, whose owners come and go."""

    def __init__(self, num_blocks: int, make: Callable[[int], Order]) -> None:
        self.index = PrefixIndex(1)
        self.order = make(num_blocks)
        self.pool = BlockPool(num_blocks, self.index, self.order)

    def enter(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """The table of one more owner, and how many of its blocks were found."""
        links = Chain(b"s")
        hits = self.index.match(links, list(tokens), len(tokens))
        count = len(hits)
        table = self.pool.acquire(hits, links.beyond_hits(list(tokens), 1, len(tokens)))
        table += self.pool.allocate(len(tokens) - count)
        links.adopt(hits)
        self.index.extend(links, list(tokens), table, len(tokens))
        return table, count

    def serve(self, tokens: Sequence[int]) -> int:
        """One that comes and goes; how many of its blocks were found."""
        table, count = self.enter(tokens)
        self.pool.release(table)
        return count


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", ORDERS)
def test_of_a_prefix_the_end_goes_before_the_start_and_only_what_nobody_holds(name: str, seed: int) -> None:
    chance = random.Random(seed)
    world = Pool(chance.choice((8, 20, 60)), ORDERS[name])
    pool, order = world.pool, world.order
    tables: list[list[int]] = []
    pop, popped = order.pop, list[Entry]()

    def watched() -> Entry:
        entry = pop()
        popped.append(entry)
        assert all(entry.block not in table for table in tables), "its block is held"
        assert all(other.parent is not entry for other in world.index), "something hangs on it"
        return entry

    order.pop = watched  # type: ignore[method-assign]
    for _ in range(300):
        if tables and chance.random() < 0.5:
            pool.release(tables.pop(chance.randrange(len(tables))))
        tokens = [chance.choice((0, 0, 1)) for _ in range(chance.randrange(1, 8))]
        if len(tokens) <= pool.num_available:  # at most: hits that are cached count twice
            table, _ = world.enter(tokens)
            tables.append(table)
        if tables and chance.random() < 0.2:
            prefix = [entry for entry in map(world.index.at, chance.choice(tables)) if entry is not None]
            tables.append(pool.acquire(prefix))
        pool.check(tables)
        assert len(order) == len(list(order)) == pool.num_cached
    for table in tables:
        pool.release(table)
    num_left = pool.num_cached
    del tables[:], popped[:]
    pool.allocate(pool.num_available)
    assert len(popped) == num_left == len({entry.block for entry in popped})
    with pytest.raises(KeyError):
        order.pop()


def one_off(number: int, length: int = 4) -> list[int]:
    return [1000 + number, *range(100_000, 100_000 + length - 1)]


def random_load(seed: int, worlds: Sequence[Pool], num: int) -> Iterator[list[int]]:
    """Conversations that share beginnings, go on or do not, several at a time; the hits of each turn in the worlds."""
    chance = random.Random(seed)
    histories, running = list[list[int]](), list[list[list[int]]]()
    numbers = count(1000)
    for _ in range(num):
        if (running and chance.random() < 0.5) or len(running) > 2:
            tables = running.pop(chance.randrange(len(running)))
            for world, table in zip(worlds, tables, strict=True):
                world.pool.release(table)
        if histories and chance.random() < 0.6:
            place = int(chance.random() ** 2 * len(histories))
            history = histories.pop(-1 - place)
        else:
            history = [chance.randrange(3)] * chance.randrange(3)
        history += [next(numbers) for _ in range(chance.randrange(1, 8))]
        histories = [*histories[-40:], history]
        if len(history) > 30:
            histories.pop()
        entered = [world.enter(history) for world in worlds]
        running.append([table for table, _ in entered])
        yield [hits for _, hits in entered]


@pytest.mark.parametrize("seed", range(10))
def test_until_worth_is_clearly_ahead_lookahead_is_lru(seed: int) -> None:
    lru, world = worlds = [Pool(130, make) for make in (LeastRecentlyUsed, LookAhead)]
    num_hits = num_steps = 0
    for hits in random_load(seed, worlds, 1500):
        if world.order.by_worth:  # type: ignore[attr-defined]
            break
        num_hits, num_steps = num_hits + hits[0], num_steps + 1
        assert hits[0] == hits[1]
        assert {entry.key for entry in lru.index} == {entry.key for entry in world.index}
    assert num_steps > 100 and num_hits > 500


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.interpreted
def test_whatever_it_does_it_knows_what_lru_would_have_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lru, world = worlds = [Pool(130, make) for make in (LeastRecentlyUsed, LookAhead)]
    order = world.order
    assert isinstance(order, LookAhead)
    order.by_worth = True
    more = list[int]()
    monkeypatch.setattr(order, "_compare", lambda by_age, by_worth: more.append(by_worth - by_age))
    differences = 0
    for by_age, by_worth in random_load(seed, worlds, 1500):
        order._follow()
        assert order._if_by_age.size == lru.pool.num_cached
        assert order._if_by_worth.size == world.pool.num_cached
        assert sum(more) == by_worth - by_age
        more.clear()
        differences += by_age != by_worth
    assert differences > 50


def hits_in_a_scan(make: Callable[[int], Order]) -> int:
    """Four prompts of eight blocks are asked for in turn, with sixteen one-offs of four between two of them: twice as
    much between two uses of one as the pool of 128 has."""
    world = Pool(128, make)
    found = []
    for turn in range(160):
        found.append(world.serve([turn % 4] * 8))
        for number in range(16):
            world.serve(one_off(16 * turn + number))
    return sum(found[80:])


def test_lookahead_keeps_what_comes_back_and_not_what_passes() -> None:
    assert hits_in_a_scan(LeastRecentlyUsed) == 0
    assert hits_in_a_scan(LookAhead) >= 0.9 * 80 * 8


def hits_in_a_loop(make: Callable[[int], Order]) -> int:
    """Twenty prompts of eight blocks in turn, into a pool of 88: the one that is given up as the oldest comes next."""
    world = Pool(88, make)
    return sum([world.serve([turn % 20] * 8) for turn in range(400)][200:])


def test_lookahead_keeps_some_through_a_pause_that_is_too_long_for_all() -> None:
    assert hits_in_a_loop(LeastRecentlyUsed) == 0
    assert hits_in_a_loop(LookAhead) >= 0.2 * 200 * 8


@pytest.mark.parametrize("seed", range(6))
def test_when_what_lookahead_found_more_is_lost_again_it_goes_back_to_lru(seed: int) -> None:
    """A loop that is too long for the pool until it goes by worth; then what was used last comes back first."""
    world = Pool(128, LookAhead)
    order = world.order
    assert isinstance(order, LookAhead)
    for turn in count():
        if order.by_worth:
            break
        world.serve([turn % 29] * 8)
        assert turn < 100
    assert any(not order.by_worth for _ in random_load(seed, [world], 3000))
    oldest = next(iter(order._pool.runs))
    entry = oldest.entries[-1]
    assert order.pop() is entry, "what it held stays; the oldest goes now"


def test_what_many_prompts_begin_with_and_what_follows_are_of_different_kinds() -> None:
    world = Pool(100, LookAhead)
    for number in range(5):
        world.serve([1, 2, 3, 10 + number, 20 + number])
    runs = {entry.tokens[0]: entry.run for entry in world.index}
    assert runs[1] is runs[3] and runs[24] is runs[14] is not runs[1]
    assert runs[1] is not None and runs[14] is not None and runs[1].kind >= worth.NUM_USES > runs[14].kind


def test_a_conversation_is_of_one_kind_and_keeps_it_when_it_was_given_up() -> None:
    world = Pool(12, LookAhead)
    for length in (2, 4, 6):
        world.serve(range(length))
    before = {entry.run for entry in world.index}
    assert len(before) == 1
    for number in range(3):
        world.serve(one_off(number))
    assert world.serve(range(8)) < 6, "some of it was given up"
    after = {entry.run for entry in world.index if entry.tokens[0] < 1000 and entry.live}
    assert len(after) == 1 and next(iter(after)).kind > 1  # type: ignore[union-attr]


def test_blocks_that_are_copied_or_lent_are_not_used() -> None:
    world = Pool(10, LookAhead)
    world.serve(range(4))
    entries = sorted(world.index, key=lambda entry: entry.tokens)
    world.pool.release(world.pool.acquire(entries))
    assert [entry.uses for entry in entries] == [0] * 4
    world.pool.release(world.pool.acquire(entries, ()))
    assert [entry.uses for entry in entries] == [1] * 4


@pytest.mark.parametrize("seed", range(30))
def test_the_worth_of_a_block_is_that_of_the_best_time_to_keep_it(seed: int) -> None:
    chance = random.Random(seed)
    used = [chance.choice((0.0, 1.0, chance.uniform(0, 30))) for _ in range(worth.NUM_AGES)]
    num_released = sum(used) + chance.uniform(0, 100)
    worths = worth._worths(num_released, used, [0.0] * len(used), doubt=0.0)
    for age, found in enumerate(worths):
        best, uses, time = 0.0, 0.0, 0.0
        for place in range(age, len(used)):
            left = num_released - sum(used[:place]) - used[place] / 2
            uses, time = uses + used[place], time + max(1e-9, left) * worth._WIDTHS[place]
            best = max(best, uses / time)
        assert found == pytest.approx(best)


def test_ages_are_told_apart_by_twos_for_each_doubling() -> None:
    worths = Worths(worth.POOL_UNITS)  # an age is a block
    worths.now = 1000
    bounds = [worths.age(1000 - age) for age in range(400)]
    widths = [bounds.count(age) for age in range(worth.NUM_AGES - 1)]
    assert bounds == sorted(bounds) and widths == worth._WIDTHS[:-1] and bounds[-1] == worth.NUM_AGES - 1


def test_s3fifo_keeps_what_was_used_twice_and_remembers_what_it_gave_up() -> None:
    world = Pool(40, S3Fifo)
    for _ in range(3):
        world.serve([1] * 4)
    world.serve([2] * 4)
    for number in range(9):
        world.serve(one_off(number))
    assert world.serve([2] * 4) == 0, "it came in between"
    for number in range(20, 40):
        world.serve(one_off(number))
    assert world.serve([1] * 4) == world.serve([2] * 4) == 4
