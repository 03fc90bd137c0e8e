from __future__ import annotations

from collections import Counter
from random import Random
from statistics import median

import pytest

from shoal.workload.lengths import MIXES, LongTail, Mixture, Uniform


@pytest.mark.parametrize(
    ("lengths", "low", "high"),
    [
        (Uniform(128), 128, 128),
        (Uniform(10, 0.5), 5, 15),
        (Uniform(7, 0.5), 3, 11),  # floor(3.5), ceil(10.5)
        (Uniform(1, 0.9), 1, 2),  # never 0
        (LongTail(8, 1.0, 40), 1, 40),
    ],
)
def test_range(lengths: Uniform | LongTail, low: int, high: int) -> None:
    rng = Random(1)
    drawn = {lengths.draw(rng) for _ in range(5_000)}
    assert min(drawn) == low and max(drawn) == high


def test_uniform_gives_each_length_the_same_share() -> None:
    rng = Random(2)
    counts = Counter(Uniform(10, 0.5).draw(rng) for _ in range(22_000))
    assert sorted(counts) == list(range(5, 16))
    assert all(count == pytest.approx(2_000, rel=0.1) for count in counts.values())


def test_long_tail_keeps_its_median_and_has_a_tail() -> None:
    rng = Random(3)
    drawn = [LongTail(64, 1.0, 100_000).draw(rng) for _ in range(20_000)]
    assert median(drawn) == pytest.approx(64, rel=0.05)
    assert sum(length > 64 * 2.718 for length in drawn) / len(drawn) == pytest.approx(0.159, abs=0.01)


def test_mixture_follows_its_weights() -> None:
    rng = Random(4)
    mixture = Mixture(((3.0, Uniform(1)), (1.0, Uniform(9))))
    counts = Counter(mixture.draw(rng) for _ in range(20_000))
    assert counts[1] / 20_000 == pytest.approx(0.75, abs=0.01)
    assert set(counts) == {1, 9}


@pytest.mark.parametrize(("name", "most_prompt", "most_output"), [("chat", 1500, 512), ("bimodal", 96, 480)])
def test_named_mix_stays_within(name: str, most_prompt: int, most_output: int) -> None:
    rng = Random(5)
    mix = MIXES[name]
    assert max(mix.prompt.draw(rng) for _ in range(20_000)) == most_prompt
    assert max(mix.output.draw(rng) for _ in range(20_000)) == most_output


def test_every_named_mix_is_tested() -> None:
    assert set(MIXES) == {"chat", "bimodal"}


def test_impossible_lengths_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="length"):
        Uniform(0)
    with pytest.raises(ValueError, match="ratio"):
        Uniform(5, 1.0)
