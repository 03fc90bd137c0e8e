"""Who advances by how many tokens in this step.

Today, token by token and first come first served: every running request that needs one token to sample the next gets
it, then running requests that are further behind share what is left, then newcomers do. A chunk is cut to the token
budget, to `max_prefill_chunk` and to what `max_step_ns` allows. Which of the waiting may be newcomers, BATCHING says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from shoal.core.limits import Limits
from shoal.core.request import Request, State
from shoal.core.stepcost import Features, StepCost, attended_tokens


def split(running: Iterable[Request]) -> tuple[list[Request], list[Request]]:
    """(decodes: one output token away from sampling the next, those further behind).

    Who has all its tokens planned is in neither.
    """
    decodes, behind = [], []
    for request in running:
        scheduled, known = request.scheduled, request.known
        if known - scheduled == 1 and known < request.limit and scheduled >= request.num_prompt:
            decodes.append(request)
        elif scheduled < request.final:
            behind.append(request)
    return decodes, behind


class Room:
    """What is left of one step while it is being composed: tokens and time."""

    def __init__(self, limits: Limits, cost: StepCost) -> None:
        self._cost = cost
        # Where even one token takes longer than that, leaving the others out would cost much and save little.
        self._max_ns = max(limits.max_step_ns, cost.predict((1, 1, 1, 1, 1)) * 5 // 4)
        self._max_tokens = limits.max_num_batched_tokens
        self._max_chunk = limits.max_prefill_chunk or limits.max_num_batched_tokens
        self._new = self._attended = self._sequences = self._sampled = 0

    @property
    def features(self) -> Features:
        return (1, self._new, self._attended, self._sequences, self._sampled)

    @property
    def num_tokens(self) -> int:
        return self._new

    def fit(self, decodes: list[Request]) -> int:
        """How many of them, from the first on, fit into a step that is still empty; at least one."""
        attended = sum([request.known for request in decodes])
        count = min(len(decodes), self._max_tokens)
        if count == len(decodes) and self._cost.predict((1, count, attended, count, count)) <= self._max_ns:
            return count
        attended = 0
        for place in range(count):
            attended += decodes[place].known
            num = place + 1
            if place and self._cost.predict((1, num, attended, num, num)) > self._max_ns:
                return place
        return count

    def take_decodes(self, decodes: list[Request]) -> None:
        count = len(decodes)
        self._new += count
        self._attended += sum([request.known for request in decodes])
        self._sequences += count
        self._sampled += count

    def take_chunk(self, start: int, need: int, samples: bool) -> int:
        """Tokens granted to a request that lacks `need` from position `start` on; `samples`: if it gets them all.

        0: nothing left. The first slice of a step gets at least one token, whatever its time.
        """
        most = min(need, self._max_chunk, self._max_tokens - self._new)
        if most < 1:
            return 0
        low, high = 0 if self._sequences else 1, most  # the largest count that fits is in [low, high]
        middle = most  # the usual case first: all of it fits
        while low < high:
            if self._cost.predict(self._with(start, middle, samples and middle == need)) <= self._max_ns:
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        if low:
            _, self._new, self._attended, self._sequences, self._sampled = self._with(
                start, low, samples and low == need
            )
        return low

    def _with(self, start: int, count: int, samples: bool) -> Features:
        attended = self._attended + attended_tokens(start, count)
        return (1, self._new + count, attended, self._sequences + 1, self._sampled + samples)


# -- who may enter the batch -------------------------------------------------------------------------------------------


class Batching(Protocol):
    def candidates(self, line: Iterable[Request]) -> Iterable[Request]:
        """Of the waiting line, in its order, who may be admitted now. Asked at most twice a plan."""
        ...

    def check(self, running: Iterable[Request]) -> None:
        """AssertionError where somebody runs who should not have been admitted."""
        ...


class Continuous:
    """Whoever waits may enter between any two steps."""

    def __init__(self, max_running: int) -> None: ...

    def candidates(self, line: Iterable[Request]) -> Iterable[Request]:
        return line

    def check(self, running: Iterable[Request]) -> None: ...


class Static:
    """The first in line, as many as may run, make a batch, and nobody else enters until each of them has ended.

    The baseline that continuous batching is compared with, as in Orca (Yu et al., OSDI 2022). It is a kind one: who has
    ended is not computed further, and prompts of unlike lengths are not padded.
    """

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._batch: list[Request] = []

    def candidates(self, line: Iterable[Request]) -> Iterable[Request]:
        if all(request.state is State.FINISHED for request in self._batch):
            self._batch = self._form(line)
        return [request for request in self._batch if request.state is State.WAITING]

    def _form(self, line: Iterable[Request]) -> list[Request]:
        """A choice whose leader waits too enters with it or after it; in a batch before it, it would wait for ever."""
        batch: list[Request] = []
        for request in line:
            if len(batch) == self._max_running:
                break
            leader = request.leader
            if leader is None or leader.state is State.FINISHED or leader in batch:
                batch.append(request)
        return batch

    def check(self, running: Iterable[Request]) -> None:
        assert len(self._batch) <= self._max_running, f"a batch of {len(self._batch)}"
        for request in running:
            assert request in self._batch, f"{request.id} runs outside of the batch"


BATCHING: dict[str, Callable[[int], Batching]] = {"continuous": Continuous, "static": Static}
