"""Tables: which replica a request goes to."""

from __future__ import annotations

import itertools

import pytest

from shoal.fleet.route import Errand, pick
from shoal.fleet.view import ReplicaView


def view(name: str, ready: bool = True, **numbers: int | bool) -> ReplicaView:
    return ReplicaView(name=name, ready=ready, **numbers)  # type: ignore[arg-type]


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
}


@pytest.mark.parametrize("case", CASES)
def test_pick(case: str) -> None:
    replicas, avoid, expected = CASES[case]
    for order in itertools.permutations(replicas):
        assert pick(Errand(avoid=frozenset(avoid)), order) == expected
