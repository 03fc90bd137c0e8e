"""Ids and text are those of transformers; bytes of the tokens join to the text; what cannot be used is refused."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from shoal.gateway.text.tokenizer import Tokenizer, TokenizerError
from tests.support.corpus import corpus
from tests.support.default_model import default_model
from tests.support.tiny_model import make_tiny_model
from tests.support.tiny_sentencepiece import FIRST_BYTE_ID, VOCAB, make_tiny_sentencepiece


def test_the_corpus_is_what_it_claims() -> None:
    lines = corpus()
    assert len(lines) == 2000 and len(set(lines)) > 1900
    scripts = "aé海港の한كשबতதทфλა🐟\u200d\x00\u202e\u3000"
    assert all(any(character in line for line in lines) for character in scripts)
    assert lines == corpus()


def assert_parity(folder: Path, num_lines: int = 2000) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.load(folder)
    for line in corpus(num_lines):
        for special in (True, False):
            token_ids = ours.encode(line, add_special_tokens=special)
            assert token_ids == theirs.encode(line, add_special_tokens=special), repr(line)
            for skip in (True, False):
                text = theirs.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert ours.decode(token_ids, skip_special_tokens=skip) == text, repr(line)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.vocab_size == len(theirs)


@pytest.mark.torch
def test_parity_with_transformers_on_two_thousand_lines_for_the_default_model() -> None:
    assert_parity(default_model())


@pytest.mark.torch
@pytest.mark.parametrize("drop_space", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": False, "add_eos_token": True},
        {"bos_token": None},
        {"bos_token": {"__type": "AddedToken", "content": "</s>"}},
    ],
)
def test_parity_with_transformers_for_byte_fallback_and_every_rule_of_bos(
    tmp_path: Path, drop_space: bool, config: dict[str, Any]
) -> None:
    assert_parity(make_tiny_sentencepiece(tmp_path, drop_space=drop_space, config=config), num_lines=500)


def test_token_bytes_join_to_the_text(byte_level: Tokenizer) -> None:
    for line in corpus(400, seed=1):
        token_ids = byte_level.encode(line, add_special_tokens=False)
        assert b"".join(map(byte_level.token_bytes, token_ids)) == line.encode()


def test_byte_fallback_tokens_are_their_bytes(sentencepiece: Tokenizer) -> None:
    for line in corpus(400, seed=1):
        if "\u2581" in line or "<" in line:  # the mark itself reads as a space, and special tokens are cut out
            continue
        token_ids = sentencepiece.encode(line, add_special_tokens=False)
        assert b"".join(map(sentencepiece.token_bytes, token_ids)) == b" " + line.encode()
    assert sentencepiece.token_bytes(FIRST_BYTE_ID + 0x0A) == b"\n"
    assert sentencepiece.token_bytes(VOCAB.index("\u2581the")) == b" the"
    assert sentencepiece.token_text(FIRST_BYTE_ID + 0xE6) == "\ufffd"
    assert sentencepiece.token_text(sentencepiece.eos_token_ids[0]) == "</s>"


def test_api_04_partial_characters_have_their_own_bytes(byte_level: Tokenizer) -> None:
    """Joined, the bytes are the text; alone, no token's text is empty."""
    token_ids = byte_level.encode(" 😀", add_special_tokens=False)
    assert len(token_ids) > 1
    assert b"".join(map(byte_level.token_bytes, token_ids)).decode() == " 😀"
    assert list(byte_level.token_bytes(token_ids[0]))[:2] == [0x20, 0xF0]
    assert all(byte_level.token_text(token_id) for token_id in range(byte_level.vocab_size))


def test_ids_that_stand_for_nothing(tmp_path: Path) -> None:
    """Models pad their vocabulary: such an id can be sampled and must spell nothing."""
    tokenizer = Tokenizer.load(make_tiny_model(tmp_path / "tiny"))
    for token_id in (tokenizer.vocab_size, 10**9, -1):
        assert tokenizer.token_bytes(token_id) == b""
        assert tokenizer.token_text(token_id) == ""
        assert not tokenizer.is_special(token_id)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [7, 0]}, {"eos_token_id": 5}, (7, 0, 2)),
        ({"eos_token_id": 2}, {}, (2,)),
        ({}, {"eos_token_id": 5}, (5, 2)),
        ({}, {"text_config": {"eos_token_id": [5]}}, (5, 2)),
        (None, {}, (2,)),
    ],
)
def test_eos_ids_come_from_generation_config_then_config_then_the_tokenizer(
    tmp_path: Path, generation: dict[str, Any] | None, config: dict[str, Any], expected: tuple[int, ...]
) -> None:
    folder = make_tiny_sentencepiece(tmp_path)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert Tokenizer.load(folder).eos_token_ids == expected


def test_half_a_surrogate_pair_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        byte_level.encode("a\ud83dz")


def test_truncation_and_padding_in_the_file_are_not_applied(tmp_path: Path) -> None:
    folder = make_tiny_sentencepiece(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        **{"strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None},
        **{"pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert len(Tokenizer.load(folder).encode("abcdefgh")) == 9  # BOS and eight characters


def test_other_threads_run_while_a_long_text_is_encoded(byte_level: Tokenizer) -> None:
    """The gateway encodes long prompts beside its event loop: that only helps where the GIL is free."""
    text = "the quick brown fox 海港 " * 20_000
    ticks = 0
    done = threading.Event()

    def encode() -> None:
        byte_level.encode(text)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not done.wait(0.001):
        ticks += 1
    thread.join()
    assert ticks > 10


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json cannot be read"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{"), "tokenizer_config.json cannot be read"),
        (lambda folder: (folder / "generation_config.json").write_text("[]"), "holds no JSON object"),
        (lambda folder: set_decoder(folder, {"type": "WordPiece", "prefix": "##", "cleanup": True}), "unknown kind"),
        (lambda folder: set_decoder(folder, None), "unknown kind"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_says_why(tmp_path: Path, spoil: Any, reason: str) -> None:
    folder = make_tiny_sentencepiece(tmp_path)
    spoil(folder)
    with pytest.raises(TokenizerError, match=reason):
        Tokenizer.load(folder)


def set_decoder(folder: Path, decoder: dict[str, Any] | None) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | {"decoder": decoder}))


@pytest.mark.parametrize("value", ["x", -1, 1 << 31, 1.5, True, [["x"]], {"a": 1}])
def test_end_tokens_are_token_ids(tmp_path: Path, value: Any) -> None:
    folder = make_tiny_model(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(TokenizerError, match="eos_token_id is"):
        Tokenizer.load(folder)


def test_json_nested_without_end_is_an_error(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text('{"a":' * 100_000)
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer.load(folder)
