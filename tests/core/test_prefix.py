"""The prefix index beside a naive one: a plain table of whole prefixes, and a list for the eviction order."""

from __future__ import annotations

import random
from typing import Any

import pytest

from shoal.core.kv import prefix
from shoal.core.kv.blocks import BlockPool
from shoal.core.kv.hashing import block_key, chain, scope_key
from shoal.core.kv.prefix import Chain, Entry, PrefixIndex
from tests.core.test_properties import World

SIZE = 4
Prefix = tuple[bytes, tuple[int, ...]]  # scope, all tokens up to the end of a block


class Naive:
    """What must be found, and what must be given up next."""

    def __init__(self) -> None:
        self.block_of: dict[Prefix, int] = {}
        self.unused: list[int] = []  # cached blocks, least recently used first, a prefix's end before its start

    def match(self, scope: bytes, tokens: list[int], most: int) -> list[int]:
        found: list[int] = []
        for end in range(SIZE, most * SIZE + 1, SIZE):
            if (scope, tuple(tokens[:end])) not in self.block_of:
                break
            found.append(self.block_of[scope, tuple(tokens[:end])])
        return found

    def enter(self, scope: bytes, tokens: list[int], table: list[int]) -> None:
        for place, block in enumerate(table[: len(tokens) // SIZE]):
            if self.block_of.setdefault((scope, tuple(tokens[: (place + 1) * SIZE])), block) != block:
                return  # another block holds it: what follows is not entered either

    def taken(self, block: int) -> None:
        self.block_of = {key: other for key, other in self.block_of.items() if other != block}


@pytest.mark.parametrize("seed", range(60))
def test_matches_and_evictions_equal_the_naive_ones(seed: int) -> None:
    chance = random.Random(seed)
    index = PrefixIndex(SIZE)
    pool = BlockPool(chance.choice((6, 12, 30)), index)
    naive = Naive()
    tables: list[list[int]] = []
    scopes = [scope_key(b"", salt) for salt in ("", "a")]
    for _ in range(200):
        if tables and chance.random() < 0.45:
            table = tables.pop(chance.randrange(len(tables)))
            pool.release(table)
            still = {block for other in tables for block in other}
            cached = set(naive.block_of.values())
            naive.unused += [block for block in reversed(table) if block not in still and block in cached]
        scope = chance.choice(scopes)
        tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 21))]
        tokens[:SIZE] = [1, 0, 1, 0][: len(tokens)] if chance.random() < 0.7 else tokens[:SIZE]
        links = Chain(scope)
        most = (len(tokens) - 1) // SIZE
        hits = index.match(links, tokens, most)
        assert [entry.block for entry in hits] == naive.match(scope, tokens, most)
        num_new = -(-len(tokens) // SIZE) - len(hits)
        if num_new + pool.num_cached_of(hits) <= pool.num_available:
            table = pool.acquire(hits, ())
            naive.unused = [block for block in naive.unused if block not in table]
            num_evicted = max(0, num_new - pool.num_free)
            new = pool.allocate(num_new)
            assert new[num_new - num_evicted :] == naive.unused[:num_evicted]
            naive.unused = naive.unused[num_evicted:]
            for block in new:
                naive.taken(block)
            table += new
            links.adopt(hits)
            index.extend(links, tokens, table, len(tokens) // SIZE)
            naive.enter(scope, tokens, table)
            tables.append(table)
        pool.check(tables)
        assert {entry.block for entry in index} == set(naive.block_of.values())


@pytest.mark.parametrize("seed", range(10))
def test_blocks_taken_at_once_are_those_taken_one_by_one(seed: int) -> None:
    chance = random.Random(seed)
    pools = [BlockPool(40, PrefixIndex(SIZE)) for _ in range(2)]
    tables: list[list[int]] = []
    num_given_up = 0
    for number in range(200):
        if tables and (chance.random() < 0.5 or pools[0].num_available < 12):
            table = tables.pop(chance.randrange(len(tables)))
            for pool in pools:
                if number % 2:
                    pool._index.extend(Chain(b"%d" % number), [number] * SIZE, table, min(1, len(table)))
                pool.release(table)
        else:
            count, num_cached = chance.randrange(12), pools[0].num_cached
            tables.append(pools[0].allocate(count))
            assert tables[-1] == [pools[1].take() for _ in range(count)]
            num_given_up += num_cached - pools[0].num_cached
        for pool in pools:
            pool.check(tables)
    assert num_given_up, "no cached block was taken"


def test_a_waiting_request_asks_again_and_sees_what_came_and_what_went() -> None:
    index = PrefixIndex(SIZE)
    pool = BlockPool(4, index)
    tokens = list(range(12))
    waiting, owner = Chain(b"s"), Chain(b"s")
    table = pool.allocate(3)
    assert index.match(waiting, tokens, 3) == []
    index.extend(owner, tokens, table, 2)
    assert [entry.block for entry in index.match(waiting, tokens, 3)] == table[:2]
    index.extend(owner, tokens, table, 3)
    assert [entry.block for entry in index.match(waiting, tokens, 3)] == table
    pool.release(table)
    pool.allocate(2)  # the one never used, then the end of the prefix
    assert [entry.block for entry in index.match(waiting, tokens, 3)] == table[:2]


@pytest.mark.interpreted
def test_each_key_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(prefix, "block_key", lambda parent, tokens: asked.append(tokens) or block_key(parent, tokens))
    index = PrefixIndex(SIZE)
    tokens = list(range(20))
    given = Chain(b"s", chain(b"s", tokens[:8], SIZE))
    for _ in range(3):
        index.match(given, tokens, 4)
    index.extend(given, tokens, list(range(5)), 3)
    index.extend(given, tokens, list(range(5)), 5)
    assert asked == [(8, 9, 10, 11), (12, 13, 14, 15), (16, 17, 18, 19)]


@pytest.mark.interpreted
def test_kv_02_d_with_a_constant_hash_a_lookup_is_a_miss_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "block_key", lambda parent, tokens: b"the same")
    index = PrefixIndex(SIZE)
    owner = Chain(b"s")
    index.extend(owner, [1, 2, 3, 4, 5, 6, 7, 8], [0, 1], 2)
    assert len(index) == 1, "a second content under one key is not entered"
    assert len(index.match(Chain(b"s"), [1, 2, 3, 4, 9], 1)) == 1
    assert index.collisions == 0
    assert index.match(Chain(b"s"), [5, 6, 7, 8, 9], 1) == [], "other tokens"
    assert index.match(Chain(b"other"), [1, 2, 3, 4, 9], 1) == [], "other scope"
    assert index.collisions == 2
    later = Chain(b"s")
    assert len(index.match(later, [1, 2, 3, 4, 1, 2, 3, 4, 9], 2)) == 1, "other prefix before the same tokens"
    assert index.collisions == 3


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", range(12))
def test_with_a_hash_of_two_bits_requests_still_come_to_what_they_must(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(prefix, "block_key", lambda parent, tokens: bytes([(parent[0] + sum(tokens)) % 4]))
    world = World(seed)
    copies = [world.copy, world.copy, world.move]
    turns = [world.plan] * 6 + [world.apply] * 5 + copies + [world.submit] * 2 + [world.abort]
    while world.scheduler.view().step < 100:
        world.chance.choice(turns)()
        world.scheduler.check()
    assert world.scheduler.view().hash_collisions > 0 or not world.limits.prefix_caching


def test_an_entry_is_dead_once_its_block_is_taken() -> None:
    index = PrefixIndex(SIZE)
    pool = BlockPool(1, index)
    table = pool.allocate(1)
    links = Chain(b"s")
    index.extend(links, [1, 2, 3, 4], table, 1)
    entry = links.tail
    assert isinstance(entry, Entry) and entry.live
    pool.release(table)
    pool.allocate(1)
    assert not entry.live and len(index) == 0 and index.at(table[0]) is None
