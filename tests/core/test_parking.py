"""Whether the KV of a victim is kept or computed again: copies out count only as far as somebody waits for them."""

from __future__ import annotations

import pytest

from shoal.core.classes import DEFAULT_CLASSES
from shoal.core.kv.prefix import Chain
from shoal.core.limits import Limits
from shoal.core.parking import Parking
from shoal.core.progress import Request, State
from shoal.core.request import RequestSpec
from shoal.core.stepcost import StepCost
from shoal.core.tables import BlockTables

MS = 1_000_000
TOKENS = 64  # of each victim: 4 blocks, which a copy moves in 40 ms


class Place:
    """A replica of 32 blocks where tokens take `token_ms` to compute and the longest step is 200 ms."""

    def __init__(self, token_ms: float) -> None:
        self.limits = Limits(
            num_blocks=32,
            max_model_len=1024,
            vocab_size=10,
            max_step_ns=200 * MS,
            num_host_blocks=100,
            block_bytes=1000,
            copy_bytes_per_s=100_000,  # a block takes 10 ms
        )
        self.tables = BlockTables(self.limits)
        self.parking = Parking(self.limits, self.tables, StepCost((0, token_ms * MS, 0, 0, 0)))
        self._count = 0

    def victim(self) -> Request:
        """It runs, and all its tokens are computed."""
        self._count += 1
        spec = RequestSpec(id=f"v{self._count}", prompt=(1,) * TOKENS, max_tokens=9)
        request = Request(spec, self._count, Chain(b""), None, DEFAULT_CLASSES["standard"])
        self.tables.blocks_to_enter(request)
        self.tables.enter(request)
        request.move(State.RUNNING)
        request.computed = request.scheduled = TOKENS
        return request

    def park(self, count: int) -> None:
        for _ in range(count):
            self.parking.park(self.victim())

    def fill(self) -> None:
        """Somebody takes all blocks that are left."""
        self.tables.pool.allocate(self.tables.pool.num_available)


@pytest.mark.parametrize(("token_ms", "pays"), [(0.5, False), (0.7, True)])  # computed again in 32 or 45 ms
def test_while_blocks_are_left_only_the_copy_back_counts(token_ms: float, pays: bool) -> None:
    place = Place(token_ms)
    assert place.parking.pays(place.victim(), 0) is pays


@pytest.mark.parametrize(("token_ms", "pays"), [(1.1, False), (1.3, True)])  # 70 or 83 ms
def test_where_blocks_are_short_both_ways_count(token_ms: float, pays: bool) -> None:
    place = Place(token_ms)
    victim = place.victim()
    place.fill()
    assert place.parking.pays(victim, 0) is pays


@pytest.mark.parametrize(("num_ahead", "pays"), [(4, True), (5, False)])  # 200 ms of copies out with its own, or 240
def test_copies_that_wait_count_as_far_as_they_outlast_the_longest_step(num_ahead: int, pays: bool) -> None:
    place = Place(0.7)
    place.park(num_ahead)
    assert place.parking.pays(place.victim(), 0) is pays


def test_behind_tokens_that_wait_to_be_computed_again_a_copy_may_take_longer() -> None:
    place = Place(0.5)
    victim = place.victim()
    assert not place.parking.pays(victim, 0)
    assert place.parking.pays(victim, TOKENS)
