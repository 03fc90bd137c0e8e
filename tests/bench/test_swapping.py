"""Simulated episodes of a preemption: both answers have their cells, and the time counted is what it should be."""

from __future__ import annotations

from statistics import fmean

import pytest

from swapping import BLOCK_BYTES, MACHINE, Cell, Episode, loss, simulated

SLOW, FAST = Cell(5, 250, False), Cell(1000, 250, False)


def test_with_slow_copies_recomputing_is_sooner_and_with_fast_ones_swapping() -> None:
    for seed in range(3):
        assert simulated(SLOW, "recompute", seed) < simulated(SLOW, "swap", seed)
        assert simulated(FAST, "swap", seed) < simulated(FAST, "recompute", seed)


def test_a_swap_takes_both_copies_and_the_urgent_request_between_them() -> None:
    """The victim holds 16 blocks of 16 tokens; what is urgent computes 96 tokens, then one more."""
    copy_s = 16 * BLOCK_BYTES / 5e6
    urgent_s = (2 * MACHINE[0] + 97 * MACHINE[1]) / 1e9
    token_s = (MACHINE[0] + MACHINE[1]) / 1e9
    found = [simulated(SLOW, "swap", seed) for seed in range(5)]
    assert fmean(found) == pytest.approx(2 * copy_s + urgent_s + token_s, rel=0.05)
    assert len(set(found)) == 5, "seeds differ"


def test_a_choice_is_one_of_both() -> None:
    for cell in (SLOW, FAST, Cell(5, 250, True)):
        seconds = {mode: simulated(cell, mode, 1) for mode in ("swap", "recompute", "auto")}
        assert loss(seconds) < 1.1


def test_an_episode_calls_the_urgent_ones_once_and_waits_for_all_that_left() -> None:
    left: dict[str, int] = {}
    episode = Episode(Cell(5, 64, True), 0, left)
    first, second, third = (victim.id for victim in episode.victims)
    for now_ns in range(4):
        urgent = [each for id in (first, second, third) for each in episode.heard(id, now_ns)]
    assert len(urgent) == 3 and not episode.heard(first, 5)
    left |= {first: 10, second: 20}
    for each in urgent:
        for _ in range(2):
            episode.heard(each.id, 30)
    assert not episode.done
    episode.heard(third, 35)
    episode.heard(first, 40)
    episode.heard(first, 45)
    assert not episode.done
    episode.heard(second, 60)
    assert episode.done and episode.seconds() == pytest.approx(35e-9)  # of 30 and 40
