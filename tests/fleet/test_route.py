"""Tables: which replica a request goes to."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from shoal.fleet.directory import Held
from shoal.fleet.route import MAX_CANDIDATES, Pick, pick
from shoal.fleet.scorers import Errand, expected_ns
from shoal.fleet.view import ReplicaView

COSTS = (1e7, 1e5, 0.0, 1e4, 10.0)  # a step, a new token, an attended one, a sequence, a token of context; ns
SLOW = tuple(4 * cost for cost in COSTS)


def view(name: str, ready: bool = True, **numbers: Any) -> ReplicaView:
    return ReplicaView(name=name, ready=ready, **{"costs": COSTS, **numbers})


CASES = {
    "nobody": ([], (), None),
    "nobody is ready": ([view("a", ready=False)], (), None),
    "the least loaded": ([view("a", num_running=2), view("b", num_running=1)], (), "b"),
    "waiting counts as running does": ([view("a", num_waiting=2), view("b", num_running=1)], (), "b"),
    "so does what was sent a moment ago": ([view("a", num_unreported=2), view("b", num_running=1)], (), "b"),
    "equal loads: the first name": ([view("b"), view("a")], (), "a"),
    "an unready one is no choice however idle": ([view("a", ready=False), view("b", num_running=9)], (), "b"),
    "a suspect one only after the others": ([view("a", suspect=True), view("b", num_running=9)], (), "b"),
    "all suspect: still served": ([view("a", suspect=True)], (), "a"),
    "not again where it failed": ([view("a"), view("b", num_running=9)], ("a",), "b"),
    "again where it failed, if that is all there is": ([view("a"), view("b", ready=False)], ("a",), "a"),
    "few long prompts wait longer than many short ones": (
        [view("a", num_waiting=1, waiting_tokens=4000), view("b", num_waiting=3, waiting_tokens=300)], (), "b",
    ),
    "those that run a little, with much to look at": (
        [view("a", num_running=2, context_tokens=900_000), view("b", num_running=4, context_tokens=400)], (), "b",
    ),
    "the faster machine": ([view("a", costs=SLOW), view("b", num_running=3)], (), "b"),
    "until it is too full": ([view("a", costs=SLOW), view("b", num_running=3, context_tokens=9_000_000)], (), "a"),
}  # fmt: skip


def never(replicas: Sequence[ReplicaView], count: int) -> list[ReplicaView]:
    raise AssertionError("few candidates need no sample")


@pytest.mark.parametrize("case", CASES)
def test_pick(case: str) -> None:
    replicas, avoid, expected = CASES[case]
    for order in itertools.permutations(replicas):
        picked = pick(Errand(avoid=frozenset(avoid), prompt_tokens=100), order, {}, never)
        assert picked == (None if expected is None else Pick(expected, 0))


HITS = {  # replicas, blocks held of a prompt of 2,000 tokens, expected
    "who holds it": ([view("a"), view("b")], {"b": 100}, Pick("b", 1600)),
    "who holds more of it": ([view("a"), view("b")], {"a": 60, "b": 100}, Pick("b", 1600)),
    "the last token is always computed": ([view("a"), view("b")], {"b": 125}, Pick("b", 124 * 16)),
    "a holder with some load": (
        [view("a"), view("b", num_running=8, context_tokens=16_000)], {"b": 120}, Pick("b", 1920),
    ),
    "not one whose queue takes longer than computing it": (
        [view("a"), view("b", num_waiting=2, waiting_tokens=3000)], {"b": 120}, Pick("a", 0),
    ),
    "nor one that was sent as much just now": (
        [view("a"), view("b", num_unreported=2, unreported_new_tokens=3000)], {"b": 120}, Pick("a", 0),
    ),
    "nor one whose steps have become long": (
        [view("a"), view("b", num_running=64, context_tokens=1_000_000)], {"b": 120}, Pick("a", 0),
    ),
    "nor one that is gone": ([view("a"), view("b", ready=False)], {"b": 120, "c": 120}, Pick("a", 0)),
    "nor one where it failed": ([view("a"), view("x")], {"x": 120}, Pick("a", 0)),
}  # fmt: skip


@pytest.mark.parametrize("case", HITS)
def test_pick_of_one_that_holds_the_prefix(case: str) -> None:
    replicas, blocks, expected = HITS[case]
    held = {name: Held(count, count, count) for name, count in blocks.items()}
    errand = Errand(avoid=frozenset("x"), block_tokens=16, prompt_tokens=2000)
    for order in itertools.permutations(replicas):
        assert pick(errand, order, held, never) == expected


def test_of_many_those_that_hold_most_and_a_sample_of_the_others_are_looked_at() -> None:
    replicas = [view(f"r{number:03}", num_running=1 + number % 7) for number in range(200)]
    held = {f"r{number:03}": Held(0, 0, number) for number in range(100, 140)}
    errand = Errand(block_tokens=16, prompt_tokens=200 * 16)
    asked: list[tuple[int, int]] = []

    def sample(others: Sequence[ReplicaView], count: int) -> list[ReplicaView]:
        asked.append((len(others), count))
        return random.Random(1).sample(others, count)

    assert pick(errand, replicas, held, sample) == Pick("r139", 139 * 16)
    assert asked == [(200 - MAX_CANDIDATES // 2, MAX_CANDIDATES // 2)]
    chances = [pick(errand, replicas, {}, random.Random(seed).sample) for seed in (1, 1, 2)]
    assert chances[0] == chances[1] != chances[2]


def test_replicas_whose_costs_differ_by_noise_share_what_comes() -> None:
    slower = tuple(2 * cost for cost in COSTS)
    errand = Errand(block_tokens=16, prompt_tokens=8)
    sent = {"a": 0, "b": 0}
    for _ in range(16):
        views = [view("a", costs=slower, num_unreported=sent["a"]), view("b", num_unreported=sent["b"])]
        found = pick(errand, views, {}, never)
        assert found is not None
        sent[found.name] += 1
    assert sent == {"a": 8, "b": 8}


def test_what_is_expected_is_the_time_of_the_steps_to_come() -> None:
    replica = view(
        "a", num_running=3, num_waiting=1, waiting_tokens=600, context_tokens=5000, costs=(7e6, 2e4, 5, 3e4, 9)
    )
    errand = Errand(block_tokens=16, prompt_tokens=1000)
    others = 4 * 3e4 + 9 * (5000 + 600)
    pairs = 200 * 800 + 200 * 201 // 2
    first = 2e4 * 800 + 5 * pairs + 2 * (7e6 + others)  # 800 new tokens: two steps
    then = 32 * (7e6 + others + 3e4 + 9 * 1000)
    assert expected_ns(errand, replica, 800) == int(first + then)
