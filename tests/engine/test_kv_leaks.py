"""No block is lost, whoever aborts and when: the pool is whole again when all is done. With a real model behind it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.core.plan import Accepted, Copied, Ended, Event, KvOp, Parked, Resumed, StepPlan, Token
from shoal.core.request import Finish, RequestSpec, Sampling
from shoal.core.scheduler import Scheduler
from shoal.engine.runner import Runner
from tests.support.drive import make_scheduler

pytestmark = pytest.mark.torch

NUM_BLOCKS = 256
COPY_STEPS = 2  # plans that are made while a copy is in flight, unless there is nothing else to do


@pytest.fixture(scope="module")
def runner(tiny: Path, new_runner: Callable[..., Runner]) -> Runner:
    return new_runner(tiny, kv_cache_bytes=NUM_BLOCKS * 8192, host_cache_bytes=64 * 8192)


class Bench:
    """Keeps a number of requests in the engine and counts how each ends."""

    def __init__(self, runner: Runner, steps_in_flight: int, **limits: Any) -> None:
        self.runner = runner
        settings = {"max_num_seqs": 8, "max_prefill_chunk": 24, "max_steps_in_flight": steps_in_flight, **limits}
        self.scheduler: Scheduler = make_scheduler(runner, **settings)
        self.ended: dict[str, Finish] = {}
        self.num_tokens: dict[str, int] = {}
        self.plans: list[StepPlan] = []
        self.copies: list[tuple[int, KvOp]] = []  # in flight, with the number of plans when they began
        self.parked: set[str] = set()

    def submit(self, spec: RequestSpec) -> None:
        assert isinstance(self.scheduler.submit(spec, 0), Accepted)
        self.num_tokens[spec.id] = 0

    def abort(self, name: str) -> int:
        """How many endings it brought."""
        return self._take(self.scheduler.abort(name, 0))

    def step(self) -> bool:
        """False: nothing left to do."""
        while (plan := self.scheduler.plan(0)) is not None:
            self.plans.append(plan)
            self.runner.launch(plan)
            self.copies += [(len(self.plans), op) for op in plan.ops]
        if self.scheduler.num_in_flight:
            self._take(self.scheduler.apply(self.runner.collect(), 0))
            self._finish_copies(len(self.plans) - COPY_STEPS)
        else:
            self._finish_copies(len(self.plans))
        self.scheduler.check()
        return self.num_open > 0 or bool(self.copies)

    def _finish_copies(self, begun: int) -> None:
        """Those that began with that plan or before."""
        while self.copies and self.copies[0][0] <= begun:
            _, op = self.copies.pop(0)
            for device_block, host_block in zip(op.device_blocks, op.host_blocks, strict=True):
                self.runner.host.copy(out=op.out, device_block=device_block, host_block=host_block, count=1)
            self._take(self.scheduler.copied([Copied(op.number, 1)], 0))

    @property
    def num_open(self) -> int:
        return len(self.num_tokens) - len(self.ended)

    def _take(self, events: list[Event]) -> int:
        endings = 0
        for event in events:
            assert event.id not in self.ended, "an event after the end"
            if isinstance(event, Ended):
                self.ended[event.id] = event.reason
                self.parked.discard(event.id)
                endings += 1
            elif isinstance(event, Token):
                self.num_tokens[event.id] += 1
            elif isinstance(event, Parked):
                self.parked.add(event.id)
            elif isinstance(event, Resumed):
                self.parked.discard(event.id)
        return endings

    def assert_drained(self) -> None:
        while self.step():
            pass
        view = self.scheduler.view()
        assert (view.num_running, view.num_waiting) == (0, 0)
        assert view.free_blocks + view.cached_blocks == view.total_blocks == self.scheduler.limits.num_blocks
        assert view.free_host_blocks + view.cached_host_blocks == view.total_host_blocks > 0
        assert set(self.ended) == set(self.num_tokens)
        self.runner.forget_all()
        assert not self.runner._table.rows and not self.runner._seams


def requests(count: int, longest: int, max_tokens: int) -> Iterator[RequestSpec]:
    """Some share a beginning, some ask for log-probabilities, some sample."""
    rng = random.Random(9)
    common = tuple(rng.randrange(3, 250) for _ in range(longest))
    for index in range(count):
        length = rng.randint(1, longest)
        kept = rng.choice((0, length // 2, length))
        prompt = common[:kept] + tuple(rng.randrange(3, 250) for _ in range(length - kept))
        sampling = Sampling(
            temperature=rng.choice((0, 1)),
            seed=index,
            prompt_logprobs=0 if index % 11 == 0 else None,
            presence_penalty=0.5 if index % 13 == 0 else 0.0,
        )
        yield RequestSpec(id=str(index), prompt=prompt, max_tokens=rng.randint(1, max_tokens), sampling=sampling)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_kv_03_a_short_requests_eight_at_a_time(runner: Runner, steps_in_flight: int) -> None:
    bench = Bench(runner, steps_in_flight)
    for spec in requests(2000, longest=40, max_tokens=4):
        bench.submit(spec)
        while bench.num_open >= 8:
            bench.step()
    bench.assert_drained()
    assert set(bench.ended.values()) == {Finish.LENGTH}


PHASES = (
    "queued",
    "mid prefill chunk",
    "first decode",
    "decode",
    "in flight",
    "being parked",
    "parked",
    "coming back",
    "finished",
)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_kv_03_b_aborts_in_every_phase(runner: Runner, steps_in_flight: int) -> None:
    """They come in sixes and four run at a time; every fourth is more urgent, and others are parked for it."""
    bench = Bench(runner, steps_in_flight, num_blocks=32, max_num_seqs=4, preemption="swap")
    aborted = dict.fromkeys(PHASES, 0)
    pending: dict[str, str] = {}  # request -> phase in which to abort it
    for index, spec in enumerate(requests(1400, longest=100, max_tokens=24)):
        bench.submit(replace(spec, service_class="standard" if index % 4 else "interactive"))
        phase = PHASES[index % len(PHASES)]
        pending[spec.id] = phase
        if phase == "queued":
            aborted[phase] += bench.abort(spec.id)
        while index % 6 == 5 and bench.num_open >= 6:
            bench.step()
            for name in list(pending):
                if _is_in(bench, name, pending[name]):
                    aborted[pending.pop(name)] += bench.abort(name)
    bench.assert_drained()
    for name, phase in pending.items():
        if phase == "finished":
            assert bench.abort(name) == 0
            aborted[phase] += 1
    assert min(aborted.values()) >= 5, aborted


def _is_in(bench: Bench, name: str, phase: str) -> bool:
    if name in bench.ended:
        return False
    pieces = [piece for plan in bench.plans[-30:] for piece in plan.slices if piece.id == name]
    copied = {op.id: op.out for _, op in bench.copies}.get(name)
    tokens = bench.num_tokens[name]
    if phase == "mid prefill chunk":
        return len(pieces) == 1 and not pieces[0].sample
    if phase == "first decode":
        return tokens == 1
    if phase == "decode":
        return tokens >= 3
    if phase == "in flight":
        return len(pieces) > tokens > 0
    if phase == "being parked":
        return copied is True
    if phase == "parked":
        return name in bench.parked and copied is None
    if phase == "coming back":
        return copied is False
    return False


def test_kv_03_d_double_aborts_unknown_ids_and_aborts_that_race_with_the_end(runner: Runner) -> None:
    bench = Bench(runner, steps_in_flight=2)
    for spec in requests(40, longest=30, max_tokens=3):
        bench.submit(spec)
    assert bench.abort("nobody") == 0
    assert bench.abort("7") == 1
    assert bench.abort("7") == 0
    bench.step()
    for name in [str(index) for index in range(8)]:
        ended_before = name in bench.ended
        assert bench.abort(name) == (0 if ended_before else 1)
    bench.assert_drained()
    assert bench.abort("39") == 0


def test_kv_03_a_small_pool_under_pressure_loses_nothing_either(runner: Runner) -> None:
    bench = Bench(runner, steps_in_flight=2, num_blocks=16, preemption="recompute")
    for spec in requests(40, longest=20, max_tokens=120):
        bench.submit(spec)
    while bench.step():
        pass
    view = bench.scheduler.view()
    assert view.preemptions > 0
    assert view.free_blocks + view.cached_blocks == 16
    assert len(bench.ended) == 40
