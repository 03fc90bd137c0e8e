"""When two greedy texts count as different."""

from __future__ import annotations

import math

import pytest

from peers.agreement import Step, compare, steps


def test_margins_are_read_from_a_completions_logprobs() -> None:
    found = steps(
        {
            "tokens": [" Rome", ".", "!"],
            "top_logprobs": [{" Paris": math.log(0.2), " Rome": math.log(0.7)}, {".": math.log(0.5)}, {}],
        }
    )
    assert [step.token for step in found] == [" Rome", ".", "!"]
    assert [step.margin for step in found] == pytest.approx([0.5, 0.5, 0.0])


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ([("a", 0.9), ("b", 0.5), ("c", 0.02)], "equal, 3 tokens"),
        ([("a", 0.9), ("b", 0.5)], "equal, 2 tokens"),
        ([("a", 0.9), ("x", 0.5)], "DIFFERENT: after 1 equal tokens 'b' against 'x', margins 0.400 and 0.500"),
        ([("a", 0.9), ("x", 0.05)], "near tie: after 1 equal tokens 'b' against 'x', margins 0.400 and 0.050"),
        (
            [("a", 0.9), ("b", 0.5), ("x", 0.9)],
            "near tie: after 2 equal tokens 'c' against 'x', margins 0.010 and 0.900",
        ),
    ],
)
def test_only_a_first_difference_with_clear_margins_counts(theirs: list[tuple[str, float]], says: str) -> None:
    ours = [Step("a", 0.9), Step("b", 0.4), Step("c", 0.01)]
    assert compare(ours, [Step(*step) for step in theirs]) == says
