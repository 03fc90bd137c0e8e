"""Whoever only hears the news of the prefix index knows what is in it."""

from __future__ import annotations

import pytest

from shoal.core.kv.news import DEVICE
from tests.core.test_properties import World


@pytest.mark.parametrize("seed", range(8))
def test_the_news_say_what_the_index_holds_and_a_block_after_the_one_before_it(seed: int) -> None:
    world = World(seed)
    index = world.scheduler._members.tables.index
    assert world.scheduler.kv_news() == []
    held: dict[bytes, bytes] = {}
    num_dropped = 0
    copies = [world.copy, world.copy, world.move]
    turns = [world.plan] * 6 + [world.apply] * 5 + copies + [world.submit] * 2 + [world.abort]
    while world.scheduler.view().step < 150:
        world.chance.choice(turns)()
        for key, parent, tier, stored in world.scheduler.kv_news():
            if tier != DEVICE:
                continue
            if stored:
                assert key not in held and (not parent or parent in held)
                held[key] = parent
            else:
                assert key not in held.values(), "the block after it is still told to be there"
                del held[key]
                num_dropped += 1
        assert list(held) == [entry.key for entry in index]
    assert not world.limits.prefix_caching or (held and (num_dropped or world.limits.num_blocks > 16))


def test_nobody_asks_and_nothing_is_noted() -> None:
    world = World(1)
    for _ in range(100):
        world.submit()
        world.plan()
        world.apply()
    assert world.scheduler._members.tables.index.news is None
