"""The rules by which processes are started again and counted as alive."""

from __future__ import annotations

import pytest

from shoal.fleet import health
from shoal.fleet.lifecycle import SECOND_NS, TRANSITIONS, Life, Restarts


def waits(*lives_s: float) -> list[float | None]:
    """Seconds to wait after each death of a process that lived so long each time."""
    restarts, now_ns, found = Restarts(), 0, []
    for life_s in lives_s:
        restarts.started(now_ns)
        now_ns += int(life_s * SECOND_NS)
        wait_ns = restarts.died(now_ns)
        found.append(None if wait_ns is None else wait_ns / SECOND_NS)
        now_ns += wait_ns or 0
    return found


@pytest.mark.parametrize(
    ("lives_s", "expected"),
    [
        ((0.1,) * 5, [1, 2, 4, 8, None]),  # five deaths within 16 s: a crash loop
        ((11,) * 5, [1, 2, 4, 8, None]),  # deaths at 11, 23, 36, 51 and 70 s: 59 s from the first to the fifth
        ((12,) * 5, [1, 2, 4, 8, 16]),  # at 12, 25, 39, 55 and 75 s: 63 s
        ((20,) * 8, [1, 2, 4, 8, 16, 30, 30, 30]),
        ((5, 5, 100, 5), [1, 2, 1, 2]),  # a long life starts the count again
        ((59.9, 59.9), [1, 2]),
    ],
)
def test_back_off_and_crash_loops(lives_s: tuple[float, ...], expected: list[float | None]) -> None:
    assert waits(*lives_s) == expected


def test_every_state_can_reach_stopped_and_nothing_leaves_it() -> None:
    assert set(TRANSITIONS) == set(Life)
    assert not TRANSITIONS[Life.STOPPED]
    for state in set(Life) - {Life.STOPPED}:
        seen, left = set(), [state]
        while left:
            seen.add(at := left.pop())
            left += TRANSITIONS[at] - seen
        assert Life.STOPPED in seen


def test_silence_has_a_floor_and_grows_with_the_announced_step() -> None:
    second = 1_000_000_000
    assert [health.suspect_after_ns(s) / second for s in (0, second // 10, second)] == [1.5, 1.5, 3.0]
    assert [health.dead_after_ns(s) / second for s in (0, second // 10, second)] == [3.0, 3.0, 5.0]
    assert health.stuck_after_ns(0) > health.dead_after_ns(0) > health.suspect_after_ns(0)
    assert not health.expired(0, 5 * second)
    assert health.expired(0, 5 * second + 1)
