"""Events of one turn, grouped by stream; and updates of several turns, merged for a gateway that was slow to read."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.core.plan import Ended, Event, Logprobs, Parked, Preempted, PromptScored, Resumed, Started, Token
from shoal.core.request import Finish
from shoal.wire.messages import Ending, Update


class Updates:
    """Collects events in order; a stream's events of one turn become one Update."""

    def __init__(self, message: str = "") -> None:
        self.message = message  # goes with every ending that is an error
        self.waits: list[Started | Resumed] = []  # those that got a slice after a wait
        self._streams: dict[str, _Stream] = {}

    def add_all(self, events: Iterable[Event]) -> None:
        for event in events:
            stream = self._stream(event.id)
            if isinstance(event, Token):
                stream.add_token(event)
            elif isinstance(event, PromptScored):
                stream.add_scores(event)
            elif isinstance(event, Ended):
                stream.ended = event
            elif isinstance(event, Started):
                stream.waited_ns = event.waited_ns
                self.waits.append(event)
            elif isinstance(event, Resumed):
                stream.parked = False
                self.waits.append(event)
            elif isinstance(event, Preempted | Parked):
                stream.parked = True

    def finished(self) -> list[Update]:
        return [stream.update(self.message) for stream in self._streams.values()]

    def _stream(self, id: str) -> _Stream:
        stream = self._streams.get(id)
        if stream is None:
            stream = self._streams[id] = _Stream(id)
        return stream


class _Stream:
    __slots__ = (
        "ended", "id", "index", "logprobs", "parked", "prompt_logprobs", "prompt_start", "tokens", "waited_ns",
    )  # fmt: skip

    def __init__(self, id: str) -> None:
        self.id = id
        self.index = 0
        self.tokens: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.prompt_start = 0
        self.prompt_logprobs: list[Logprobs] = []
        self.ended: Ended | None = None
        self.waited_ns: int | None = None
        self.parked: bool | None = None

    def add_token(self, event: Token) -> None:
        if not self.tokens:
            self.index = event.index
        assert event.index == self.index + len(self.tokens), event
        self.tokens.append(event.token)
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)

    def add_scores(self, event: PromptScored) -> None:
        if not self.prompt_logprobs:
            self.prompt_start = event.start
        self.prompt_logprobs += event.entries

    def update(self, message: str) -> Update:
        ended = self.ended
        ending = None
        if ended is not None:
            text = message if ended.reason is Finish.ERROR else ""
            ending = Ending(ended.reason, ended.stop_token, ended.cached_tokens, text)
        return Update(
            self.id,
            self.index,
            tuple(self.tokens),
            tuple(self.logprobs),
            self.prompt_start,
            tuple(self.prompt_logprobs),
            ending,
            self.waited_ns,
            self.parked,
        )


def merge(earlier: Update, later: Update) -> Update:
    """One update that says what both say; `later` continues where `earlier` stopped."""
    return Update(
        id=earlier.id,
        index=earlier.index if earlier.tokens else later.index,
        tokens=earlier.tokens + later.tokens,
        logprobs=earlier.logprobs + later.logprobs,
        prompt_start=earlier.prompt_start if earlier.prompt_logprobs else later.prompt_start,
        prompt_logprobs=earlier.prompt_logprobs + later.prompt_logprobs,
        ending=later.ending,
        waited_ns=later.waited_ns if earlier.waited_ns is None else earlier.waited_ns,
        parked=earlier.parked if later.parked is None else later.parked,
    )
