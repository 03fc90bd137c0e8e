"""Transcripts: commands to a scheduler, and what it did. One file, one story, its name a sentence.

    replica blocks=5 budget=64            limits: blocks block seqs budget chunk step_ms queue len flights stages
                                          caching host composer preemption; a token costs 1 ms, and attended_ms
                                          for each that it attends to; a block is 1 MB, and 1 MB/ms is copied
    (blank line)
    submit hi prompt=32@x max=4 class=batch tenant=.. priority=1 stop=7 leader=.. salt=.. output=.. min=.. scores=1
    step hi=7                             plan and apply; hi's token is 7, others count up from 1000
    ----
    plan 1: hi[0:32)* -> b0,b1   free=3 cached=0

`prompt=32@x,5` is the first 32 tokens of stream x, then 5 of the request's own. Other commands: `plan`, `apply`,
`copy` (the oldest copy is done), `wait MS`, `abort ID`. In a plan `hi out b0,b1 > h0,h1` copies blocks to the
host, `+hi[16:32)` enters the batch with 16 tokens found in the cache, `*` samples, `<2` takes its input token from step
2, `-lo` leaves. Rewrite the expected halves with REWRITE_TRANSCRIPTS=1, then review the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.core.classes import DEFAULT_CLASSES
from shoal.core.kv.hashing import root_key
from shoal.core.limits import Limits
from shoal.core.plan import Ended, Event, Parked, Preempted, PromptScored, Refused, Resumed, Started, StepPlan, Token
from shoal.core.request import RequestSpec, Sampling
from shoal.core.scheduler import Scheduler
from shoal.core.stepcost import StepCost
from tests.core.block_runner import BlockRunner

LIMITS = {"blocks": "num_blocks", "block": "block_tokens", "seqs": "max_num_seqs", "budget": "max_num_batched_tokens",
          "chunk": "max_prefill_chunk", "len": "max_model_len", "flights": "max_steps_in_flight",
          "stages": "num_stages", "caching": "prefix_caching", "host": "num_host_blocks"}  # fmt: skip


def replay(path: Path) -> str:
    """The transcript as the scheduler acts it out today."""
    story, out = Story(), []
    for block in path.read_text(encoding="utf-8").strip().split("\n\n"):
        commands, _, expected = block.partition("\n----")
        done = [line for command in commands.splitlines() for line in story.act(command)]
        comments = [line for line in expected.splitlines() if line.startswith("#")]
        out.append("\n".join([commands, *(["----"] if comments or done else []), *comments, *done]))
    return "\n\n".join(out) + "\n"


class Story:
    def act(self, command: str) -> Iterator[str]:
        verb, *words = command.split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        if command.startswith("#"):
            return
        if verb == "replica":
            self.limits: dict[str, Any] = {"max_model_len": 4096, "vocab_size": 10_000} | {
                LIMITS[key]: int(value) for key, value in options.items() if key in LIMITS
            }
            self.limits["prefix_caching"] = bool(self.limits.get("prefix_caching", True))
            self.limits |= {name: options[name] for name in ("composer", "preemption") if name in options}
            self.limits |= {"block_bytes": 1_000_000, "copy_bytes_per_s": 1e9}
            if "queue" in options:
                queue = int(options["queue"])
                self.limits["classes"] = {name: replace(c, max_queue=queue) for name, c in DEFAULT_CLASSES.items()}
            self.now_ns = 1_000_000_000
            self.limits["max_step_ns"] = int(float(options.get("step_ms", 500)) * 1_000_000)
            cost = StepCost((0, 1e6, float(options.get("attended_ms", 0)) * 1e6, 0, 0))
            root = root_key("model", "float32", "1", self.limits.get("block_tokens", 16))
            self.scheduler = Scheduler(Limits(**self.limits), hash_root=root, cost=cost)
            self.forced: dict[str, str] = {}
            self.runner = BlockRunner(self.scheduler.limits.block_tokens, self._sample)
            return
        if verb == "submit":
            answer = self.scheduler.submit(_spec(words[0], options), self.now_ns)
            if isinstance(answer, Refused):
                yield f"refused {answer.id} {answer.reason}: {answer.message}"
        elif verb == "abort":
            yield from _events(self.scheduler.abort(words[0], self.now_ns))
        elif verb == "wait":
            self.now_ns += int(float(words[0]) * 1_000_000)
        elif verb == "copy":
            yield from _events(self.scheduler.copied([self.runner.copy()], self.now_ns))
        if verb in ("plan", "step"):
            self.forced = options
            plan = self.scheduler.plan(self.now_ns)
            if plan is not None:
                self.runner.launch(plan)
            view = self.scheduler.view()
            yield f"{_plan(plan)}   free={view.free_blocks} cached={view.cached_blocks}"
        if verb in ("apply", "step") and self.runner.flights:
            yield from _events(self.scheduler.apply(self.runner.collect(), self.now_ns))
        self.scheduler.check()

    def _sample(self, id: str, index: int) -> int:
        return int(self.forced.get(id, 1000 + index))


def _spec(id: str, options: dict[str, str]) -> RequestSpec:
    ids: list[int] = []
    for piece in options["prompt"].split(","):
        count, _, stream = piece.partition("@")
        first = sum(map(ord, stream or id)) % 80 * 100
        ids += [first + place for place in range(int(count))]
    numbers = {"max_tokens": "max", "min_tokens": "min", "priority": "priority"}
    fields = {"max_tokens": 1} | {name: int(options[key]) for name, key in numbers.items() if key in options}
    stop = tuple(int(token) for token in options.get("stop", "").split(",") if token)
    output = tuple(1000 + place for place in range(int(options.get("output", 0))))
    sampling = Sampling(prompt_logprobs=0 if "scores" in options else None)
    return RequestSpec(
        id=id, prompt=tuple(ids), output=output, stop_token_ids=stop, leader=options.get("leader"), sampling=sampling,
        salt=options.get("salt", ""), tenant=options.get("tenant", ""),
        service_class=options.get("class", "standard"), **fields,
    )  # fmt: skip


def _plan(plan: StepPlan | None) -> str:
    if plan is None:
        return "no plan:"
    admits = {admit.id: admit for admit in plan.admits}
    words = [f"-{id}" for id in plan.leaves]
    for part in plan.slices:
        admit = admits.get(part.id)
        blocks = (admit.blocks if admit else ()) + part.blocks
        text = f"{'+' if admit else ''}{part.id}[{part.start}:{part.start + part.count})"
        text += f"<{part.from_step}" * (part.from_step >= 0) + "*" * part.sample
        words.append(text + (f" -> {','.join(f'b{block}' for block in blocks)}" if blocks else ""))
    for op in plan.ops:
        device, host = (
            ",".join(f"b{block}" for block in op.device_blocks),
            ",".join(f"h{block}" for block in op.host_blocks),
        )
        words.append(f"{op.id} out {device} > {host}" if op.out else f"{op.id} in {host} > {device}")
    return f"plan {plan.step}: {'   '.join(words)}"


def _events(events: Iterable[Event]) -> list[str]:
    """A start without a wait goes without saying."""
    return [_event(event) for event in events if not (isinstance(event, Started) and not event.waited_ns)]


def _event(event: Event) -> str:
    match event:
        case Started(id, waited_ns):
            return f"event: {id} started after {waited_ns / 1e6:g} ms"
        case Parked(id):
            return f"event: {id} parked"
        case Resumed(id, waited_ns):
            return f"event: {id} resumed after {waited_ns / 1e6:g} ms"
        case Token(id, index, token, _):
            return f"event: {id} token {index} is {token}"
        case PromptScored(id, start, entries):
            return f"event: {id} scored [{start}:{start + len(entries)})"
        case Preempted(id, lost):
            return f"event: {id} preempted, {lost} tokens lost"
        case Ended(id, reason, stop_token, num_output, cached):
            why = f"{reason} by {stop_token}" if stop_token is not None else str(reason)
            return f"event: {id} ended: {why}, {num_output} tokens, {cached} cached"
