"""A clock that the work itself moves: each part counts what it did, and no second counts twice."""

from __future__ import annotations

from parts import Parts


class Work:
    """Each call takes seconds of its own."""

    def __init__(self) -> None:
        self.now = 0.0

    def outer(self) -> str:
        self.now += 1.0
        self.inner()
        self.inner()
        return "done"

    def inner(self) -> None:
        self.now += 10.0


def test_a_part_within_another_counts_only_in_the_inner_one() -> None:
    work = Work()
    parts = Parts("rest", clock=lambda: work.now)
    parts.wrap(work, "outer", "outer")
    parts.wrap_methods(work, "inner")  # the outer method too: what is spent in it stays within the first part
    for _ in range(2):
        work.now += 100.0
        assert work.outer() == "done"
        work.now += 1000.0
        parts.end_turn()
    assert parts.turns == [{"outer": 1.0, "inner": 20.0, "rest": 1100.0}] * 2


def test_what_was_before_the_start_does_not_count() -> None:
    work = Work()
    parts = Parts("rest", clock=lambda: work.now)
    parts.wrap(work, "inner", "inner")
    work.inner()
    parts.start_turn()
    work.inner()
    parts.end_turn()
    assert parts.turns == [{"inner": 10.0, "rest": 0.0}]


def test_unwrapped_everything_is_as_before() -> None:
    work, before = Work(), dict(vars(Work))
    parts = Parts("rest", clock=lambda: work.now)
    parts.wrap(Work, "outer", "class")
    parts.wrap(work, "outer", "object")
    parts.wrap(work, "outer", "object, twice")
    parts.unwrap()
    assert dict(vars(Work)) == before and vars(work) == {"now": 0.0}
    work.outer()
    parts.end_turn()
    assert parts.turns == [{"rest": 21.0}]
