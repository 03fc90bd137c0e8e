"""A model folder's tokenizer.json: text to ids as Hugging Face transformers makes them, and each id's bytes.

The two kinds that language models use are known: byte-level BPE (each character of a token stands for a byte), and
sentencepiece in Hugging Face's form (U+2581 for a space, `<0x0A>` for a byte without a token of its own). With them a
token *is* a byte string, and the text of a sequence is those bytes joined and read as UTF-8.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE_MARK = "\u2581"


class TokenizerError(Exception):
    """The model folder's tokenizer is missing, broken or of a kind not known."""


class Tokenizer:
    """Immutable after loading, safe to use from several threads. `encode` releases the GIL while it works."""

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any], eos_token_ids: tuple[int, ...]) -> None:
        """`config` is tokenizer_config.json's content; `eos_token_ids` those named outside it."""
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self.special_tokens = named_special_tokens(config)
        own_eos = self.token_id(self.special_tokens.get("eos_token", ""))
        self.eos_token_ids = tuple(dict.fromkeys((*eos_token_ids, *(() if own_eos is None else (own_eos,)))))

        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self._bytes: list[bytes | None] = [None] * self.vocab_size
        self.byte_level, self.leading_spaces_dropped = _decoder_kind(backend)

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Raises TokenizerError."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path} is missing")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{path} cannot be read: {error}") from error
        return cls(backend, read_json(model_dir / "tokenizer_config.json"), _eos_token_ids(model_dir))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; with `add_special_tokens` the BOS (and EOS) that tokenizer.json adds, if it does.

        As in transformers, `add_bos_token` of tokenizer_config.json has no say beside a tokenizer.json. Special tokens
        spelled out in the text become those tokens. Raises ValueError for text that is not Unicode (half of a
        surrogate pair).
        """
        try:  # as a batch of one, because the single call holds the GIL
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:
            raise ValueError("the text holds half of a surrogate pair, which is not Unicode text") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; ids that stand for nothing are left out, broken UTF-8 becomes U+FFFD."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def is_special(self, token_id: int) -> bool:
        """True for tokens that are never part of an answer's text: BOS, EOS, role marks."""
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text's bytes, possibly a part of a character; b"" for an id that stands for nothing.

        A special token gives its name. A leading space is kept, also where a decoder drops it at a text's beginning.
        """
        if not 0 <= token_id < self.vocab_size:
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """The token by itself, as `/tokenize` shows it: part of a character is U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            try:
                return bytes(BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:  # not in the byte alphabet: the decoder takes it as it is
                return token.encode()
        if match := BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(SPACE_MARK, " ").encode()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} where there is no file. Raises TokenizerError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} holds no JSON object")
    return content


def named_special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` … of tokenizer_config.json; each is a string there, or an object with its content."""
    named = {}
    for name in SPECIAL_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            named[name] = value
    return named


def _eos_token_ids(model_dir: Path) -> tuple[int, ...]:
    config = read_json(model_dir / "config.json")
    places = (read_json(model_dir / "generation_config.json"), config, config.get("text_config") or {})
    for place in places:
        if (value := place.get("eos_token_id")) is not None:
            ids = tuple(value) if isinstance(value, list) else (value,)
            if not all(type(id) is int and 0 <= id < 1 << 31 for id in ids):
                raise TokenizerError(f"{model_dir}: eos_token_id is {value!r}; must be a token id or a list of them")
            return ids
    return ()


def _decoder_kind(backend: tokenizers.Tokenizer) -> tuple[bool, int]:
    """(byte-level?, how many leading spaces decoding drops). Raises TokenizerError for another kind."""
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    parts = decoder.get("decoders", [decoder])
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"]:
        return True, 0
    if "Replace" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return False, sum(part["start"] for part in parts if part["type"] == "Strip")
    raise TokenizerError(f"tokenizer of an unknown kind (decoder {kinds}): known are byte-level BPE and sentencepiece")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of the 256 bytes: printable Latin-1 stands for itself, the others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()
