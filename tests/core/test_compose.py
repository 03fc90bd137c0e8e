"""The composer's choice against the true optimum, by brute force on small instances; and what it must never do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from statistics import mean

import pytest

from shoal.core.classes import DEFAULT_CLASSES
from shoal.core.compose import Candidate, Chosen, Room, Value, choose, in_turn, worth
from shoal.core.kv.prefix import Chain
from shoal.core.limits import Limits
from shoal.core.progress import Request
from shoal.core.request import RequestSpec
from shoal.core.stepcost import StepCost

MS = 1_000_000


def request(number: int, prompt: int) -> Request:
    spec = RequestSpec(id=f"r{number}", prompt=(1,) * prompt, max_tokens=4)
    return Request(spec, number, Chain(b""), None, DEFAULT_CLASSES["standard"])


class Instance:
    """Few candidates, each with few chunks, and room for about half of them in one kind of room or in several."""

    def __init__(self, chance: random.Random) -> None:
        count = chance.randint(4, 6)
        needs = [chance.choice((1, 1, 2, 3)) for _ in range(count)]
        total = sum(needs)
        self.limits = Limits(
            num_blocks=100,
            max_model_len=100,
            vocab_size=10,
            max_num_batched_tokens=max(1, int(total * chance.uniform(0.3, 1.0))),
            max_prefill_chunk=0,
            max_step_ns=int(total * MS * chance.uniform(0.3, 1.0)) + 2 * MS,
        )
        self.room = Room(self.limits, StepCost((MS, MS, chance.choice((0, MS // 20)), 0, 0)))
        blocks = [chance.choice((0, 1, 2, 5)) for _ in range(count)]
        self.candidates = [
            Candidate(
                request(number, start + need),
                start=start,
                need=need,
                num_blocks=block,
                num_slots=int(block > 0),
                value=chance.choice((1.0, 4.0, 8.0)) * chance.uniform(1, 4),
                limit_ns=self.limits.max_step_ns,
            )
            for number, (need, block) in enumerate(zip(needs, blocks, strict=True))
            for start in [chance.choice((0, 16, 60))]
        ]
        self.num_blocks = max(1, int(sum(blocks) * chance.uniform(0.3, 1.0)))
        self.num_slots = chance.randint(1, count)

    def allows(self, counts: tuple[int, ...]) -> float | None:
        """What these token counts are worth; None: they do not fit."""
        room, taken = self.room.copy(), []
        for each, number in zip(self.candidates, counts, strict=True):
            if number:
                room.add_chunk(each.start, number)
                taken.append(Chosen(each, number))
        fits = (
            room.num_tokens <= self.limits.max_num_batched_tokens
            and (room.time_ns() <= self.limits.max_step_ns or room.num_tokens == 0)
            and sum(chosen.candidate.num_blocks for chosen in taken) <= self.num_blocks
            and sum(chosen.candidate.num_slots for chosen in taken) <= self.num_slots
        )
        return worth(taken) if fits else None

    def optimum(self) -> float:
        options = [range(each.need + 1) for each in self.candidates]
        return max(found for counts in product(*options) if (found := self.allows(counts)) is not None)


def instances(count: int) -> Iterator[Instance]:
    chance = random.Random(7)
    for _ in range(count):
        yield Instance(chance)


def test_the_composer_is_near_the_optimum_where_first_come_first_served_is_not() -> None:
    greedy, first_come = [], []
    for instance in instances(1000):
        best = instance.optimum()
        if not best:
            continue
        arguments = (instance.candidates, instance.room, instance.num_blocks, instance.num_slots)
        greedy.append(min(1.0, worth(choose(*arguments)) / best))
        first_come.append(worth(in_turn(*arguments)) / best)
    assert len(greedy) > 900
    assert mean(first_come) <= 0.75, f"first come first served reaches {mean(first_come):.3f}: too easy"
    assert mean(greedy) >= 0.95 and min(greedy) >= 0.8, f"mean {mean(greedy):.3f}, least {min(greedy):.3f}"


@pytest.mark.parametrize("choice", [choose, in_turn])
def test_what_is_chosen_fits(choice) -> None:
    for instance in instances(200):
        before = instance.room.features
        chosen = choice(instance.candidates, instance.room, instance.num_blocks, instance.num_slots)
        counts = {each.candidate.request.id: each.tokens for each in chosen}
        assert len(counts) == len(chosen) and all(1 <= each.tokens <= each.candidate.need for each in chosen)
        fits = instance.allows(tuple(counts.get(each.request.id, 0) for each in instance.candidates))
        one_token = sum(counts.values()) == 1  # allowed whatever its time
        assert fits is not None or one_token
        assert instance.room.features == before


def test_the_gain_is_what_was_chosen_by_what_would_have_come_first() -> None:
    for instance in instances(200):
        composer = Value(instance.limits)
        chosen = composer.choose(instance.candidates, instance.room, instance.num_blocks, instance.num_slots)
        by_arrival = sorted(instance.candidates, key=lambda each: (each.num_slots, each.request.order))
        in_turn_worth = worth(in_turn(by_arrival, instance.room, instance.num_blocks, instance.num_slots))
        assert composer.chosen_worth == worth(chosen)
        assert composer.in_turn_worth == pytest.approx(in_turn_worth)
