"""Stop strings in a text that arrives in pieces.

The match that *ends* first wins, and of those that end at the same character the one that starts first, the longest.
So the outcome depends on the text alone, never on how it was cut into pieces, and no token is waited for once a
stop string is complete. One automaton for all strings (Aho and Corasick, 1975) makes the work linear in the text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """State for a replay: `held` and `stopped_by`; a fresh matcher that is pushed `held` continues exactly."""

    __slots__ = ("_depths", "_fallbacks", "_matches", "_next", "_node", "held", "include", "stopped_by")

    def __init__(self, stops: Sequence[str], *, include_stop_str_in_output: bool = False) -> None:
        """`stops`: none is empty (ValueError). With `include_stop_str_in_output` the text is cut after the match."""
        if not all(stops):
            raise ValueError("a stop string is empty")
        self.include = include_stop_str_in_output
        self.held = ""  # the longest end of the text that a stop string could begin with; not given out yet
        self.stopped_by: str | None = None
        self._node = 0
        self._build(stops)

    def push(self, text: str) -> tuple[str, bool]:
        """(text to give out, stopped?). Once stopped, nothing more is given out."""
        if self.stopped_by is not None:
            return "", True
        if len(self._next) == 1:
            return text, False
        node = self._node
        for index, character in enumerate(text):
            while node and character not in self._next[node]:
                node = self._fallbacks[node]
            node = self._next[node].get(character, 0)
            if match := self._matches[node]:
                return self._stop(self.held + text[: index + 1], match)
        self._node = node
        buffered = self.held + text
        cut = len(buffered) - self._depths[node]
        self.held = buffered[cut:]
        return buffered[:cut], False

    def finish(self) -> str:
        """The held text, when no more comes: it was no stop string after all."""
        text, self.held, self._node = self.held, "", 0
        return text

    def _stop(self, buffered: str, match: str) -> tuple[str, bool]:
        self.stopped_by = match
        self.held = ""
        return (buffered if self.include else buffered[: -len(match)]), True

    def _build(self, stops: Sequence[str]) -> None:
        """Nodes are prefixes of the stop strings; node 0 is the empty one."""
        self._next: list[dict[str, int]] = [{}]
        self._matches = [""]  # the longest stop string that the node's prefix ends with
        self._depths = [0]  # length of the prefix
        for stop in stops:
            node = 0
            for character in stop:
                if character not in self._next[node]:
                    self._next[node][character] = len(self._next)
                    self._next.append({})
                    self._matches.append("")
                    self._depths.append(self._depths[node] + 1)
                node = self._next[node][character]
            self._matches[node] = stop
        self._fallbacks = [0] * len(self._next)  # the longest other node that the prefix ends with
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self._next[node].items():
                fallback = self._fallbacks[node]
                while fallback and character not in self._next[fallback]:
                    fallback = self._fallbacks[fallback]
                self._fallbacks[child] = self._next[fallback].get(character, 0)
                self._matches[child] = self._matches[child] or self._matches[self._fallbacks[child]]
                queue.append(child)
