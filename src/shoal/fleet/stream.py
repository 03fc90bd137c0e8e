"""One prompt of a client request over its attempts: what replicas report goes in, what the gateway must do comes out.

The choices (n) of a prompt travel together: same replica, same attempt.

    WAITING ──sent──► SENT ──first news──► STREAMING ──every choice ended──► ENDED
       ▲                │                      │
       └──── lost ──────┴──── lost, migrated ──┘        lost too often, or nobody is left: FAILED

A request of which nothing came back starts over, at most twice and within a budget for all requests. One that was
streaming is replayed: the next replica gets the tokens that were delivered and goes on behind them. A migration is a
replay that was prepared (gateway/migration.py): the replica that has it is told to drop it at the same moment.

The seam is checked here: the token indices of a choice run 0, 1, 2 … without gap or repeat, and a choice ends once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from shoal.core.request import Finish, Refusal

MAX_ATTEMPTS = 3  # of a request of which nothing came back
MAX_REPLAYS = 3  # after a loss; migrations do not count
_NOT_NOW = {Refusal.DRAINING, Refusal.QUEUE_FULL, Refusal.WAITING_BOUND}  # another replica may take it


class Phase(StrEnum):
    WAITING = "waiting"  # no attempt is open
    SENT = "sent"  # a replica has it, nothing came back
    STREAMING = "streaming"  # part of the answer came back
    ENDED = "ended"
    FAILED = "failed"


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.SENT, Phase.FAILED}),
    Phase.SENT: frozenset({Phase.WAITING, Phase.STREAMING, Phase.FAILED}),
    Phase.STREAMING: frozenset({Phase.WAITING, Phase.ENDED, Phase.FAILED}),
    Phase.ENDED: frozenset(),
    Phase.FAILED: frozenset(),
}


# -- effects, performed by the gateway in the order of the list -----------------------------------------------------


class Deliver(NamedTuple):
    """New tokens of a choice, in order."""

    choice: int
    tokens: Sequence[int]
    logprobs: Sequence[Any]  # core.plan.Logprobs: as many as tokens, or none
    num_silent: int  # so many tokens at the end are no text: the stop token


class Ended(NamedTuple):
    """The choice is complete. `reason` is STOP or LENGTH; everything else is a failure."""

    choice: int
    reason: Finish
    cached_tokens: int


class Withdraw(NamedTuple):
    """Tell the replica to drop these choices."""

    choices: tuple[int, ...]


class SendAgain(NamedTuple):
    """Pick a replica, rather not one of `avoid`, and send every open choice to it, `wait_ms` from now."""

    wait_ms: int  # before jitter
    avoid: frozenset[str]


class Failed(NamedTuple):
    """The whole request is over. `reason` is one of the gateway's error reasons."""

    reason: str
    message: str


Effect = Deliver | Ended | Withdraw | SendAgain | Failed


class RetryBudget:
    """Retries ≤ 0.2 × requests + 3 in any window of time: a failing fleet is not hit much harder than a healthy one."""

    SHARE, BURST = 0.2, 3.0

    def __init__(self) -> None:
        self._tokens = self.BURST

    def request(self) -> None:
        self._tokens = min(self.BURST, self._tokens + self.SHARE)

    def take(self) -> bool:
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


@dataclass(slots=True)
class _Choice:
    tokens: list[int] = field(default_factory=list)  # delivered
    open: bool = True


