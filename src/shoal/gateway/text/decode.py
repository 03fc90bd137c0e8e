"""The text of one stream as its tokens arrive: whole characters at once, parts of a character when they are whole."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from shoal.gateway.text.tokenizer import Tokenizer

TAIL_TOKENS = 16  # more than the bytes of a character: the end of a prompt that can still matter


class IncrementalDecoder:
    """Joined, the pushed texts and `finish()` are what the tokens add to the text of the prompt before them.

    That is `decode(prompt + tokens)` without `decode(prompt)`. One difference to the library's whole-sequence decode,
    for sentencepiece byte tokens only: there, one bad byte turns its whole run of byte tokens into U+FFFD, also
    characters that a stream has long delivered; here only the bad bytes do.

    State for a replay: `pending` and `leading_spaces`; everything else comes from the arguments.
    """

    __slots__ = ("leading_spaces", "pending", "skip_special_tokens", "tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, prompt_tail: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        """`prompt_tail`: the whole prompt or its last TAIL_TOKENS ids; empty: the stream is a text's beginning."""
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.pending = b""  # the first bytes of a character whose last have not come
        self.leading_spaces = tokenizer.leading_spaces_dropped  # yet to be dropped, at the beginning of a text only
        for token_id in prompt_tail[-TAIL_TOKENS:]:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """What this token completes: "" for a part of a character and for a skipped special token."""
        if self.skip_special_tokens and self.tokenizer.is_special(token_id):
            return ""
        text, used = codecs.utf_8_decode(data := self.pending + self.tokenizer.token_bytes(token_id), "replace", False)
        self.pending = data[used:]
        if self.leading_spaces and text:
            text = self._without_leading_spaces(text)
        return text

    def finish(self) -> str:
        """What is left when no more tokens come: U+FFFD for a character that stayed incomplete, or ""."""
        text, _ = codecs.utf_8_decode(self.pending, "replace", True)
        self.pending = b""
        return text

    def _without_leading_spaces(self, text: str) -> str:
        kept = text.lstrip(" ")
        num_spaces = len(text) - len(kept)
        drop = min(num_spaces, self.leading_spaces)
        self.leading_spaces = 0 if kept else self.leading_spaces - drop
        return text[drop:]
