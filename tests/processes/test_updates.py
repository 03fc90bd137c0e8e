"""Events become updates, and merged updates say what the single ones said."""

from __future__ import annotations

import random
from functools import reduce

import pytest

from shoal.core.plan import Ended, Event, Logprobs, Parked, Preempted, PromptScored, Resumed, Started, Token
from shoal.core.request import Finish
from shoal.engine.updates import Updates, merge
from shoal.wire.messages import Ending, Update


def scores(count: int) -> list[Logprobs]:
    return [Logprobs(-float(n), ((n, -float(n)),)) for n in range(count)]


def story(num_prompt: int, num_tokens: int) -> list[Event]:
    events: list[Event] = [PromptScored("a", start, scores(2)) for start in range(1, num_prompt, 2)]
    events += [Token("a", n, 100 + n, Logprobs(-1.0, ())) for n in range(num_tokens)]
    events.insert(2, Preempted("a", 3))
    return [Started("a", 7), *events, Ended("a", Finish.STOP, 7, num_tokens, 16)]


def updates_of(events: list[Event], message: str = "") -> list[Update]:
    updates = Updates(message)
    updates.add_all(events)
    return updates.finished()


@pytest.mark.parametrize("seed", range(50))
def test_however_the_events_are_spread_over_turns_the_merged_update_is_the_same(seed: int) -> None:
    chance = random.Random(seed)
    events = story(chance.randint(0, 9), chance.randint(1, 9))
    for kind in chance.choices((Parked("a"), Resumed("a", 5)), k=chance.randrange(4)):
        events.insert(chance.randrange(3, len(events)), kind)
    (whole,) = updates_of(events)
    cuts = sorted(chance.sample(range(1, len(events)), k=min(3, len(events) - 1)))
    parts = [events[a:b] for a, b in zip([0, *cuts], [*cuts, len(events)], strict=True)]
    singles = [update for part in parts for update in updates_of(part)]
    assert reduce(merge, singles) == whole


def test_streams_keep_apart_and_errors_carry_the_message() -> None:
    found = updates_of(
        [Token("a", 4, 1, None), Token("b", 0, 2, None), Ended("b", Finish.ERROR, None, 1, 0), Token("a", 5, 3, None)],
        "down",
    )
    assert found == [
        Update("a", 4, (1, 3)),
        Update("b", 0, (2,), ending=Ending(Finish.ERROR, None, 0, "down")),
    ]


def test_a_stream_is_told_how_long_it_waited_and_whether_it_is_parked() -> None:
    updates = Updates()
    updates.add_all([Started("a", 70), Started("b", 0), Token("a", 0, 1, None), Preempted("a", 3)])
    updates.add_all([Parked("c"), Resumed("c", 90), Parked("d")])
    assert updates.finished() == [
        Update("a", 0, (1,), waited_ns=70, parked=True),
        Update("b", 0, (), waited_ns=0),
        Update("c", 0, (), parked=False),  # the last word counts
        Update("d", 0, (), parked=True),
    ]
    assert updates.waits == [Started("a", 70), Started("b", 0), Resumed("c", 90)]


def test_a_hole_in_the_token_indices_is_a_fault_of_ours() -> None:
    with pytest.raises(AssertionError):
        updates_of([Token("a", 0, 1, None), Token("a", 2, 1, None)])
