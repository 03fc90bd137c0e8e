"""Predicted lengths: right on known distributions, honest about cut answers, quick to follow, bounded under floods."""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable

import pytest

from shoal.core import lengths
from shoal.core.lengths import FEW, MEMORY, MOST_TENANTS, Lengths, bucket

Draw = Callable[[random.Random], int]

FAR = 100_000  # tokens left: no cut


def geometric(mean: int) -> Draw:
    return lambda chance: 1 + int(chance.expovariate(1 / (mean - 0.5)))


def bimodal(chance: random.Random) -> int:
    """Nine short answers to each long one."""
    return chance.randint(8, 24) if chance.random() < 0.9 else chance.randint(288, 480)


def heavy(chance: random.Random) -> int:
    return min(4000, max(1, round(chance.lognormvariate(4.2, 1.0))))


def sample(draw: Draw, seed: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return [draw(chance) for _ in range(count)]


def truth(draw: Draw, generated: int, left: int) -> float:
    """Mean number of tokens to come, by brute force over lengths that the learner has not seen."""
    to_come = [min(length - generated, left) for length in sample(draw, 99, 40_000) if length > generated]
    return sum(to_come) / len(to_come)


def tell(found: Lengths, all_lengths: Iterable[int], tenant: str = "a") -> None:
    for length in all_lengths:
        found.ended("standard", tenant, length, by_limit=False)


def learned(draw: Draw, count: int = 1500, tenant: str = "a") -> Lengths:
    found = Lengths()
    tell(found, sample(draw, 1, count), tenant)
    return found


def ask(found: Lengths, generated: int, left: int = FAR, tenant: str = "a") -> int:
    return found.remaining("standard", tenant, generated, left)


# -- right -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generated", [0, 5, 40, 100, 200])
@pytest.mark.parametrize("left", [30, 200, FAR])
def test_geometric_lengths(generated: int, left: int) -> None:
    draw = geometric(80)
    assert ask(learned(draw), generated, left) == pytest.approx(truth(draw, generated, left), rel=0.2)


@pytest.mark.parametrize("generated", [0, 4, 30, 100, 250, 300])
@pytest.mark.parametrize("left", [20, 250, FAR])
def test_bimodal_lengths(generated: int, left: int) -> None:
    """Who has passed the short answers is known to be a long one."""
    assert ask(learned(bimodal), generated, left) == pytest.approx(truth(bimodal, generated, left), rel=0.2)


@pytest.mark.parametrize("generated", [0, 10, 60, 200])
@pytest.mark.parametrize("left", [50, 400, FAR])
def test_lengths_with_a_heavy_tail(generated: int, left: int) -> None:
    """The more there is, the more is to come."""
    assert ask(learned(heavy), generated, left) == pytest.approx(truth(heavy, generated, left), rel=0.25)


def test_answers_of_one_and_the_same_length() -> None:
    found = learned(lambda chance: 100)
    assert ask(found, 0) == pytest.approx(100, abs=8)
    assert ask(found, 60) == pytest.approx(40, abs=8)
    assert ask(found, 98) == pytest.approx(2, abs=8)


def test_what_is_left_bounds_each_answer_and_not_only_their_mean() -> None:
    """Half of the answers have 10 tokens, half 1,000. With 500 left the mean is 255, not the smaller of 500 and 505."""
    found = learned(lambda chance: chance.choice((10, 1000)))
    assert ask(found, 0, 500) == pytest.approx(255, rel=0.1)


# -- what was cut ------------------------------------------------------------------------------------------------------


def test_a_cut_answer_says_at_least() -> None:
    """Lengths of 200 on average, cut at 20 to 400 by their callers' max_tokens."""
    draw, chance = geometric(200), random.Random(5)
    honest, naive = Lengths(), Lengths()
    for length in sample(draw, 1, 3000):
        most = chance.randint(20, 400)
        honest.ended("standard", "a", min(length, most), by_limit=length > most)
        naive.ended("standard", "a", min(length, most), by_limit=False)
    for generated in (0, 100):
        assert ask(honest, generated, 300) == pytest.approx(truth(draw, generated, 300), rel=0.2)
        assert ask(naive, generated, 300) < 0.8 * truth(draw, generated, 300), "as it would be without"


def test_where_all_are_cut_all_of_the_rest_is_predicted() -> None:
    found = Lengths()
    for _ in range(500):
        found.ended("standard", "a", 128, by_limit=True)
    for generated in (0, 50, 120):
        assert ask(found, generated, 128 - generated) >= 0.95 * (128 - generated)


def test_a_cut_answer_counts_where_others_ended_too() -> None:
    """95 and 108 tokens are in one bucket: half of those that came to it passed it."""
    found = Lengths()
    for number in range(400):
        found.ended("standard", "a", (95, 108)[number % 2], by_limit=number % 2 == 1)
    assert ask(found, 92, 60) == pytest.approx(0.5 * 8 + 0.5 * 55, rel=0.2)


def test_an_abort_before_the_first_token_says_nothing() -> None:
    found = Lengths()
    before = ask(found, 0)
    for _ in range(100):
        found.ended("standard", "a", 0, by_limit=True)
    assert ask(found, 0) == before


# -- change and company ------------------------------------------------------------------------------------------------


def test_it_follows_when_lengths_change() -> None:
    found = learned(geometric(40), 3000)
    tell(found, sample(geometric(400), 2, 2 * MEMORY))
    assert ask(found, 0) == pytest.approx(400, rel=0.25)
    tell(found, sample(geometric(40), 3, 2 * MEMORY))
    assert ask(found, 0) == pytest.approx(40 * 0.88 + 400 * 0.12, rel=0.3)


def test_endless_endings_do_not_wear_it_out() -> None:
    """Weights grow with each observation and are made small again."""
    found, some = Lengths(), sample(geometric(50), 4, 500)
    for number in range(30_000):
        found.ended("standard", "a", some[number % 500], by_limit=number % 3 == 0)
    seen = found._tenants["standard", "a"]
    assert seen._weight <= lengths._MAX_WEIGHT and seen.evidence == pytest.approx(MEMORY, rel=0.01)
    assert ask(found, 0) == pytest.approx(75, rel=0.15), "a third was cut at a length of its own"


def test_before_anything_is_known_more_is_expected_of_who_made_more() -> None:
    found = Lengths()
    for generated in (0, 300, 3000):
        assert ask(found, generated, 1_000_000) == pytest.approx(128 + generated / 3, rel=0.05)


def test_a_new_tenant_is_predicted_as_its_class_and_a_new_class_as_any() -> None:
    found = learned(geometric(1000))
    assert ask(found, 0, tenant="new") == pytest.approx(ask(found, 0), rel=0.05)
    assert found.remaining("other", "a", 0, FAR) == Lengths().remaining("other", "a", 0, FAR)


def test_a_tenant_moves_from_its_class_to_its_own() -> None:
    found = learned(geometric(1000))
    expected = []
    for _ in range(100):
        tell(found, [20], "b")
        expected.append(ask(found, 0, tenant="b"))
    assert expected[FEW - 1] > 600, "not after a few"
    assert expected[FEW - 1] > expected[25] > expected[-1]
    assert expected[-1] == pytest.approx(20 + 1000 * 8 / 108, rel=0.4)
    assert ask(found, 0) > 700, "and the others of the class are predicted as before"


def test_tenants_and_classes_are_kept_apart() -> None:
    found = Lengths()
    kinds = {("interactive", "a"): 20, ("interactive", "b"): 300, ("batch", "a"): 2000}
    for _ in range(400):
        for (service_class, tenant), length in kinds.items():
            found.ended(service_class, tenant, length, by_limit=False)
    for (service_class, tenant), length in kinds.items():
        assert found.remaining(service_class, tenant, 0, FAR) == pytest.approx(length, rel=0.2)


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_buckets() -> None:
    """Each place is in the bucket whose start is the last one at or before it."""
    starts = lengths._STARTS
    assert (starts[0], starts[-1]) == (4, lengths._END) and starts == sorted(set(starts))
    for place in (*range(4, 5000), *(edge + by for edge in starts[1:-1] for by in (-1, 0, 1)), lengths._END - 1):
        assert bucket(place) == bisect_right(starts, place) - 1, place


def test_never_less_than_one_and_never_more_than_what_is_left() -> None:
    chance, found = random.Random(6), Lengths()
    sizes = (0, 1, 2, 3, 5, 17, 128, 4096, 131_072, 1 << 20, 1 << 21, 1 << 40)
    for _ in range(3000):
        found.ended("standard", chance.choice("ab"), chance.choice(sizes), by_limit=chance.random() < 0.3)
        generated, left = chance.choice(sizes), chance.choice(sizes)
        assert min(1, left) <= ask(found, generated, left, chance.choice("abc")) <= left
    assert ask(found, 10, -3) == 0


def test_a_flood_of_tenants_is_bounded_and_spares_who_keeps_coming() -> None:
    found = learned(lambda chance: 20, tenant="regular")
    for number in range(5 * MOST_TENANTS):
        tell(found, [3000], f"flood {number}")
        if number % 100 == 0:
            tell(found, [20], "regular")
    assert len(found._tenants) == MOST_TENANTS
    assert ("standard", "flood 0") not in found._tenants
    assert ask(found, 0, tenant="regular") < 100
    assert ask(found, 0, tenant="flood 1") > 1000


def test_who_is_forgotten_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant's turn comes when it is forgotten already."""
    monkeypatch.setattr(lengths, "MOST_TENANTS", 20)
    found = Lengths()
    for wave in range(5):
        for _ in range(FEW + 2):
            for number in range(20):
                tell(found, [50], f"t{wave} {number}")
    assert len(found._tenants) == 20
    assert set(found._due) <= set(found._tenants)


@pytest.mark.interpreted
def test_what_endings_cost_is_bounded_and_every_table_gets_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tenants with news at every ending: one table is made anew for each four endings, and none is left out."""
    found, rebuilt = Lengths(), []
    original = lengths._Observed.rebuild

    def rebuild(seen: lengths._Observed, parent: list[float], draw: float) -> None:
        rebuilt.append(seen)
        original(seen, parent, draw)

    monkeypatch.setattr(lengths._Observed, "rebuild", rebuild)
    for _ in range(2 * FEW):
        for number in range(300):
            tell(found, [50], f"t{number}")
    assert len(rebuilt) <= 2 * FEW * 300 / 4
    assert len({id(seen) for seen in rebuilt}) == 301, "each tenant, and the class"


def test_who_asks_changes_nothing() -> None:
    """A replay asks at other times than the run that it repeats."""

    def answers(asking: bool) -> list[int]:
        chance, found = random.Random(7), Lengths()
        for _ in range(2000):
            tenant, length, cut = f"t{chance.randrange(40)}", heavy(chance), chance.random() < 0.2
            found.ended("standard", tenant, length, by_limit=cut)
            if asking:
                found.remaining("standard", tenant, length, 500)
        return [ask(found, 10 * number, 500, f"t{number}") for number in range(50)]

    assert answers(True) == answers(False)


def test_a_prediction_costs_about_a_microsecond() -> None:
    """Five are allowed, so that a busy machine does not matter: it may be asked for each of 512 requests in a step."""
    found = learned(heavy)
    best = 1.0
    for _ in range(20):
        began = time.thread_time()
        for generated in range(1000):
            found.remaining("standard", "a", generated, 400)
        best = min(best, (time.thread_time() - began) / 1000)
    assert best < 5e-6
