"""The step loop on a thread of its own, with the real Scheduler and no model."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from shoal.core.plan import Copied, Event, KvOp, StepPlan, StepResult
from shoal.core.request import Finish, Refusal, RequestSpec
from shoal.core.scheduler import Scheduler
from shoal.core.stepcost import StepCost
from shoal.engine.loop import Copier, Runner, StepLoop, Turn
from shoal.wire.messages import Ending, Update
from tests.support.processes import wait_until
from tests.support.scripted import Rule, Script
from tests.support.scripted_engine import parts

SESSION = 1


class Driver:
    """Records what a loop says; the step thread may be stopped at the runner's gate."""

    def __init__(self, runner: Runner, scheduler: Scheduler, copier: Copier | None = None) -> None:
        self.scheduler = scheduler
        self.turns: list[Turn] = []
        self.announced: list[int] = []
        self.failures: list[BaseException] = []
        self.now_ns = 0
        self.steps = StepLoop(
            scheduler,
            runner,
            publish=self.turns.append,
            announce=self.announced.append,
            failed=self.failures.append,
            copier=copier,
            clock=lambda: self.now_ns,
        )
        self.thread = threading.Thread(target=self.steps.run, daemon=True)

    def updates(self, session: int = SESSION) -> list[Update]:
        return [update for turn in list(self.turns) for update in turn.updates.get(session, ())]

    def tokens(self, id: str) -> list[int]:
        found: list[int] = []
        for update in self.updates():
            if update.id == id:
                assert not update.tokens or update.index == len(found)
                found += update.tokens
        return found

    def endings(self) -> dict[str, Ending]:
        found = [(update.id, update.ending) for update in self.updates() if update.ending is not None]
        assert len(found) == len(dict(found)), "a request ended twice"
        return dict(found)


class Gate:
    """Lets steps through one by one: `collect` waits for a permit."""

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self.permits = threading.Semaphore(0)
        self.num_collected = 0
        self.num_launched = 0

    def launch(self, plan: StepPlan) -> None:
        self.num_launched += 1
        self.inner.launch(plan)

    def collect(self) -> StepResult:
        assert self.permits.acquire(timeout=10)
        self.num_collected += 1
        return self.inner.collect()


@contextmanager
def driven(script: Script, *, gated: bool = False, cost: StepCost | None = None) -> Iterator[tuple[Driver, Gate]]:
    made = parts(script, cost=cost)
    gate = Gate(made.runner)
    driver = Driver(gate if gated else made.runner, made.scheduler)
    driver.thread.start()
    try:
        yield driver, gate
    finally:
        gate.permits.release(100_000)
        assert driver.steps.stop(5)
        driver.thread.join(5)
        made.scheduler.check()  # type: ignore[attr-defined]


def spec(id: str, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 4) -> RequestSpec:
    return RequestSpec(id=id, prompt=prompt, max_tokens=max_tokens)


ENDLESS = Script(rules=(Rule(tokens=(5,), then=5),))


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_tokens_arrive_in_order_and_each_request_ends_once(steps_in_flight: int) -> None:
    with driven(Script(step_ms=0.1, steps_in_flight=steps_in_flight)) as (driver, _):
        driver.steps.submit(SESSION, [spec("a", (7, 8, 9), 5), spec("b", (1,), 2)])
        wait_until(lambda: len(driver.endings()) == 2)
        assert driver.tokens("a") == [7, 8, 9, 7, 8]
        assert driver.tokens("b") == [1, 1]
        assert {e.reason for e in driver.endings().values()} == {Finish.LENGTH}
        assert driver.steps.num_streams == 0


