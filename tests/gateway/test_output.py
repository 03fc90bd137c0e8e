"""A choice's text and logprobs do not depend on how its tokens arrive, and stop exactly where they should."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shoal.core.plan import Logprobs
from shoal.core.request import Finish
from shoal.gateway.output import ChoiceOutput, Delta, Entry
from shoal.gateway.text.decode import IncrementalDecoder
from shoal.gateway.text.stop import StopMatcher
from shoal.gateway.text.tokenizer import Tokenizer
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def scores(tokens: list[int]) -> list[Logprobs]:
    return [Logprobs(-float(token), ()) for token in tokens]


def run(
    tokenizer: Tokenizer, tokens: list[int], stops: tuple[str, ...], pieces: list[int], *, include: bool = False
) -> tuple[str, list[Entry], str, int]:
    """Feeds the tokens in pieces of these sizes; (text, entries, finish reason, counted tokens)."""
    matcher = StopMatcher(stops, include_stop_str_in_output=include) if stops else None
    output = ChoiceOutput(0, IncrementalDecoder(tokenizer), matcher)
    deltas: list[Delta] = []
    start = 0
    for size in pieces:
        piece = tokens[start : start + size]
        start += size
        if output.finish is None and piece:
            delta = output.feed(piece, scores(piece), 0)
            deltas += [delta] if delta else []
    if output.finish is None:
        deltas.append(output.end(Finish.LENGTH))
    assert [delta.finish for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish == output.finish
    entries = [entry for delta in deltas for entry in delta.entries]
    return "".join(delta.text for delta in deltas), entries, str(output.finish), output.num_tokens


@pytest.mark.parametrize("include", [False, True])
def test_the_same_in_every_partition(tokenizer: Tokenizer, include: bool) -> None:
    rng = random.Random(7)
    alphabet = ["a", "b", "ab", "é", "😀", " the", "he"]
    for _ in range(400):
        text = "".join(rng.choices(alphabet, k=rng.randrange(1, 12)))
        tokens = tokenizer.encode(text)
        stops = tuple({"".join(rng.choices(alphabet, k=rng.randrange(1, 3))) for _ in range(rng.randrange(3))})
        whole = run(tokenizer, tokens, stops, [len(tokens)], include=include)
        single = run(tokenizer, tokens, stops, [1] * len(tokens), include=include)
        pieces = [rng.randrange(0, 4) for _ in range(len(tokens))] + [len(tokens)]
        assert whole == single == run(tokenizer, tokens, stops, pieces, include=include), (text, stops)
        ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
        if not ends:
            assert whole[0] == text and len(whole[1]) == whole[3] == len(tokens) and whole[2] == "length"
        else:
            stop = max((s for s in stops if text[: min(ends)].endswith(s)), key=len)
            assert whole[0] == text[: min(ends) - (0 if include else len(stop))]
            assert whole[2] == "stop"


def test_entries_are_those_of_the_text_that_was_sent(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("xyab")
    text, entries, _, _ = run(tokenizer, tokens, ("ab",), [1] * 4)
    assert text == "xy"
    assert [(entry.token, entry.offset) for entry in entries] == [(tokens[0], 0), (tokens[1], 1)]


def test_logprobs_of_withheld_text_wait_for_it(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("xac")
    output = ChoiceOutput(0, IncrementalDecoder(tokenizer), StopMatcher(("ab",)))
    assert output.feed(tokens[:1], scores(tokens[:1]), 0) == Delta(0, "x", (Entry(tokens[0], scores(tokens)[0], 0),))
    assert output.feed(tokens[1:2], scores(tokens[1:2]), 0) is None
    delta = output.feed(tokens[2:], scores(tokens[2:]), 0)
    assert delta is not None and delta.text == "ac"
    assert [entry.token for entry in delta.entries] == tokens[1:]


def test_a_part_of_a_character_waits_for_the_rest_and_ends_as_a_replacement(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("😀")
    assert len(tokens) == 4
    output = ChoiceOutput(0, IncrementalDecoder(tokenizer), None)
    assert [output.feed([token], scores([token]), 0) for token in tokens[:3]] == [None] * 3
    last = output.feed(tokens[3:], scores(tokens[3:]), 0)
    assert last is not None and last.text == "😀" and [entry.offset for entry in last.entries] == [0] * 4
    cut = ChoiceOutput(0, IncrementalDecoder(tokenizer), None)
    cut.feed(tokens[:3], scores(tokens[:3]), 0)
    end = cut.end(Finish.LENGTH)
    assert end.text == "\ufffd" and len(end.entries) == 3


def test_a_stop_token_is_counted_and_silent(tokenizer: Tokenizer) -> None:
    tokens = [*tokenizer.encode("x"), 2]
    output = ChoiceOutput(0, IncrementalDecoder(tokenizer), None)
    delta = output.feed(tokens, scores(tokens), 1)
    assert delta is not None and delta.text == "x" and len(delta.entries) == 1
    assert output.num_tokens == 2
    assert output.end(Finish.STOP) == Delta(0, "", (), "stop")


def test_a_held_beginning_of_a_stop_string_is_given_out_at_the_end(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("xa")
    assert run(tokenizer, tokens, ("ab",), [2])[0] == "xa"


def test_offsets_begin_after_an_echo(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokens = tokenizer.encode("xy")
    output = ChoiceOutput(0, IncrementalDecoder(tokenizer), None, offset=5)
    delta = output.feed(tokens, scores(tokens), 0)
    assert delta is not None and [entry.offset for entry in delta.entries] == [5, 6]


def test_a_stop_string_within_the_first_min_tokens_is_text(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a") * 6
    output = ChoiceOutput(0, IncrementalDecoder(tokenizer), StopMatcher(("aa",)), min_tokens=3)
    text = ""
    for token in tokens:
        delta = output.feed([token], [], 0)
        text += delta.text if delta else ""
        if output.finish is not None:
            break
    assert (text, output.finish, output.num_tokens) == ("aaa", "stop", 5)
