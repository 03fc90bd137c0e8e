"""Two simulated replicas with roles: every answer is whole, and where it was decoded is where it should be."""

from __future__ import annotations

from itertools import pairwise

import pytest

import splitting
from shoal.workload.latency import percentile

CHATS, CHAT, LONG, COUNT = 6, (48, 256), (1500, 48), 4


def run(*roles: str, every_s: float = 4.0) -> splitting.Fleet:
    fleet = splitting.Fleet(roles, seed=1)
    fleet.run(CHATS, CHAT, LONG, COUNT, every_s)
    assert len(fleet.long) == COUNT
    assert all(len(each.at_ns) == each.spec.max_tokens for each in (*fleet.long, *fleet.chats))
    return fleet


def itl_p99_ns(fleet: splitting.Fleet) -> float:
    """Between tokens of chats, while long prompts are under way."""
    first_ns = fleet.long[0].due_ns
    times = [[at for at in each.at_ns if at >= first_ns] for each in fleet.chats]
    return percentile([b - a for each in times for a, b in pairwise(each)], 99)


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("both", "decode"), ("prefill", "both")])
def test_chats_decode_undisturbed_by_long_prompts(roles: tuple[str, str]) -> None:
    unsplit, split = run("both", "both"), run(*roles)
    assert not unsplit.decisions and not unsplit.moved_tokens
    assert split.decisions["split"] >= COUNT
    first, second = split.sites.values()
    assert first.num_tokens < 0.05 * second.num_tokens
    assert itl_p99_ns(split) <= 0.8 * itl_p99_ns(unsplit)


def test_two_runs_are_the_same() -> None:
    first, second = run("prefill", "decode"), run("prefill", "decode")
    assert [each.at_ns for each in first.chats] == [each.at_ns for each in second.chats]
