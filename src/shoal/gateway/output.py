"""What one choice says so far: token ids in, text to send out, with logprobs kept back as long as their text is."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.core.plan import Logprobs
from shoal.core.request import Finish
from shoal.gateway.text.decode import IncrementalDecoder
from shoal.gateway.text.stop import StopMatcher


class Entry(NamedTuple):
    """One token for a logprobs list."""

    token: int
    logprobs: Logprobs | None  # None: the first token of a prompt, which nothing precedes
    offset: int  # characters of text before it


class Delta(NamedTuple):
    choice: int  # of the client request
    text: str
    entries: tuple[Entry, ...] = ()
    finish: str | None = None  # "stop" or "length" in the last delta of the choice


@dataclass(slots=True)
class _Held:
    entry: Entry
    end: int | None  # characters of text after it; None: its text is not whole yet


class ChoiceOutput:
    """Counts every token, stop tokens too. Text and logprobs stop before a stop string or a stop token."""

    def __init__(
        self,
        choice: int,
        decoder: IncrementalDecoder,
        stops: StopMatcher | None,
        *,
        offset: int = 0,
        min_tokens: int = 0,
    ) -> None:
        """`offset`: characters that precede the output in the text that the client sees (an echoed prompt).

        `min_tokens`: the text of so many tokens is not searched for stop strings, as in vLLM.
        """
        self.choice = choice
        self.num_tokens = 0
        self.finish: str | None = None
        self._decoder = decoder
        self._stops = stops
        self._min_tokens = min_tokens
        self._num_decoded = offset
        self._num_emitted = offset
        self._held: deque[_Held] = deque()

    def feed(self, tokens: Sequence[int], logprobs: Sequence[Logprobs], num_silent: int) -> Delta | None:
        """`num_silent`: so many tokens at the end are no text. Where a stop string was found, `finish` is set."""
        text = ""
        last_spoken = len(tokens) - num_silent
        for position, token in enumerate(tokens):
            self.num_tokens += 1
            if position >= last_spoken:
                continue
            if logprobs:
                self._held.append(_Held(Entry(token, logprobs[position], self._num_decoded), None))
            text += self._say(self._decoder.push(token))
            if self.finish is not None:
                break
        entries = self._due()
        if text or entries or self.finish:
            return Delta(self.choice, text, entries, self.finish)
        return None

    def end(self, reason: Finish) -> Delta:
        """No more tokens come. What was held back was no stop string after all, or is one now."""
        text = self._say(self._decoder.finish())
        if self.finish is None:
            if self._stops is not None:
                rest = self._stops.finish()
                self._num_emitted += len(rest)
                text += rest
            self.finish = "length" if reason is Finish.LENGTH else "stop"
            for held in self._held:
                held.end = self._num_emitted
        return Delta(self.choice, text, self._due(), self.finish)

    def _say(self, text: str) -> str:
        """What of the newly decoded text may be sent."""
        if not text:
            return ""
        self._num_decoded += len(text)
        for held in reversed(self._held):
            if held.end is not None:
                break
            held.end = self._num_decoded
        stopped = False
        if self._stops is not None and self.num_tokens > self._min_tokens:
            text, stopped = self._stops.push(text)
        self._num_emitted += len(text)
        if stopped:
            self.finish = "stop"
        return text

    def _due(self) -> tuple[Entry, ...]:
        """Entries whose text has been sent; after a stop string also those that it cut in two."""
        due = []
        while self._held:
            held = self._held[0]
            if held.end is None or held.end > self._num_emitted:
                break
            due.append(self._held.popleft().entry)
        while self.finish is not None and self._held and self._held[0].entry.offset < self._num_emitted:
            due.append(self._held.popleft().entry)
        return tuple(due)