def test_one_turn_per_step_and_none_while_idle() -> None:
    with driven(Script(step_ms=0.1)) as (driver, _):
        driver.steps.submit(SESSION, [spec("a")])
        wait_until(lambda: driver.endings())
        steps = [turn.step for turn in driver.turns if turn.step is not None]
        assert len(steps) == driver.turns[-1].view.step == 4
        wait_until(lambda: driver.steps._turn_since_ns is None)  # it waits for the inbox
        num_turns = len(driver.turns)
        driver.steps.abort(SESSION, ["nobody"])
        wait_until(lambda: len(driver.turns) == num_turns + 1)
        wait_until(lambda: driver.steps._turn_since_ns is None)
        assert len(driver.turns) == num_turns + 1


def test_an_abort_takes_effect_within_one_step() -> None:
    with driven(ENDLESS, gated=True) as (driver, gate):
        driver.steps.submit(SESSION, [spec("a", max_tokens=1000)])
        gate.permits.release(3)
        wait_until(lambda: len(driver.tokens("a")) == 3)
        wait_until(lambda: gate.num_launched == 4)
        driver.steps.abort(SESSION, ["a"])  # step 4 is under way
        gate.permits.release(10)
        wait_until(lambda: driver.endings())
        assert driver.endings()["a"].reason is Finish.ABORT
        wait_until(lambda: driver.steps._turn_since_ns is None)
        assert gate.num_collected == 4


def test_a_session_that_ended_costs_at_most_the_step_under_way_and_hears_nothing_more() -> None:
    with driven(ENDLESS, gated=True) as (driver, gate):
        driver.steps.submit(SESSION, [spec("a", max_tokens=1000)])
        driver.steps.submit(2, [spec("b", max_tokens=6)])
        gate.permits.release(2)
        wait_until(lambda: len(driver.updates(2)) == 2)
        wait_until(lambda: gate.num_launched == 3)
        driver.steps.end_session(SESSION)
        heard = len(driver.updates())
        gate.permits.release(10)
        wait_until(lambda: any(update.ending for update in driver.updates(2)))
        assert len(driver.updates()) <= heard + 1
        assert not driver.endings()
        assert gate.num_collected == 6  # "b" alone needed that many


def test_only_the_session_that_owns_a_stream_can_abort_it() -> None:
    with driven(Script(step_ms=0.1)) as (driver, _):
        driver.steps.submit(SESSION, [spec("a", max_tokens=50)])
        driver.steps.abort(2, ["a"])
        wait_until(lambda: driver.endings())
        assert driver.endings()["a"].reason is Finish.LENGTH


def test_refusals_go_to_the_session_that_asked() -> None:
    with driven(ENDLESS, gated=True) as (driver, _):
        driver.steps.submit(SESSION, [spec("a", max_tokens=1000)])
        driver.steps.submit(2, [spec("a"), spec("b", prompt=(999_999,))])
        wait_until(lambda: driver.turns or driver.steps._turn_since_ns is not None)
        driver.steps.abort(SESSION, ["a"])
    refused = [r for turn in driver.turns for r in turn.refused.get(2, [])]
    assert [(r.id, r.reason) for r in refused] == [
        ("a", Refusal.DUPLICATE_ID),
        ("b", Refusal.TOKEN_OUT_OF_RANGE),
    ]


def test_a_failing_step_ends_every_stream_with_an_error_and_then_the_loop() -> None:
    script = Script(rules=(Rule(prompt=(9,), fault="crash", at=2), Rule()), step_ms=0.1)
    with driven(script) as (driver, _):
        driver.steps.submit(SESSION, [spec("a", (9,), 10), spec("b", (1,), 10)])
        wait_until(lambda: driver.failures)
        endings = driver.endings()
        assert {e.reason for e in endings.values()} == {Finish.ERROR} and len(endings) == 2
        assert endings["a"].message == "the engine failed: RuntimeError"
        assert len(driver.tokens("a")) == len(driver.tokens("b")) == 2
        assert not driver.steps.turning()
        driver.thread.join(5)
        assert not driver.thread.is_alive()


