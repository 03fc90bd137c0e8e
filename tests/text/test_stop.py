"""Stop strings, however the text is cut into pieces: as a naive search over the whole text finds them."""

from __future__ import annotations

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.gateway.text.stop import StopMatcher

ALPHABET = "ab海"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4)
PIECES = st.lists(st.text(ALPHABET, max_size=6), max_size=12)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """(text before the match, the match): the first end of any stop string, and there the longest."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(matcher: StopMatcher, pieces: list[str]) -> str:
    out = ""
    for piece in pieces:
        emit, stopped = matcher.push(piece)
        out += emit
        if stopped:
            return out
    return out + matcher.finish()


@settings(max_examples=600, deadline=None)
@given(stops=STOPS, pieces=PIECES)
def test_any_pieces_give_what_the_naive_search_gives(stops: list[str], pieces: list[str]) -> None:
    before, match = naive("".join(pieces), stops)
    matcher = StopMatcher(stops)
    assert (run(matcher, pieces), matcher.stopped_by) == (before, match)
    matcher = StopMatcher(stops, include_stop_str_in_output=True)
    assert (run(matcher, pieces), matcher.stopped_by) == (before + (match or ""), match)


@settings(max_examples=400, deadline=None)
@given(stops=STOPS, pieces=PIECES)
def test_what_is_held_back_is_the_longest_possible_beginning_and_no_more(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    text, given_out = "", ""
    for piece in pieces:
        text += piece
        emit, stopped = matcher.push(piece)
        given_out += emit
        if stopped:
            return
        beginnings = [text[start:] for start in range(len(text)) if any(s.startswith(text[start:]) for s in stops)]
        assert matcher.held == max(beginnings, key=len, default="")
        assert given_out + matcher.held == text


@pytest.mark.parametrize(
    ("stops", "pieces", "before", "match"),
    [
        (["END"], ["say E", "N", "D", " more"], "say ", "END"),
        (["END"], ["say EN", "EN", "D"], "say EN", "END"),
        (["END"], ["say EN"], "say EN", None),
        (["\n\n"], ["a\n", "b\n", "\n", "c"], "a\nb", "\n\n"),
        (["abcd", "bc"], ["abcd"], "a", "bc"),  # the first to end, although the other starts before it
        (["abc", "bc"], ["xabc"], "x", "abc"),  # both end here: the longer
        (["aab"], ["aaa", "aab"], "aaa", "aab"),
        (["👩‍👩‍👧"], ["x👩‍👩", "‍👧y"], "x", "👩‍👩‍👧"),
        (["a", "a"], ["ba"], "b", "a"),
        ([], ["anything", " goes"], "anything goes", None),
    ],
)
def test_examples(stops: list[str], pieces: list[str], before: str, match: str | None) -> None:
    matcher = StopMatcher(stops)
    assert (run(matcher, pieces), matcher.stopped_by) == (before, match)


def test_nothing_is_given_out_after_a_stop() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.push("axb") == ("a", True)
    assert matcher.push("more") == ("", True)
    assert matcher.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="a stop string is empty"):
        StopMatcher(["a", ""])


def test_a_replay_goes_on_alike() -> None:
    """From a copy, and from `held` alone."""
    text, stops = "ab abab ababc", ["ababc", "abd"]
    for cut in range(len(text)):
        matcher = StopMatcher(stops)
        head, _ = matcher.push(text[:cut])
        rebuilt = StopMatcher(stops)
        assert rebuilt.push(matcher.held) == ("", False)
        for other in (copy.copy(matcher), rebuilt):
            assert head + run(other, [text[cut:]]) == "ab abab "


class CountingDict(dict[str, int]):
    lookups = 0

    def __contains__(self, key: object) -> bool:
        CountingDict.lookups += 1
        return super().__contains__(key)

    def get(self, key: str, default: int = 0) -> int:  # type: ignore[override]
        CountingDict.lookups += 1
        return super().get(key, default)


@pytest.mark.parametrize("piece", [1, 4, 1000])
def test_a_megabyte_of_near_misses_takes_linear_work(piece: int) -> None:
    """16 stop strings of 256 characters that the text all but matches: at most three look-ups a character."""
    stops = ["a" * (240 + n) + "b" * (16 - n) for n in range(16)]
    rng = random.Random(0)
    text = "".join("a" * rng.randint(1, 600) + "bc"[rng.random() < 0.5] for _ in range(3500))
    text = text.replace("ab", "ac")[: 1 << 20]
    assert len(text) > 1_000_000 and naive_has_none(text, stops)
    matcher = StopMatcher(stops)
    matcher._next = [CountingDict(node) for node in matcher._next]
    CountingDict.lookups = 0
    assert run(matcher, [text[start : start + piece] for start in range(0, len(text), piece)]) == text
    assert CountingDict.lookups <= 3 * len(text)


def naive_has_none(text: str, stops: list[str]) -> bool:
    return not any(stop in text for stop in stops)
