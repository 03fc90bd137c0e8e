"""What a layout gives under a load: time to the first token, time per token, tokens a second, in a steady state.

A replica runs B sequences. Each takes its prompt in chunks, beside the others' decodes, and then a token a step. Per
output token of a sequence B more are made, and B / output prompts are computed, so a share of all steps carry a chunk:

    TPOT  =  decode step  +  chunk steps per decode step · (step with a chunk − step without)
    TTFT  =  half of a step under way  +  waiting for prompts before it  +  its own chunks' steps
    tokens/s  =  replicas · B · output / (TTFT + (output − 1) · TPOT)

With a pipeline of p stages the B sequences go round in p microbatches, as far as they suffice: what stages wait is the
bubble.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shoal.core.stepcost import attended_tokens
from shoal.planner.cost import Machine


@dataclass(frozen=True, slots=True)
class Load:
    prompt: int
    output: int

    @property
    def context(self) -> int:
        """Tokens of a sequence at its end."""
        return self.prompt + self.output


@dataclass(frozen=True, slots=True)
class Limits:
    max_tokens: int = 2048  # of a step
    max_chunk: int = 0  # of one prompt in a step; 0: no cap


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of one replica with `running` sequences."""

    running: int
    ttft_s: float
    tpot_s: float
    prompt_s: float  # device time of one prompt beside the others' decodes
    bubble: float  # share of a pipeline's time that stages wait

    def requests_per_s(self, load: Load) -> float:
        return self.running / (self.ttft_s + (load.output - 1) * self.tpot_s)

    def tokens_per_s(self, load: Load) -> float:
        return load.output * self.requests_per_s(load)


def forecast(machine: Machine, load: Load, running: int, limits: Limits = Limits()) -> Forecast:
    """A closed loop: whenever a sequence ends the next prompt begins."""
    decode_s, bubble = _round_s(machine, running, _mean_context(load))
    room = max(16, limits.max_tokens - (running - 1))
    chunk = max(1, min(load.prompt, room, limits.max_chunk or room))
    together = max(1, min(room // load.prompt, running // load.output))  # prompts that begin in one step
    steps_s = [_with_chunk_s(machine, load, running, start, chunk, together) for start in range(0, load.prompt, chunk)]
    prompt_s = sum(max(0.0, step_s - decode_s) for step_s in steps_s) / together
    tpot_s = decode_s + running / load.output * prompt_s
    under_way_s = min(tpot_s, max(steps_s)) / machine.layout.pp if running > 1 else 0.0
    return Forecast(running, sum(steps_s) + under_way_s / 2, tpot_s, prompt_s, bubble)


class Curve:
    """What a replica with at most so many sequences at once gives at each rate of an open loop, at random intervals."""

    def __init__(self, machine: Machine, load: Load, most: int, limits: Limits = Limits()) -> None:
        self._machine, self._load, self._most, self._limits = machine, load, most, limits
        self._known: dict[int, Forecast] = {}

    def at(self, rate_per_s: float) -> Forecast | None:
        """None: it cannot keep up. The TTFT is its P99: prompts wait for each other as in a queue with one server and
        equal services (M/D/1), whose tail is taken as exponential."""
        running = self._running(rate_per_s)
        if running is None:
            return None
        found = self._with(running)
        busy = rate_per_s * max(found.prompt_s, found.ttft_s if running > 1 else 0.0)
        if busy >= 1:
            return None
        wait_s = found.ttft_s * busy / (2 * (1 - busy))
        tail_s = wait_s / busy * max(0.0, math.log(100 * busy))
        return replace(found, ttft_s=found.ttft_s + tail_s)

    def _running(self, rate_per_s: float) -> int | None:
        """The smallest number at once that ends as many requests as come (Little's law)."""
        low, high = 1, self._most
        if self._with(high).requests_per_s(self._load) < rate_per_s:
            return None
        while low < high:
            middle = (low + high) // 2
            if self._with(middle).requests_per_s(self._load) >= rate_per_s:
                high = middle
            else:
                low = middle + 1
        return low

    def _with(self, running: int) -> Forecast:
        if running not in self._known:
            self._known[running] = forecast(self._machine, self._load, running, self._limits)
        return self._known[running]


def _mean_context(load: Load) -> int:
    return load.prompt + load.output // 2


def _round_s(machine: Machine, running: int, context: int) -> tuple[float, float]:
    """Seconds in which every sequence gets a token, and the share of it in which stages wait."""
    pp = machine.layout.pp
    batches = min(pp, running)
    size = -(-running // batches)
    times = machine.stage_seconds((1, size, size * context, size, size * context), size)
    hop_s = machine.hop_s(size) if pp > 1 else 0.0
    slowest = max(times) + hop_s
    through = sum(times) + (pp - 1) * hop_s
    round_s = max(through, batches * slowest)
    return round_s, 1.0 - batches * sum(times) / (pp * round_s)


def _with_chunk_s(machine: Machine, load: Load, running: int, start: int, chunk: int, together: int) -> float:
    """Seconds of a round one of whose microbatches also carries a chunk of so many prompts."""
    count = min(chunk, load.prompt - start)
    last = start + count >= load.prompt
    others = running - together
    pp = machine.layout.pp
    size = -(-others // pp)
    context = size * _mean_context(load)
    new = together * count
    attended = together * attended_tokens(start, count)
    features = (1, size + new, context + attended, size + together, context + together * (start + count))
    times = machine.stage_seconds(features, size + together * last)
    if pp == 1:
        return times[0]
    if not others:
        return sum(times) + (pp - 1) * machine.hop_s(new)
    plain_s, _ = _round_s(machine, others, _mean_context(load))  # the others' microbatches go round with it
    return plain_s + max(times) - plain_s / pp