def test_a_scheduler_that_plans_nothing_for_live_requests_is_a_failure_not_a_hang() -> None:
    made = parts(Script())
    made.scheduler.plan = lambda now_ns: None  # type: ignore[method-assign]
    driver = Driver(made.runner, made.scheduler)
    driver.thread.start()
    driver.steps.submit(SESSION, [spec("a")])
    wait_until(lambda: driver.failures)
    assert driver.endings()["a"].reason is Finish.ERROR


def test_the_last_word_reaches_every_stream_at_shutdown() -> None:
    with driven(ENDLESS, gated=True) as (driver, gate):
        driver.steps.submit(SESSION, [spec("a", max_tokens=1000), spec("b", max_tokens=1000)])
        gate.permits.release(2)
        wait_until(lambda: len(driver.tokens("b")) == 2)
        driver.steps.end_all("the engine is shutting down")
        gate.permits.release(10)
        wait_until(lambda: driver.steps.num_streams == 0)
        wait_until(lambda: len(driver.endings()) == 2)
        assert driver.endings()["b"] == Ending(Finish.ERROR, None, 0, "the engine is shutting down")


def test_a_long_step_is_announced_before_it_runs_and_is_not_late_while_it_runs() -> None:
    slow = StepCost((0.4e9, 0, 0, 0, 0))  # every step is predicted to take 0.4 s
    with driven(ENDLESS, gated=True, cost=slow) as (driver, gate):
        driver.steps.submit(SESSION, [spec("a", max_tokens=1)])
        wait_until(lambda: gate.num_launched == 1)
        assert driver.announced == [400_000_000]
        driver.now_ns += 1_400_000_000
        assert driver.steps.turning()
        driver.now_ns += 200_000_000  # the floor of 1.5 s is above three times the announced step
        assert not driver.steps.turning()
        assert not driver.steps.stuck()
        driver.now_ns += 60_000_000_000
        assert driver.steps.stuck()
        gate.permits.release()
        wait_until(lambda: driver.endings())
        wait_until(lambda: driver.steps._turn_since_ns is None)
        driver.now_ns += 60_000_000_000
        assert driver.steps.turning() and not driver.steps.stuck()  # idle is not late


def test_short_steps_are_not_announced() -> None:
    with driven(Script(step_ms=0.1)) as (driver, _):
        driver.steps.submit(SESSION, [spec("a")])
        wait_until(lambda: driver.endings())
        assert driver.announced == []


def test_with_two_steps_in_flight_the_second_is_launched_before_the_first_returns() -> None:
    made = parts(Script(steps_in_flight=2))
    gate = Gate(made.runner)
    driver = Driver(gate, made.scheduler)
    driver.thread.start()
    driver.steps.submit(SESSION, [spec("a", max_tokens=10)])
    wait_until(lambda: gate.num_launched == 2)
    assert gate.num_collected == 0
    gate.permits.release(100)
    wait_until(lambda: driver.endings())
    assert len(driver.tokens("a")) == 10
    assert driver.steps.stop(5)


def test_the_scripted_runner_gives_a_position_the_same_token_after_a_replay() -> None:
    with driven(Script(step_ms=0.1)) as (driver, _):
        whole = spec("a", (4, 5, 6), 9)
        driver.steps.submit(SESSION, [whole])
        wait_until(lambda: driver.endings())
        first = driver.tokens("a")
        again = RequestSpec(id="b", prompt=whole.prompt, output=tuple(first[:4]), max_tokens=9)
        driver.steps.submit(SESSION, [again])
        wait_until(lambda: len(driver.endings()) == 2)
        replayed = [t for u in driver.updates() if u.id == "b" for t in u.tokens]
        assert first[:4] + replayed == first


# -- copies ------------------------------------------------------------------------------------------------------------


class SlowCopier:
    """Copies nothing. A copy is done, or fails, when the test says so."""

    def __init__(self, closes: bool = True) -> None:
        self.ops: list[KvOp] = []
        self.tell: Callable[[Copied | Exception], None] | None = None
        self.closes = closes

    def start(self, op: KvOp, tell: Callable[[Copied | Exception], None]) -> None:
        self.ops.append(op)
        self.tell = tell

    def finish(self, number: int) -> None:
        wait_until(lambda: len(self.ops) >= number)
        assert self.tell is not None
        self.tell(Copied(number, 1000))

    def close(self, limit_s: float) -> bool:
        return self.closes


