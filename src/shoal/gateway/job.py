"""One client request under way: what it asked for, what it has said so far, and how it ends."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.core.plan import Logprobs
from shoal.gateway import choices
from shoal.gateway.errors import ApiError
from shoal.gateway.metrics import Metrics
from shoal.gateway.output import Delta
from shoal.gateway.params import Params
from shoal.gateway.prompts import Prompt
from shoal.gateway.tenants import Hold
from shoal.gateway.terms import Terms
from shoal.gateway.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from shoal.gateway.dispatch import Attempts

QUIET_S = 10.0  # without news for this long, a stream gets a comment line (proxies cut idle connections)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A client request in the form that replicas understand. Choice c of prompt p is choice p·n + c of the answer."""

    id: str  # 16 hex digits
    params: Params
    prompts: tuple[Prompt, ...]
    max_tokens: tuple[int, ...]  # one a prompt
    arrived_s: float  # monotonic; its first byte
    asked_s: float  # it was here as a whole: from then on it waits for us
    terms: Terms
    hold: Hold | None = None  # of its tenant's limits
    timeout_s: float | None = None  # None: the gateway's for all requests

    @property
    def most_tokens(self) -> int:
        """What it may take in all: every prompt once, and every choice to its end."""
        return sum(len(prompt.ids) for prompt in self.prompts) + self.params.n * sum(self.max_tokens)


class Cancelled(Exception):
    """The job was cancelled: nobody is left to be told."""


class Job:
    """One client request under way. The dispatcher feeds it, the answer takes its news."""

    def __init__(self, order: Order, metrics: Metrics, tokenizer: Tokenizer) -> None:
        self.order = order
        self.attempts: list[Attempts] = []  # one a prompt
        self.failure: ApiError | None = None
        self.cancelled: str | None = None  # why
        self.prompt_scores: list[list[Logprobs]] = [[] for _ in order.prompts]
        self.cached_tokens = 0
        self.first_token_s: float | None = None
        self.queue_ns: int | None = None  # until its first slice; None: still queued, or nobody told
        self.quiet_since_s = order.arrived_s  # last news, or last comment line
        self.outputs = [
            choices.output(
                number,
                prompt.ids,
                order.params,
                tokenizer,
                offset=len(prompt.text) if order.params.echo else 0,
            )
            for number, prompt in enumerate(prompt for prompt in order.prompts for _ in range(order.params.n))
        ]
        self._metrics = metrics
        self._last_s = [0.0] * len(self.outputs)
        self._deltas: list[Delta] = []
        self._waiter: asyncio.Future[None] | None = None
        self._comment = False

    @property
    def done(self) -> bool:
        return all(output.finish is not None for output in self.outputs)

    @property
    def queued(self) -> bool:
        """No replica has begun."""
        return self.queue_ns is None and self.first_token_s is None

    @property
    def exhausted(self) -> bool:
        """Done, and everything was taken by `news`."""
        return not self._deltas and self.done

    @property
    def finish_reason(self) -> str:
        """Of the request as a whole: "length" where any choice was cut there."""
        return "length" if any(output.finish == "length" for output in self.outputs) else "stop"

    @property
    def last_token_s(self) -> float | None:
        """When the newest token came, of any choice."""
        return max(self._last_s) or None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.order.prompts)

    @property
    def num_output_tokens(self) -> int:
        return sum(output.num_tokens for output in self.outputs)

    @property
    def token_s(self) -> float | None:
        """Mean time between the tokens of a choice; None where no choice has two."""
        num_gaps = self.num_output_tokens - len(self.outputs)
        if self.first_token_s is None or num_gaps <= 0:
            return None
        return (max(self._last_s) - self.first_token_s) * len(self.outputs) / num_gaps

    async def news(self) -> list[Delta]:
        """The next deltas, in order; [] when a comment line is due. Raises ApiError after the last one of a job that
        failed, Cancelled. Not to be called any more once `exhausted`."""
        while True:
            if self.cancelled is not None:
                raise Cancelled
            if self._deltas:
                deltas, self._deltas = self._deltas, []
                return deltas
            if self.failure is not None:
                raise self.failure
            if self._comment:
                self._comment = False
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def cancel(self, why: str) -> None:
        """The client is gone. Its replicas are told at once. Once only, and not after the end."""
        if self.cancelled is None and self.failure is None and not self.done:
            self.cancelled = why
            for attempts in self.attempts:
                attempts.cancel(why)
            self._wake()

    def fail(self, error: ApiError) -> None:
        """The first failure of any prompt is the whole request's; the others are withdrawn."""
        if self.cancelled is None and self.failure is None and not self.done:
            self.failure = error
            for attempts in self.attempts:
                attempts.cancel(error.reason)
            self._wake()

    def nudge(self, now_s: float) -> None:
        """A comment line is due, where nothing came for long."""
        if now_s - self.quiet_since_s > QUIET_S:
            self.quiet_since_s = now_s
            self._comment = True
            self._wake()

    def add(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._wake()

    def began(self, waited_ns: int) -> None:
        """A choice had its first slice. Of several the first one counts."""
        if self.queue_ns is None:
            self.queue_ns = waited_ns
            self._metrics.queue_time.labels(self.order.terms.service_class).observe(waited_ns / 1e9)
            self._wait_is_over()

    def observe(self, choice: int, num_tokens: int) -> None:
        """Times of the tokens that just came."""
        now = self.quiet_since_s = time.monotonic()
        if self.first_token_s is None:
            self.first_token_s = now
            self._metrics.ttft.observe(now - self.order.arrived_s)
            self._wait_is_over()
        elif self._last_s[choice]:
            for _ in range(num_tokens):
                self._metrics.inter_token.observe((now - self._last_s[choice]) / num_tokens)
        self._last_s[choice] = now

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _wait_is_over(self) -> None:
        if self.order.hold is not None:
            self.order.hold.started()
