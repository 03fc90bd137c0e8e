"""How a pipeline's steps in flight share the work."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.core.limits import Limits
from shoal.core.plan import StepPlan, StepResult
from shoal.core.request import RequestSpec
from shoal.core.scheduler import Scheduler
from shoal.core.stepcost import StepCost

MS = 1_000_000


def scheduler(num_stages: int, in_flight: int, coefficients: tuple[float, ...], **limits: Any) -> Scheduler:
    return Scheduler(
        Limits(
            num_blocks=1000,
            max_model_len=4096,
            vocab_size=5000,
            num_stages=num_stages,
            max_steps_in_flight=in_flight,
            **limits,
        ),
        hash_root=b"root",
        cost=StepCost(coefficients),
    )


class Pipe:
    """Plans while it can, then applies one, as the loop does."""

    def __init__(self, core: Scheduler) -> None:
        self.core = core
        self.plans: list[StepPlan] = []
        self._in_flight: list[StepPlan] = []

    def turn(self) -> None:
        while (plan := self.core.plan(len(self.plans))) is not None:
            self.plans.append(plan)
            self._in_flight.append(plan)
        if self._in_flight:
            first = self._in_flight.pop(0)
            self.core.apply(StepResult(first.step, [7 for part in first.slices if part.sample]), 0)
        self.core.check()

    def decodes(self, plan: StepPlan) -> int:
        return sum(part.count == 1 and part.start >= 16 for part in plan.slices)


@pytest.mark.parametrize(("num_stages", "in_flight"), [(2, 2), (2, 3), (3, 3), (4, 5)])
@pytest.mark.parametrize("num_requests", [1, 2, 7, 16])
def test_those_that_decode_are_spread_evenly(num_stages: int, in_flight: int, num_requests: int) -> None:
    core = scheduler(num_stages, in_flight, (9 * MS, MS, 0, 0, 0))
    for number in range(num_requests):
        core.submit(RequestSpec(id=f"r{number}", prompt=tuple(range(16)), max_tokens=200), 0)
    pipe = Pipe(core)
    for _ in range(60):
        pipe.turn()
    sizes = [pipe.decodes(plan) for plan in pipe.plans[-12:]]
    assert max(sizes) == -(-num_requests // in_flight), sizes
    if num_requests >= in_flight:
        assert sum(sizes[-in_flight:]) == num_requests, sizes
    served = [part.id for plan in pipe.plans[-in_flight * 4 :] for part in plan.slices]
    assert len({served.count(f"r{number}") for number in range(num_requests)}) <= 2, "all get on alike"


def test_uneven_groups_become_even_again() -> None:
    """Eight of sixteen end, all but one of them in one group."""
    core = scheduler(2, 2, (9 * MS, MS, 0, 0, 0))
    for number in range(16):
        core.submit(RequestSpec(id=f"r{number}", prompt=tuple(range(16)), max_tokens=400), 0)
    pipe = Pipe(core)
    for _ in range(40):
        pipe.turn()
    first, second = pipe.plans[-2:]
    for part in (*first.slices[:7], second.slices[0]):
        core.abort(part.id, 0)
    for _ in range(4):
        pipe.turn()
    assert [pipe.decodes(plan) for plan in pipe.plans[-2:]] == [4, 4]


def test_a_prompt_comes_in_more_pieces_than_there_are_stages_and_none_too_small() -> None:
    """A step without tokens takes 9 ms, a token 0.1: pieces of less than 180 tokens would not pay."""
    for num_stages, pieces in ((1, [1500]), (2, [375, 282, 211, 180, 180, 180, 92]), (3, [250, 209, 180, 180])):
        core = scheduler(num_stages, num_stages, (9 * MS, 0.1 * MS, 0, 0, 0))
        core.submit(RequestSpec(id="long", prompt=tuple(range(1500)), max_tokens=1), 0)
        pipe = Pipe(core)
        for _ in range(20):
            pipe.turn()
        assert [plan.num_tokens for plan in pipe.plans][: len(pieces)] == pieces
        assert sum(plan.num_tokens for plan in pipe.plans) == 1500


def test_a_token_is_due_after_all_stages() -> None:
    """20 ms are left for the next tokens: of two stages each may take 10 for a step."""
    sizes = []
    for num_stages in (1, 2):
        core = scheduler(num_stages, num_stages, (1 * MS, 0.01 * MS, 0, 0, 0), max_prefill_chunk=0)
        core.submit(RequestSpec(id="decodes", prompt=tuple(range(16)), max_tokens=99, tpot_ms=0), 0)
        pipe = Pipe(core)
        pipe.turn()
        request = core._requests["decodes"]
        request.token_due_ns, request.tpot_ns = 20 * MS, 20 * MS
        core.submit(RequestSpec(id="long", prompt=tuple(range(4000)), max_tokens=1), 0)
        plan = core.plan(0)
        assert plan is not None
        sizes.append(plan.predicted_ns)
    assert 18 * MS < sizes[0] <= 20 * MS and 9 * MS < sizes[1] <= 10 * MS


def test_a_pipeline_has_as_many_steps_in_flight_as_stages() -> None:
    with pytest.raises(ValueError, match="max_steps_in_flight is 1; it must be at least 2"):
        scheduler(2, 1, (MS, 0, 0, 0, 0))