@contextmanager
def parking(*, closes: bool = True, disk_bytes_per_s: float = 0) -> Iterator[tuple[Driver, Gate, SlowCopier]]:
    """One request runs at a time, and one that has to go is parked."""
    made = parts(ENDLESS)
    limits = replace(made.scheduler.limits, max_num_seqs=1, num_host_blocks=64, block_bytes=1000, preemption="swap")
    limits = replace(limits, disk_bytes_per_s=disk_bytes_per_s)
    scheduler = Scheduler(limits, hash_root=b"root")
    copier, launch = SlowCopier(closes), made.runner.launch

    def launch_beside(plan: StepPlan) -> None:
        assert set(plan.ops) <= set(copier.ops), "a launch may take as long as its step"
        launch(plan)

    made.runner.launch = launch_beside  # type: ignore[method-assign]
    gate = Gate(made.runner)
    driver = Driver(gate, scheduler, copier)
    driver.thread.start()
    try:
        yield driver, gate, copier
    finally:
        gate.permits.release(100_000)
        assert driver.steps.stop(5 if closes else 0.1) is closes
        driver.thread.join(5)
        scheduler.check()


def parked(driver: Driver, gate: Gate, num_tokens: int = 30) -> None:
    """Stream "low" has to go for "high" after three tokens, and "high" ends with its second."""
    driver.steps.submit(SESSION, [replace(spec("low", max_tokens=num_tokens), priority=1)])
    gate.permits.release(3)
    wait_until(lambda: gate.num_launched == 4)
    driver.steps.submit(SESSION, [spec("high", max_tokens=2)])
    gate.permits.release(1000)
    wait_until(lambda: "high" in driver.endings())


def waiting(driver: Driver) -> bool:
    return driver.steps._turn_since_ns is None


def test_steps_go_on_beside_a_copy_and_a_parked_stream_comes_back_with_nothing_lost() -> None:
    with parking() as (driver, gate, copier):
        parked(driver, gate)
        assert [op.out for op in copier.ops] == [True], "the copy is not done, and two steps were"
        wait_until(lambda: waiting(driver))
        copier.finish(1)
        copier.finish(2)
        wait_until(lambda: "low" in driver.endings())
        assert [(op.number, op.id, op.out) for op in copier.ops[:2]] == [(1, "low", True), (2, "low", False)]
        assert driver.tokens("low") == [5] * 30
        low = [update for update in driver.updates() if update.id == "low"]
        assert [update.parked for update in low if update.parked is not None] == [True, False]
        view = driver.turns[-1].view
        assert (view.parks, view.recomputed_tokens) == (1, 0)
        assert view.swapped_out_bytes == view.swapped_in_bytes > 0
        assert len([wait for turn in driver.turns for wait in turn.waits]) == 3  # two began, one resumed


def test_a_step_that_only_starts_copies_took_no_time_and_is_no_step_of_the_metrics() -> None:
    with parking() as (driver, gate, copier):
        results, apply = list[StepResult](), driver.scheduler.apply

        def watched(result: StepResult, now_ns: int) -> list[Event]:
            results.append(result)
            return apply(result, now_ns)

        driver.scheduler.apply = watched  # type: ignore[method-assign]
        driver.steps._clock = itertools.count(step=1000).__next__
        parked(driver, gate)
        copier.finish(1)
        copier.finish(2)
        wait_until(lambda: "low" in driver.endings() and len(copier.ops) == 3 and waiting(driver))
        steps = [turn.step for turn in driver.turns if turn.step is not None]
        assert len(steps) == 32 and all(step.num_tokens > 0 and step.busy_ns > 0 for step in steps)
        assert driver.turns[-1].view.step == 34
        empty = [result for result in results if not result.tokens]  # back, and a prefix out when all had ended
        assert [(each.busy_ns, each.latency_ns) for each in empty] == [(0, 0)] * 2


