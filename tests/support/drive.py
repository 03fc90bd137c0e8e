"""Drives a real Scheduler and a real Runner without processes: submit everything, step until all is done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

from shoal.core.classes import DEFAULT_CLASSES
from shoal.core.limits import Limits
from shoal.core.plan import Accepted, Copied, Ended, Held, KvOp, Logprobs, Parked, Preempted, PromptScored, Token
from shoal.core.request import RequestSpec
from shoal.core.scheduler import Scheduler

MAX_STEPS = 20_000
WAIT_S = 30.0


@dataclass(slots=True)
class Outcome:
    """What came back for one request."""

    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    preemptions: int = 0
    parks: int = 0  # beside those
    first_index: int = 0  # output position of tokens[0]: a replay's tokens come after the delivered ones
    ended: Ended | None = None


PATIENT = {name: replace(service, max_wait_s=1e9) for name, service in DEFAULT_CLASSES.items()}  # nothing ever presses


def make_scheduler(runner: Any, *, on_disk: Iterable[Held] = (), **limits: Any) -> Scheduler:
    """For a runner that no other scheduler drives from now on."""
    runner.forget_all()
    settings = {
        "num_blocks": runner.num_blocks,
        "block_tokens": runner.block_tokens,
        "max_model_len": runner.max_model_len,
        "vocab_size": runner.vocab_size,
        "max_step_ns": 10**12,
        "classes": PATIENT,
        **limits,
    }
    if runner.host is not None:
        settings = {"num_host_blocks": runner.host.num_blocks, "block_bytes": runner.host.block_bytes, **settings}
    return Scheduler(Limits(**settings), hash_root=runner.hash_root, on_disk=on_disk)


def run_requests(
    runner: Any,
    scheduler: Scheduler,
    specs: Iterable[RequestSpec],
    *,
    later: Mapping[int, Sequence[RequestSpec]] | None = None,
    disk: Any = None,
) -> dict[str, Outcome]:
    """Steps until all has ended, with as many plans in flight as the scheduler allows, and `check()` after each step.

    `later`: requests that arrive before the n-th step is planned, counted from 0. A plan's copies are made when it
    is launched, and known as done before the next one; with `disk`, a transfer.storage.Storage, whenever that tells.
    """
    outcomes: dict[str, Outcome] = {}
    _submit(scheduler, specs, outcomes)
    arrivals = dict(later or {})
    copied: list[Copied] = []
    told: SimpleQueue[Copied] = SimpleQueue()
    moving, planned = 0, True  # with the disk
    for now_ns in range(MAX_STEPS):
        _submit(scheduler, arrivals.pop(now_ns, ()), outcomes)
        idle = not planned and not copied and scheduler.num_in_flight == 0
        while moving and (idle or not told.empty()):
            copied.append(told.get(timeout=WAIT_S))
            moving, idle = moving - 1, False
        events = scheduler.copied(copied, now_ns) if copied else []
        planned = False
        copied = []
        while (plan := scheduler.plan(now_ns)) is not None:
            runner.launch(plan)
            copied += [_copy(runner, op) for op in plan.ops if not op.disk]
            planned = True
            for op in plan.ops:
                if op.disk:
                    disk.start(op, told.put)
                    moving += 1
        if scheduler.num_in_flight == 0 and not copied and not moving:
            break
        if scheduler.num_in_flight:
            events += scheduler.apply(runner.collect(), now_ns)
        for event in events:
            record(outcomes[event.id], event)
        scheduler.check()
    assert not arrivals, "all was done before the last arrival"
    assert all(outcome.ended for outcome in outcomes.values()), "a request never ended"
    return outcomes


def _submit(scheduler: Scheduler, specs: Iterable[RequestSpec], outcomes: dict[str, Outcome]) -> None:
    for spec in specs:
        accepted = scheduler.submit(spec, 0)
        assert isinstance(accepted, Accepted), accepted
        outcomes[spec.id] = Outcome(first_index=len(spec.output))


def _copy(runner: Any, op: KvOp) -> Copied:
    bad = []
    for place, (device_block, host_block) in enumerate(zip(op.device_blocks, op.host_blocks, strict=True)):
        if runner.host.copy(out=op.out, device_block=device_block, host_block=host_block, count=1):
            bad.append(place)
    return Copied(op.number, 1, tuple(bad))


def record(outcome: Outcome, event: object) -> None:
    match event:
        case Token():
            assert event.index == outcome.first_index + len(outcome.tokens), "a token index was lost or repeated"
            outcome.tokens.append(event.token)
        case PromptScored():
            assert event.start == 1 + len(outcome.prompt_logprobs), "a prompt score was lost or repeated"
            outcome.prompt_logprobs += event.entries
        case Preempted():
            outcome.preemptions += 1
        case Parked():
            outcome.parks += 1
        case Ended():
            assert outcome.ended is None, "two endings"
            outcome.ended = event
