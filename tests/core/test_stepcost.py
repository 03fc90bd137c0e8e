"""The cost model: it finds a known law, stays sane under bad measurements and long monotony."""

from __future__ import annotations

import math
import random
import time

import pytest

from shoal.core.plan import Slice
from shoal.core.stepcost import DEFAULT_COEFFICIENTS, FEATURES, Features, StepCost, attended_tokens, fit
from shoal.engine.warmup import sweep

LAW = (8e6, 2.5e5, 60.0, 1.5e5, 700.0)  # a machine that the defaults do not describe
CONSTANT = (1, 16, 16 * 200, 16, 16 * 200)  # 16 decodes
PROMPT = (1, 1500, attended_tokens(0, 1500), 1, 1500)


def law(features: Features) -> float:
    return sum(c * f for c, f in zip(LAW, features, strict=True))


def mixed(chance: random.Random) -> Features:
    """A step of 0 to 40 decodes and 0 to 2 prompt chunks."""
    decodes, chunks = chance.randrange(41), chance.randrange(3)
    new = decodes
    attended = context = sum(chance.randrange(1, 2000) for _ in range(decodes))
    for _ in range(chunks):
        start, count = chance.randrange(1500), chance.choice((64, 200, 512))
        new += count
        attended += attended_tokens(start, count)
        context += start + count
    return (1, max(new, 1), attended, max(decodes + chunks, 1), context)


def error(cost: StepCost, features: Features, factor: float = 1.0) -> float:
    return abs(cost.predict(features) / (factor * law(features)) - 1)


def worst_error(cost: StepCost, chance: random.Random, num: int = 300) -> float:
    return max(error(cost, mixed(chance)) for _ in range(num))


def live_through(cost: StepCost, features: Features, chance: random.Random, num: int, factor: float = 1.0) -> None:
    """So many steps that are all alike, measured with 5 % of noise."""
    for _ in range(num):
        cost.update(features, int(factor * law(features) * chance.gauss(1, 0.05)))


# -- what it sees ------------------------------------------------------------------------------------------------------


def test_features_of_slices() -> None:
    slices = [Slice("a", 10, 1, (), -1, True), Slice("b", 5, 3, (), -1, False)]
    assert StepCost.features(slices) == (1, 4, 11 + 6 + 7 + 8, 2, 11 + 8)
    assert len(FEATURES) == 5


def test_features_of_parts_add_up() -> None:
    one, other = [Slice("a", 700, 1, (), -1, True)], [Slice("b", 90, 300, (), -1, False)]
    parts = zip(StepCost.features(one)[1:], StepCost.features(other)[1:], strict=True)
    assert StepCost.features([*one, *other])[1:] == tuple(a + b for a, b in parts)


# -- what it learns ----------------------------------------------------------------------------------------------------