def test_what_a_request_leaves_is_copied_and_written_while_nobody_asks_for_anything() -> None:
    with parking(disk_bytes_per_s=1e9) as (driver, gate, copier):
        driver.steps.submit(SESSION, [spec("a", max_tokens=40)])
        gate.permits.release(1000)
        wait_until(lambda: "a" in driver.endings())
        copier.finish(1)
        copier.finish(2)
        wait_until(lambda: waiting(driver) and driver.turns[-1].view.cached_host_blocks == 2)
        spilled, written = copier.ops
        assert (spilled.out, len(spilled.device_blocks), spilled.disk) == (True, 2, ())
        assert written.out and len(written.disk) == 2


def test_while_only_a_copy_is_under_way_the_loop_takes_work_but_a_copy_that_hangs_is_noticed() -> None:
    with parking() as (driver, gate, copier):
        parked(driver, gate)
        wait_until(lambda: waiting(driver))
        driver.now_ns += 59_000_000_000
        assert driver.steps.turning() and not driver.steps.stuck()
        driver.now_ns += 2_000_000_000
        assert driver.steps.stuck()
        driver.steps.submit(SESSION, [spec("next", max_tokens=900)])
        wait_until(lambda: driver.tokens("next"))
        driver.steps.submit(SESSION, [replace(spec("top", max_tokens=2), priority=-1)])
        wait_until(lambda: "top" in driver.endings())
        assert len(copier.ops) == 2
        assert driver.steps.stuck(), "neither steps of others nor another copy make it younger"
        copier.finish(1)  # the second copy has its time from now on
        wait_until(lambda: not driver.steps.stuck())
        driver.steps.end_all("enough")


def test_woken_for_nothing_while_it_waits_for_a_copy_the_loop_plans_nothing() -> None:
    with parking() as (driver, gate, copier):
        parked(driver, gate)
        wait_until(lambda: waiting(driver))
        real, asked = driver.scheduler.plan, []
        driver.scheduler.plan = lambda now_ns: asked.append(now_ns) or real(now_ns)  # type: ignore[method-assign]
        num_turns = len(driver.turns)
        driver.steps.abort(SESSION, ["nobody"])
        wait_until(lambda: len(driver.turns) > num_turns and waiting(driver))
        assert not asked
        copier.finish(1)
        wait_until(lambda: asked)
        copier.finish(2)


def test_an_abort_during_a_copy_ends_the_stream_at_once_and_the_blocks_come_back_later() -> None:
    with parking() as (driver, gate, copier):
        parked(driver, gate)
        driver.steps.abort(SESSION, ["low"])
        wait_until(lambda: "low" in driver.endings())
        assert driver.turns[-1].view.free_host_blocks < 64
        num_turns = len(driver.turns)
        copier.finish(1)
        wait_until(lambda: len(driver.turns) > num_turns)
        view = driver.turns[-1].view
        assert view.free_host_blocks + view.cached_host_blocks == 64
        assert view.free_blocks + view.cached_blocks == view.total_blocks
        assert len(copier.ops) == 1


def test_a_copy_that_fails_ends_every_stream_with_an_error_and_then_the_loop() -> None:
    with parking() as (driver, gate, copier):
        parked(driver, gate)
        assert copier.tell is not None
        copier.tell(OSError("the memory is gone"))
        wait_until(lambda: driver.failures)
        assert driver.endings()["low"] == Ending(Finish.ERROR, None, 0, "the engine failed: OSError")


@pytest.mark.parametrize("closes", [True, False])
def test_the_loop_ends_with_copies_in_flight_and_says_where_one_still_runs(closes: bool) -> None:
    with parking(closes=closes) as (driver, gate, copier):
        parked(driver, gate)
        wait_until(lambda: waiting(driver))
        assert len(copier.ops) == 1
