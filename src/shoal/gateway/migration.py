"""Migrates a stream to another replica: its KV is brought there while it goes on here, then it goes on there.

    prefetch what is there so far ──► little is missing ──► the old replica drops it, the new one gets a replay
         ▲                       │
         └── much was added ─────┘

The last tokens are computed again, which takes no longer than a step. Until the hand-over nothing has changed: where
the new replica cannot take it, or is lost, the request stays where it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum

from shoal.core.request import Peer, RequestSpec
from shoal.gateway.link import EngineLink
from shoal.wire.messages import Refusing, Update

MAX_ROUNDS = 4
FEW_TOKENS = 20  # are computed again at once; more are fetched, as long as each round leaves fewer
MANY_TOKENS = 256  # would make a pause; the request rather stays where it is

_numbers = itertools.count(1)


class Outcome(StrEnum):
    """How a migration ended."""

    MIGRATED = "migrated"
    REFUSED = "refused"  # the new replica takes nothing
    LOST = "lost"  # it, or the way to it
    NOT_FETCHED = "not_fetched"  # too little of the KV came
    ENDED = "ended"  # the request was over before


class Migration:
    """Of all open choices of one prompt. `progress` says what they are now: specs with all tokens so far as prompt."""

    def __init__(
        self,
        source: EngineLink,
        target: EngineLink,
        progress: Callable[[], Sequence[RequestSpec]],
        done: Callable[[Outcome], None],
    ) -> None:
        """`done` is called once, with MIGRATED when the hand-over is due."""
        self.source = source
        self.target = target
        self.outcome: Outcome | None = None
        self._progress = progress
        self._done = done
        self._round = 0
        self._waits: dict[int, str] = {}  # choice -> id of its prefetch
        self._here: dict[int, int] = {}  # choice -> tokens that are at the target
        self._missing = 0  # after the round before

    def begin(self) -> None:
        self._prefetch(self._progress())

    def _prefetch(self, specs: Sequence[RequestSpec]) -> None:
        info = self.source.info
        if not specs:
            return self._end(Outcome.ENDED)
        if info is None:
            return self._end(Outcome.LOST)
        self._round += 1
        suffix = f".m{next(_numbers)}"
        prefetches = [
            replace(
                spec,
                id=spec.id + suffix,
                max_tokens=0,
                output=(),
                min_tokens=0,
                leader=None,
                sampling=replace(spec.sampling, prompt_logprobs=None),
                peer=Peer(info.peers, self.source.incarnation, len(spec.prompt) // info.hash_block_tokens),
                prefetch=True,
            )
            for spec in specs
        ]
        self._waits = {spec.choice: spec.id for spec in prefetches}
        self.target.prefetch(prefetches, self)

    def give_up(self) -> None:
        """The request has ended, or was lost."""
        self._end(Outcome.ENDED)

    # -- what the target's link reports --------------------------------------------------------------------------------

    def on_update(self, choice: int, update: Update) -> None:
        if update.ending is None or self._waits.pop(choice, None) is None:
            return
        self._here[choice] = update.ending.cached_tokens
        if not self._waits:
            self._next()

    def on_refused(self, choice: int, refusing: Refusing) -> None:
        self._end(Outcome.REFUSED)

    def on_lost(self, message: str) -> None:
        self._end(Outcome.LOST)

    def _next(self) -> None:
        specs = self._progress()
        if not specs:
            return self._end(Outcome.ENDED)
        missing = max(len(spec.prompt) - self._here.get(spec.choice, 0) for spec in specs)
        fewer = self._round == 1 or missing < self._missing
        if missing > FEW_TOKENS and fewer and self._round < MAX_ROUNDS:
            self._missing = missing
            return self._prefetch(specs)
        self._end(Outcome.MIGRATED if missing <= MANY_TOKENS else Outcome.NOT_FETCHED)

    def _end(self, outcome: Outcome) -> None:
        if self.outcome is not None:
            return
        self.outcome = outcome
        waits, self._waits = self._waits, {}
        self.target.abort(waits.values(), "migration_over")
        self._done(outcome)
