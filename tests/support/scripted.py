"""An engine's runner without a model: it emits listed token ids, at a stated pace, and fails on order.

A script is plain data (JSON for engine processes); the first rule whose `prompt` is found in the request's prompt is
its rule; a rule without `prompt` matches every request, and `order` counts requests in the order of admission.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from shoal.core.plan import Admit, Logprobs, StepPlan, StepResult

Fault = Literal["crash", "kill", "hang", "abort", "reset", "half_frame", "silent_end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What one request gets. With no tokens it echoes its prompt, again and again."""

    prompt: tuple[int, ...] = ()  # this run of ids occurs in the prompt; (): every prompt
    order: int | None = None  # only the request admitted as number n, from 0
    tokens: tuple[int, ...] = ()  # after the last: the `then` token for ever
    then: int = 0
    choices: tuple[tuple[int, ...], ...] = ()  # tokens of choice n instead of `tokens`
    logprobs: tuple[float, ...] = ()  # logprob of token n; beyond: -0.5
    fault: Fault | None = None
    at: int = 0  # the fault happens instead of output token `at`


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    rules: tuple[Rule, ...] = ()
    step_ms: float = 1.0
    prefill_ms_per_token: float = 0.0
    vocab_size: int = 320
    num_blocks: int = 1024
    max_model_len: int = 4096
    max_num_seqs: int = 64
    load_ms: float = 0.0
    steps_in_flight: int = 1
    num_host_blocks: int = 0  # of a host tier of 1,000 bytes a block
    copy_bytes_per_s: int = 0  # 0: copies take no time
    model: str = "scripted"


@dataclass(slots=True)
class _Live:
    admit: Admit
    rule: Rule
    tokens: list[int] = field(default_factory=list)

    def next_token(self, index: int) -> int:
        """Depends on the output position only, so a recompute or a replay gives the same token."""
        rule, prompt = self.rule, self.admit.tokens[: self.admit.num_prompt]
        listed = rule.choices[self.admit.choice] if self.admit.choice < len(rule.choices) else rule.tokens
        if listed or rule.tokens:
            return listed[index] if index < len(listed) else rule.then
        return prompt[index % len(prompt)]


class ScriptedRunner:
    """Implements the Runner protocol. `on_fault(fault, request id)` performs the faults of the connection."""

    def __init__(self, script: Script, on_fault: Callable[[Fault, str], None] | None = None) -> None:
        self._script = script
        self._on_fault = on_fault
        self._live: dict[str, _Live] = {}
        self._num_admitted = 0
        self._launched: deque[StepPlan] = deque()

    def launch(self, plan: StepPlan) -> None:
        self._launched.append(plan)

    def collect(self) -> StepResult:
        plan = self._launched.popleft()
        for id in plan.leaves:
            del self._live[id]
        for admit in plan.admits:
            self._live[admit.id] = _Live(admit, self._rule(admit))
        prefill_tokens = plan.num_tokens - len(plan.slices)
        time.sleep((self._script.step_ms + self._script.prefill_ms_per_token * prefill_tokens) / 1000)
        result = StepResult(step=plan.step, tokens=[])
        for part in plan.slices:
            self._score_prompt(part.id, part.start, part.count, result)
            if part.sample:
                self._sample(part.id, part.start + part.count, result)
        return result

    def _rule(self, admit: Admit) -> Rule:
        prompt, number = admit.tokens[: admit.num_prompt], self._num_admitted
        self._num_admitted += 1
        for rule in self._script.rules:
            if rule.order in (None, number) and _contains(prompt, rule.prompt):
                return rule
        return Rule()

    def _sample(self, id: str, position: int, result: StepResult) -> None:
        live = self._live[id]
        index = position - live.admit.num_prompt
        if live.rule.fault is not None and index == live.rule.at:
            self._fail(live.rule.fault, id)
        token = live.next_token(index)
        result.tokens.append(token)
        wanted = live.admit.sampling.logprobs
        if wanted is not None:
            listed = live.rule.logprobs
            logprob = listed[index] if index < len(listed) else -0.5
            result.logprobs[id] = self._alternatives(token, logprob, wanted)

    def _score_prompt(self, id: str, start: int, count: int, result: StepResult) -> None:
        live = self._live[id]
        wanted = live.admit.sampling.prompt_logprobs
        end = min(start + count + 1, live.admit.num_prompt)
        if wanted is not None and start + 1 < end:
            result.prompt_logprobs[id] = [
                self._alternatives(token, -0.25, wanted) for token in live.admit.tokens[start + 1 : end]
            ]

    def _alternatives(self, token: int, logprob: float, count: int) -> Logprobs:
        return Logprobs(logprob, tuple(((token + n) % self._script.vocab_size, logprob - n) for n in range(count)))

    def _fail(self, fault: Fault, id: str) -> None:
        if fault == "crash":
            raise RuntimeError("scripted crash")
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang":
            time.sleep(3600)
        if self._on_fault is not None:
            self._on_fault(fault, id)


class EmptyHost:
    """A host tier without bytes: what is copied to it takes the time that a copier's rate makes of it."""

    block_bytes = 1000

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = self.num_device_blocks = num_blocks

    def copy(self, *, out: bool, device_block: int, host_block: int, count: int) -> list[int]:
        return []


def _contains(tokens: tuple[int, ...], part: tuple[int, ...]) -> bool:
    return any(tokens[n : n + len(part)] == part for n in range(len(tokens) - len(part) + 1))