class Stream:
    """The state machine. It owns the phase, the attempts and each choice's next token index."""

    def __init__(self, num_choices: int, budget: RetryBudget) -> None:
        self.phase = Phase.WAITING
        self.attempt = 0  # of the open or latest attempt; counts from 1
        self.replica = ""
        self.num_replays = 0
        self._loss: tuple[str, str] | None = None  # reason and message of the latest
        self._avoid: frozenset[str] = frozenset()
        self._next_scored = 1
        self._budget = budget
        self._choices = [_Choice() for _ in range(num_choices)]

    @property
    def over(self) -> bool:
        return self.phase in (Phase.ENDED, Phase.FAILED)

    def open_choices(self) -> tuple[int, ...]:
        return tuple(number for number, choice in enumerate(self._choices) if choice.open)

    @property
    def begun(self) -> bool:
        """Part of the answer was delivered."""
        return any(choice.tokens or not choice.open for choice in self._choices)

    def delivered(self, choice: int) -> Sequence[int]:
        """Its tokens so far."""
        return self._choices[choice].tokens

    # -- inputs --------------------------------------------------------------------------------------------------------

    def sent(self, replica: str) -> None:
        """An attempt has left for a replica."""
        self._move(Phase.SENT)
        self.attempt += 1
        self.replica = replica
        if not self._choices[0].tokens:
            self._next_scored = 1  # a prompt's scores come before the first token, anew in each attempt

    def update(
        self,
        choice: int,
        index: int,
        tokens: Sequence[int],
        logprobs: Sequence[Any] = (),
        ending: tuple[Finish, int | None, int, str] | None = None,
    ) -> list[Effect]:
        """A replica's news of one choice: tokens from output position `index` on, and perhaps its end
        (reason, stop token, cached tokens, message)."""
        state = self._choices[choice]
        if self.over or not state.open:
            return []  # late news of something withdrawn
        effects: list[Effect] = []
        if tokens:
            if index != len(state.tokens):
                return self._fail("seam_broken", f"token {len(state.tokens)} was due and {index} came")
            if logprobs and len(logprobs) != len(tokens):
                return self._fail("seam_broken", f"{len(tokens)} tokens came with {len(logprobs)} logprobs")
            state.tokens += tokens
            num_silent = int(ending is not None and ending[1] is not None)
            effects.append(Deliver(choice, tokens, logprobs, num_silent))
        self.committed()
        if ending is not None:
            effects += self._end(choice, tokens, *ending)
        return effects

    def scored(self, start: int, count: int) -> list[Effect]:
        """A replica's logprobs of prompt tokens [start, start + count). They begin at 1."""
        if self.over:
            return []
        if start != self._next_scored:
            return self._fail("seam_broken", f"prompt token {self._next_scored} was due and {start} came")
        self._next_scored += count
        self.committed()
        return []

    def committed(self) -> None:
        """Something of the answer came back."""
        if self.phase is Phase.SENT:
            self._move(Phase.STREAMING)

    def refused(self, reason: Refusal, message: str) -> list[Effect]:
        """The replica did not accept a choice."""
        if self.over:
            return []
        if reason is Refusal.DRAINING or (self.begun and reason in _NOT_NOW):
            return self.lost(reason.value, message)
        return self._fail(reason.value, message)

    def lost(self, reason: str, message: str) -> list[Effect]:
        """The replica, or the way to it, is gone, or it cannot go on."""
        if self.over or self.phase is Phase.WAITING:
            return []
        self._loss = (reason, message)
        if self.begun:
            if self.num_replays >= MAX_REPLAYS:
                return self._fail(reason, message)
            self.num_replays += 1
            wait_ms = 0 if self.num_replays == 1 else 50 << self.num_replays
        elif self.attempt >= MAX_ATTEMPTS or not self._budget.take():
            return self._fail(reason, message)
        else:
            wait_ms = 50 << (self.attempt - 1)
        working = self.open_choices()
        self._move(Phase.WAITING)
        self._avoid |= {self.replica}
        return [Withdraw(working), SendAgain(wait_ms, self._avoid)]

    def migrated(self) -> list[Effect]:
        """Another replica is ready to go on; `sent` follows at once. Empty: there is nothing to migrate."""
        if self.phase is not Phase.STREAMING:
            return []
        working = self.open_choices()
        self._move(Phase.WAITING)
        return [Withdraw(working)]

    def unplaced(self, reason: str, message: str) -> list[Effect]:
        """No replica could be found for the next attempt. Where one was lost, that is what the client should know."""
        return [] if self.over else self._fail(*(self._loss or (reason, message)))

    def enough(self, choice: int) -> list[Effect]:
        """The gateway has all that it wants of a choice (a stop string was found)."""
        if self.over or not self._choices[choice].open:
            return []
        self._close(choice)
        return [Withdraw((choice,))]

    def cancel(self) -> list[Effect]:
        """The client is gone, or its time is up."""
        if self.over:
            return []
        return [effect for effect in self._fail("cancelled", "") if isinstance(effect, Withdraw)]  # nobody to tell

    # -- inside --------------------------------------------------------------------------------------------------------

    def _end(
        self,
        choice: int,
        tokens: Sequence[int],
        reason: Finish,
        stop_token: int | None,
        cached_tokens: int,
        message: str,
    ) -> list[Effect]:
        if reason in _ABNORMAL:
            return self.lost(_ABNORMAL[reason], message or f"the replica ended it with {reason}")
        if stop_token is not None and (not tokens or tokens[-1] != stop_token):
            self._choices[choice].open = False
            return self._fail("seam_broken", "the stop token is not the last token")
        self._close(choice)
        return [Ended(choice, reason, cached_tokens)]

    def _close(self, choice: int) -> None:
        self._choices[choice].open = False
        if not self.open_choices():
            self.committed()
            self._move(Phase.ENDED)

    def _fail(self, reason: str, message: str) -> list[Effect]:
        """Ends every choice. Where a replica may still work on some, it is told."""
        working = self.open_choices() if self.phase in (Phase.SENT, Phase.STREAMING) else ()
        for choice in self._choices:
            choice.open = False
        self._move(Phase.FAILED)
        failed = Failed(reason, message)
        return [Withdraw(working), failed] if working else [failed]

    def _move(self, phase: Phase) -> None:
        assert phase in TRANSITIONS[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase


_ABNORMAL = {Finish.ABORT: "engine_aborted", Finish.ERROR: "engine_error"}