def test_it_converges_to_a_law_under_noise() -> None:
    chance, cost = random.Random(1), StepCost()
    assert worst_error(cost, random.Random(2)) > 0.3
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
    errors = sorted(error(cost, mixed(chance), 2) for _ in range(200))
    assert errors[len(errors) // 2] < 0.05


def test_a_slower_machine_is_slower_at_steps_of_other_kinds_too() -> None:
    """Clock and neighbours change all that a machine does: decodes alone tell that prompts will be slow."""
    chance, cost = random.Random(8), StepCost(LAW)
    for _ in range(1000):
        features = mixed(chance)
        cost.update(features, int(law(features) * chance.gauss(1, 0.03)))
    live_through(cost, CONSTANT, chance, 60, factor=1.5)
    assert error(cost, CONSTANT, 1.5) < 0.08
    assert error(cost, PROMPT, 1.5) < 0.2


def test_it_follows_when_one_cost_alone_changes_after_a_long_time() -> None:
    chance, cost = random.Random(10), StepCost(LAW)
    other = (*LAW[:4], 4 * LAW[4])

    def took(features: Features) -> float:
        return sum(c * f for c, f in zip(other, features, strict=True))

    for _ in range(10_000):
        features = mixed(chance)
        cost.update(features, int(law(features) * chance.gauss(1, 0.03)))
    for _ in range(400):
        features = mixed(chance)
        cost.update(features, int(took(features) * chance.gauss(1, 0.03)))
    errors = sorted(abs(cost.predict(features) / took(features) - 1) for features in map(mixed, [chance] * 200))
    assert errors[100] < 0.06 and errors[180] < 0.15


@pytest.mark.parametrize(("each", "factor"), [(7, 3), (10, 20), (20, 100), (20, 0.01)])
def test_outliers_hardly_move_it(each: int, factor: float) -> None:
    chance, cost = random.Random(4), StepCost(LAW)
    for number in range(2000):
        features = mixed(chance)
        cost.update(features, int(law(features) * chance.gauss(1, 0.03) * (factor if number % each == 0 else 1)))
    assert worst_error(cost, random.Random(2)) < 0.1


@pytest.mark.parametrize("coefficients", [LAW, DEFAULT_COEFFICIENTS])
def test_an_hour_of_one_and_the_same_batch_does_not_spoil_other_predictions(coefficients: tuple[float, ...]) -> None:
    chance, cost = random.Random(5), StepCost(coefficients)
    for _ in range(300):
        features = mixed(chance)
        cost.update(features, int(law(features) * chance.gauss(1, 0.03)))
    live_through(cost, CONSTANT, chance, 72_000)  # an hour of 50 ms steps
    assert error(cost, CONSTANT) < 0.05
    assert error(cost, PROMPT) < 0.1
    assert worst_error(cost, random.Random(2)) < 0.15
    uncertainty = [row[place] for place, row in enumerate(cost._covariance)]
    assert all(0 <= now <= 1.001 * first for now, first in zip(uncertainty, cost._first, strict=True))
    for _ in range(300):
        features = mixed(chance)
        cost.update(features, int(2 * law(features) * chance.gauss(1, 0.03)))
    errors = sorted(error(cost, mixed(chance), 2) for _ in range(200))
    assert errors[len(errors) // 2] < 0.05, "and it still learns afterwards"


def test_an_hour_of_decodes_on_a_busy_machine_does_not_spoil_other_predictions() -> None:
    """Contexts grow and begin anew; a neighbour comes and goes, and now and then a step takes three times as long."""
    chance, cost = random.Random(11), StepCost(LAW)
    for _ in range(500):
        features = mixed(chance)
        cost.update(features, int(law(features) * chance.gauss(1, 0.05)))
    slower = 0.0
    for number in range(100_000):
        context = 16 * (128 + number % 96)
        features = (1, 16, context, 16, context)
        slower = 0.9 * slower + 0.06 * chance.gauss(0, 1)
        factor = math.exp(slower) * (3 if chance.random() < 0.03 else 1)
        cost.update(features, int(1.3 * law(features) * factor))
    assert error(cost, PROMPT, cost.predict(CONSTANT) / law(CONSTANT)) < 0.2, "held against the speed of decodes"
    assert error(cost, CONSTANT, 1.3) < 0.4


# -- what it bears -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_coefficients_are_never_negative_whatever_is_measured(seed: int) -> None:
    chance, cost = random.Random(seed), StepCost()
    for _ in range(500):
        cost.update(mixed(chance), int(10 ** chance.uniform(0, 12)))
        assert all(0 <= value < 1e15 for value in cost.coefficients)
    assert cost.predict((1, 1, 1, 1, 1)) >= 0


@pytest.mark.parametrize("seed", range(5))
def test_the_covariance_stays_one(seed: int) -> None:
    """Symmetric, bounded, and no direction has a negative variance: else the filter would run from what it sees."""
    chance, cost = random.Random(seed), StepCost()
    for number in range(3000):
        features = CONSTANT if number % 1000 < 700 else mixed(chance)
        cost.update(features, int(law(features) * 10 ** chance.gauss(0, 0.3)))
    rows = cost._covariance
    most = max(row[place] for place, row in enumerate(rows))
    for i, row in enumerate(rows):
        assert row[i] <= 1.001 * cost._first[i]
        assert all(abs(row[j] - rows[j][i]) <= 1e-6 * most for j in range(len(rows)))
    for _ in range(500):
        v = [chance.gauss(0, 1) for _ in rows]
        variance = sum(a * b * p for a, row in zip(v, rows, strict=True) for b, p in zip(v, row, strict=True))
        assert variance >= -1e-6 * most


def test_uncertainty_of_what_is_never_seen_does_not_grow_without_end() -> None:
    """Steps that differ, in rows alone: what they say nothing about is as uncertain as at the start, and no more."""
    chance, cost = random.Random(12), StepCost(LAW)
    for number in range(60_000):
        features = (1, 1 + 400 * (number % 2), 1, 1, 1)
        cost.update(features, int(law(features) * chance.gauss(1, 0.05)))
    assert all(row[place] <= 1.001 * cost._first[place] for place, row in enumerate(cost._covariance))


def test_no_measurement_teaches_nothing() -> None:
    cost = StepCost()
    cost.update((1, 8, 800, 8, 800), 0)
    assert cost.coefficients == DEFAULT_COEFFICIENTS


def test_an_update_costs_less_than_60_us() -> None:
    """The faster of many, in the thread's own time, so that a busy machine does not matter."""
    chance, cost = random.Random(9), StepCost()
    steps = [(features, int(law(features))) for features in (mixed(chance) for _ in range(200))]
    best = 1.0
    for _ in range(20):
        began = time.thread_time()
        for features, ns in steps:
            cost.update(features, ns)
        best = min(best, (time.thread_time() - began) / len(steps))
    assert best < 60e-6


@pytest.mark.parametrize("bad", [(1, 2, 3), (1, 2, 3, 4, -1), (1, 2, 3, 4, float("nan"))])
def test_bad_coefficients_are_a_value_error(bad: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="coefficients"):
        StepCost(bad)


# -- the sweep ---------------------------------------------------------------------------------------------------------


def swept(chance: random.Random, noise: float, coefficients: tuple[float, ...] = LAW) -> list[tuple[Features, int]]:
    """What the sweep of a start would measure on a machine that keeps a law."""
    plans = sweep(num_blocks=1000, block_tokens=16, vocab_size=100, max_model_len=2048)
    steps = [StepCost.features(plan.slices) for plan in plans]
    times = [sum(c * f for c, f in zip(coefficients, features, strict=True)) for features in steps]
    return [(features, int(ns * chance.gauss(1, noise))) for features, ns in zip(steps, times, strict=True)]


def test_the_sweep_tells_the_features_apart() -> None:
    assert worst_error(StepCost(fit(swept(random.Random(1), 0.0))), random.Random(2)) < 0.05


@pytest.mark.parametrize("seed", range(5))
def test_a_sweep_is_fitted_under_noise_and_some_bad_measurements(seed: int) -> None:
    samples = [
        (features, ns * (4 if number in (3, 11, 18, 29) else 1))
        for number, (features, ns) in enumerate(swept(random.Random(seed), 0.04))
    ]
    cost = StepCost(fit(samples))
    errors = sorted(error(cost, mixed(chance)) for chance in map(random.Random, range(200)))
    assert errors[100] < 0.1 and errors[180] < 0.2


@pytest.mark.parametrize("seed", range(5))
def test_a_sweep_of_a_machine_where_attention_costs_nothing_gives_no_negative_cost(seed: int) -> None:
    fitted = fit(swept(random.Random(seed), 0.1, (8e6, 2.5e5, 0.0, 0.0, 0.0)))
    assert all(value >= 0 for value in fitted)


def test_without_a_sweep_the_defaults_stay() -> None:
    assert fit([]) == DEFAULT_COEFFICIENTS
