"""The cost model: it finds a known law, stays sane under bad measurements and long monotony."""

from __future__ import annotations

import random

import pytest

from shoal.core.plan import Slice
from shoal.core.stepcost import DEFAULT_COEFFICIENTS, FEATURES, Features, StepCost, attended_tokens, fit

LAW = (4e6, 2.5e5, 3.0, 2e4, 8e4)  # a machine that the defaults do not describe


def law(features: Features) -> float:
    return sum(c * f for c, f in zip(LAW, features, strict=True))


def mixed(chance: random.Random) -> Features:
    """A step of 0 to 40 decodes and 0 to 2 prompt chunks."""
    decodes, chunks = chance.randrange(41), chance.randrange(3)
    new, attended = decodes, sum(chance.randrange(1, 2000) for _ in range(decodes))
    for _ in range(chunks):
        count = chance.choice((64, 200, 512))
        new += count
        attended += attended_tokens(chance.randrange(1500), count)
    return (1, max(new, 1), attended, max(decodes + chunks, 1), decodes)


def worst_error(cost: StepCost, chance: random.Random, num: int = 300) -> float:
    steps = [mixed(chance) for _ in range(num)]
    return max(abs(cost.predict(features) - law(features)) / law(features) for features in steps)


def test_features_of_slices() -> None:
    slices = [Slice("a", 10, 1, (), -1, True), Slice("b", 5, 3, (), -1, False)]
    assert StepCost.features(slices) == (1, 4, 11 + 6 + 7 + 8, 2, 1)
    assert len(FEATURES) == 5


def test_it_converges_to_a_law_under_noise() -> None:
    chance, cost = random.Random(1), StepCost()
    assert worst_error(cost, random.Random(2)) > 0.4
    for _ in range(1500):
        features = mixed(chance)
        cost.update(features, int(law(features) * chance.gauss(1, 0.03)))
    assert worst_error(cost, random.Random(2)) < 0.08


def test_it_follows_a_machine_that_becomes_twice_as_slow_after_a_long_time() -> None:
    chance, cost = random.Random(3), StepCost(LAW)
    for _ in range(5000):
        features = mixed(chance)
        cost.update(features, int(law(features)))
    for _ in range(400):
        features = mixed(chance)
        cost.update(features, int(2 * law(features)))
    errors = sorted(abs(cost.predict(f) / law(f) / 2 - 1) for f in [mixed(chance) for _ in range(200)])
    assert errors[len(errors) // 2] < 0.05


@pytest.mark.parametrize(("each", "factor"), [(7, 3), (10, 20), (20, 100), (20, 0.01)])
def test_outliers_hardly_move_it(each: int, factor: float) -> None:
    chance, cost = random.Random(4), StepCost(LAW)
    for number in range(2000):
        features = mixed(chance)
        cost.update(features, int(law(features) * chance.gauss(1, 0.03) * (factor if number % each == 0 else 1)))
    assert worst_error(cost, random.Random(2)) < 0.05


def test_an_hour_of_one_and_the_same_batch_does_not_spoil_other_predictions() -> None:
    chance, cost = random.Random(5), StepCost(LAW)
    features = (1, 8, 8000, 8, 8)
    for _ in range(72_000):  # an hour of 50 ms steps
        cost.update(features, int(law(features) * chance.gauss(1, 0.05)))
    assert abs(cost.predict(features) - law(features)) / law(features) < 0.05
    assert worst_error(cost, random.Random(2)) < 0.35
    uncertainty = [row[place] for place, row in enumerate(cost._covariance)]
    assert all(0 <= now <= first for now, first in zip(uncertainty, cost._first, strict=True))
    for _ in range(300):
        features = mixed(chance)
        cost.update(features, int(2 * law(features) * chance.gauss(1, 0.03)))
    errors = sorted(abs(cost.predict(f) / law(f) / 2 - 1) for f in [mixed(chance) for _ in range(200)])
    assert errors[len(errors) // 2] < 0.05, "and it still learns afterwards"


@pytest.mark.parametrize("seed", range(10))
def test_coefficients_are_never_negative_whatever_is_measured(seed: int) -> None:
    chance, cost = random.Random(seed), StepCost()
    for _ in range(500):
        cost.update(mixed(chance), int(10 ** chance.uniform(0, 12)))
        assert all(0 <= value < 1e15 for value in cost.coefficients)
    assert cost.predict((1, 1, 1, 1, 1)) >= 0


def test_no_measurement_teaches_nothing() -> None:
    cost = StepCost()
    cost.update((1, 8, 800, 8, 8), 0)
    assert cost.coefficients == DEFAULT_COEFFICIENTS


def test_a_sweep_is_fitted_without_negative_coefficients() -> None:
    sweep = [
        (1, n * k, n * attended_tokens(start, k), n, n) for n in (1, 4, 16) for k in (1, 32, 256) for start in (0, 700)
    ]
    fitted = StepCost(fit([(features, int(law(features))) for features in sweep]))
    assert all(abs(fitted.predict(f) - law(f)) / law(f) < 0.1 for f in sweep)
    assert all(value >= 0 for value in fitted.coefficients)
    assert fit([]) == DEFAULT_COEFFICIENTS


@pytest.mark.parametrize("bad", [(1, 2, 3), (1, 2, 3, 4, -1), (1, 2, 3, 4, float("nan"))])
def test_bad_coefficients_are_a_value_error(bad: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="coefficients"):
        StepCost(bad)
