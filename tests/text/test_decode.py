"""Joined, the pieces of a stream are the text of the whole; no piece holds half a character."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from shoal.gateway.text.decode import TAIL_TOKENS, IncrementalDecoder
from shoal.gateway.text.tokenizer import Tokenizer
from tests.support.corpus import corpus, seeds
from tests.support.tiny_sentencepiece import FIRST_BYTE_ID, VOCAB, make_tiny_sentencepiece

SMOLLM_IDS = st.lists(st.integers(0, 49_151), max_size=40)
TEXTS = st.one_of(st.text(max_size=60), st.sampled_from(seeds()), st.text("é海🐟👩‍👩‍👧🏽한क्षทα \n", max_size=30))


def pieces(
    tokenizer: Tokenizer, token_ids: list[int], prompt: list[int] | None = None, *, skip: bool = True
) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, prompt or [], skip_special_tokens=skip)
    return [*(decoder.push(token_id) for token_id in token_ids), decoder.finish()]


@settings(max_examples=300, deadline=None)
@given(token_ids=SMOLLM_IDS, skip=st.booleans())
def test_any_ids_of_a_byte_level_vocabulary_give_the_whole_decode(
    byte_level: Tokenizer, token_ids: list[int], skip: bool
) -> None:
    whole = byte_level.decode(token_ids, skip_special_tokens=skip)
    assert "".join(pieces(byte_level, token_ids, skip=skip)) == whole


@pytest.fixture(scope="module")
def part_ids(byte_level: Tokenizer) -> list[int]:
    """The tokens that are parts of characters: sequences of them are mostly invalid."""
    return [n for n in range(byte_level.vocab_size) if not is_text(byte_level.token_bytes(n))]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_broken_utf8_becomes_the_same_replacement_characters(
    byte_level: Tokenizer, part_ids: list[int], data: st.DataObject
) -> None:
    token_ids = data.draw(st.lists(st.sampled_from(part_ids), max_size=12))
    assert "".join(pieces(byte_level, token_ids)) == byte_level.decode(token_ids)


def is_text(content: bytes) -> bool:
    return "\ufffd" not in content.decode("utf-8", "replace")


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, cut=st.integers(0, 60))
def test_text_comes_back_and_no_piece_holds_half_a_character(byte_level: Tokenizer, text: str, cut: int) -> None:
    token_ids = byte_level.encode(text, add_special_tokens=False)
    whole = byte_level.decode(token_ids, skip_special_tokens=False)
    deltas = pieces(byte_level, token_ids[cut:], token_ids[:cut], skip=False)
    before = "".join(pieces(byte_level, token_ids[:cut], skip=False)[:-1])  # a character begun there ends in the stream
    assert before + "".join(deltas) == whole
    assert "".join(deltas).count("\ufffd") == whole[len(before) :].count("\ufffd")


def test_each_token_is_given_out_as_soon_as_its_characters_are_whole(byte_level: Tokenizer) -> None:
    for line in corpus(500, seed=2):
        token_ids = byte_level.encode(line, add_special_tokens=False)
        deltas = pieces(byte_level, token_ids)
        seen = b""
        for count, token_id in enumerate(token_ids):
            seen += byte_level.token_bytes(token_id) if not byte_level.is_special(token_id) else b""
            assert "".join(deltas[: count + 1]) == seen.decode("utf-8", "ignore")


def test_the_library_streams_the_same_text(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    for tokenizer in (byte_level, sentencepiece):
        for line in corpus(300, seed=3):
            token_ids = tokenizer.encode(line)
            stream = DecodeStream(ids=[], skip_special_tokens=True)
            theirs = "".join(stream.step(tokenizer._backend, token_id) or "" for token_id in token_ids)
            ours = pieces(tokenizer, token_ids)
            assert "".join(ours[:-1]).rstrip("\ufffd") == theirs.rstrip("\ufffd"), repr(line)


@pytest.mark.parametrize("drop_space", [True, False])
def test_byte_fallback_texts_stream_to_the_whole_decode(tmp_path, drop_space: bool) -> None:
    tokenizer = Tokenizer.load(make_tiny_sentencepiece(tmp_path, drop_space=drop_space))
    for line in corpus(1000, seed=4):
        token_ids = tokenizer.encode(line)
        for skip in (True, False):
            whole = tokenizer.decode(token_ids, skip_special_tokens=skip)
            assert "".join(pieces(tokenizer, token_ids, skip=skip)) == whole, repr(line)


@settings(max_examples=300, deadline=None)
@given(token_ids=st.lists(st.integers(0, len(VOCAB) - 1), max_size=30), cut=st.integers(0, 30))
def test_any_ids_with_byte_fallback_are_their_bytes_read_as_utf8(
    sentencepiece: Tokenizer, token_ids: list[int], cut: int
) -> None:
    shown = [token_id for token_id in token_ids if not sentencepiece.is_special(token_id)]
    joined = b"".join(map(sentencepiece.token_bytes, shown)).decode("utf-8", "replace")
    text = "".join(pieces(sentencepiece, token_ids))
    assert text == joined.removeprefix(" ")
    if all(token_id >= FIRST_BYTE_ID + 256 for token_id in shown):  # no bytes, none broken: as the library has it
        assert text == sentencepiece.decode(token_ids)


def test_the_first_space_is_dropped_at_a_texts_beginning_only(sentencepiece: Tokenizer) -> None:
    bos, the = 1, VOCAB.index("\u2581the")
    assert "".join(pieces(sentencepiece, [the, the])) == "the the"
    assert "".join(pieces(sentencepiece, [the], [the])) == " the"
    assert "".join(pieces(sentencepiece, [the], [bos])) == "the"  # nothing but a special token before it
    assert "".join(pieces(sentencepiece, [bos, the])) == "the"
    two = VOCAB.index("\u2581\u2581")
    assert "".join(pieces(sentencepiece, [two, the])) == sentencepiece.decode([two, the]) == "  the"
    assert "".join(pieces(sentencepiece, [the], [the] * (2 * TAIL_TOKENS))) == " the"


def test_a_character_begun_in_the_prompt_is_finished_in_the_stream(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("a🤦b", add_special_tokens=False)
    assert len(token_ids) == 5
    assert pieces(byte_level, token_ids[2:], token_ids[:2]) == ["", "🤦", "b", ""]


def test_an_unfinished_character_is_shown_at_the_end_only(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("x🤦", add_special_tokens=False)
    decoder = IncrementalDecoder(byte_level)
    assert [decoder.push(token_id) for token_id in token_ids[:-1]] == ["x", "", ""]
    assert decoder.finish() == "\ufffd" == byte_level.decode(token_ids[:-1])[1:]
    assert decoder.finish() == ""


def test_special_tokens_are_skipped_unless_asked_for(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("hi<|im_end|>", add_special_tokens=False)
    assert "".join(pieces(byte_level, token_ids)) == "hi"
    assert "".join(pieces(byte_level, token_ids, skip=False)) == "hi<|im_end|>"


def test_a_copy_goes_on_alike(byte_level: Tokenizer) -> None:
    """What a replay does: the same state and the same tokens give the same text."""
    token_ids = byte_level.encode("one 🤦🏽‍♂️ two", add_special_tokens=False)
    for cut in range(len(token_ids)):
        first = IncrementalDecoder(byte_level)
        head = "".join(map(first.push, token_ids[:cut]))
        rebuilt = IncrementalDecoder(byte_level)
        rebuilt.pending, rebuilt.leading_spaces = first.pending, first.leading_spaces
        for decoder in (copy.copy(first), rebuilt):
            tail = "".join(map(decoder.push, token_ids[cut:])) + decoder.finish()
            assert head + tail == "one 🤦🏽‍♂️ two"
