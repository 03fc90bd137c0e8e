"""The scheduler's cases by name (SCH-01, KV-03) and the corners that a transcript would not show well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shoal.core.classes import DEFAULT_CLASSES
from shoal.core.kv.hashing import chain, root_key, scope_key
from shoal.core.kv.prefix import Chain
from shoal.core.limits import Limits
from shoal.core.plan import Accepted, Ended, Event, Refused, Started, StepResult, Token, View
from shoal.core.progress import Request, State
from shoal.core.request import Finish, Refusal, RequestSpec, Sampling
from shoal.core.scheduler import Scheduler
from tests.core.block_runner import BlockRunner
from tests.core.naive import sample

ROOT = root_key("m", "float32", "1", 16)


def replica(**limits: Any) -> Scheduler:
    return Scheduler(
        Limits(**({"num_blocks": 256, "max_model_len": 4096, "vocab_size": 50_000} | limits)), hash_root=ROOT
    )


class Driver:
    """A scheduler with a runner; collects the events."""

    def __init__(self, **limits: Any) -> None:
        self.scheduler = replica(**limits)
        self.runner = BlockRunner(self.scheduler.limits.block_tokens, sample)
        self.events: list[Event] = []

    def plan(self) -> bool:
        plan = self.scheduler.plan(0)
        if plan is not None:
            self.runner.launch(plan)
        self.scheduler.check()
        return plan is not None

    def apply(self) -> None:
        self.events += self.scheduler.apply(self.runner.collect(), 0)
        self.scheduler.check()

    def step(self) -> bool:
        planned = self.plan()
        if planned:
            self.apply()
        return planned

    def abort(self, id: str) -> None:
        self.events += self.scheduler.abort(id, 0)
        self.scheduler.check()

    def ended(self) -> dict[str, Finish]:
        endings = [event for event in self.events if isinstance(event, Ended)]
        assert len({event.id for event in endings}) == len(endings)
        return {event.id: event.reason for event in endings}


def at_rest(view: View) -> bool:
    return view.num_running == view.num_waiting == view.waiting_tokens == 0 and (
        view.free_blocks + view.cached_blocks == view.total_blocks
    )


def spec(id: str, prompt: int = 10, max_tokens: int = 4, **more: Any) -> RequestSpec:
    first = sum(map(ord, id)) * 97 % 20_000
    return RequestSpec(id=id, prompt=tuple(range(first, first + prompt)), max_tokens=max_tokens, **more)


def test_sch_01_a_request_larger_than_the_pool_is_refused_and_the_others_run() -> None:
    driver = Driver(num_blocks=64, prefix_caching=False)
    submit = driver.scheduler.submit
    refused = submit(spec("R0", 2000, 8), 0)
    assert isinstance(refused, Refused) and refused.reason is Refusal.KV_POOL
    assert isinstance(submit(spec("R1", 10, 4), 0), Accepted)
    driver.step()
    assert isinstance(submit(spec("R2", 1020, 4), 1), Accepted)
    refused = submit(spec("R3", 1022, 4), 1)
    assert isinstance(refused, Refused) and refused.reason is Refusal.KV_POOL
    steps = 1
    while "R1" not in driver.ended():
        driver.step()
        steps += 1
    assert steps <= 6
    while driver.step():
        pass
    assert driver.ended() == {"R1": Finish.LENGTH, "R2": Finish.LENGTH}
    assert driver.scheduler.view().free_blocks == 64


@pytest.mark.parametrize("caching", [True, False])
def test_kv_03_a_two_thousand_short_requests_leave_no_block_behind(caching: bool) -> None:
    driver = Driver(num_blocks=256, max_num_seqs=8, prefix_caching=caching)
    for number in range(2000):
        driver.scheduler.submit(spec(f"r{number}", 5 + number % 40, 1 + number % 5), 0)
        while driver.scheduler.view().num_waiting + driver.scheduler.view().num_running >= 8:
            driver.step()
    while driver.step():
        pass
    assert len(driver.ended()) == 2000 and at_rest(driver.scheduler.view())


def test_kv_03_b_aborts_in_every_phase_leave_no_block_behind() -> None:
    phases = ["queued", "mid chunk", "chunk in flight", "first decode", "two in flight", "preempted", "ended"]
    driver = Driver(num_blocks=256, max_num_seqs=2, max_prefill_chunk=16, max_steps_in_flight=2)
    for number in range(600):
        phase = phases[number % len(phases)]
        id = f"r{number}"
        driver.scheduler.submit(spec(id, 40, 1 if phase == "ended" else 8, priority=5), 0)
        if phase == "preempted":
            driver.scheduler.submit(spec(f"x{number}", 20, 3, priority=5), 0)
            driver.plan()
            driver.scheduler.submit(spec(f"y{number}", 20, 2, priority=0), 0)
            driver.scheduler.submit(spec(f"z{number}", 20, 2, priority=0), 0)
            driver.plan()
            driver.apply()
            driver.plan()
        elif phase == "chunk in flight":
            driver.plan()
        elif phase == "mid chunk":
            driver.step()
        elif phase == "first decode":
            [driver.step() for _ in range(4)]
        elif phase == "two in flight":
            [driver.step() for _ in range(4)]
            assert driver.plan() and driver.plan()
        elif phase == "ended":
            [driver.step() for _ in range(3)]
        driver.abort(id)
        assert driver.ended()[id] is (Finish.LENGTH if phase == "ended" else Finish.ABORT)
        while driver.plan() or driver.runner.flights:
            driver.apply()
        view = driver.scheduler.view()
        assert at_rest(view), f"{phase}: {view}"
    assert driver.scheduler.view().preemptions == 2 * 85


def test_kv_03_d_double_abort_unknown_id_and_abort_after_the_end_say_nothing() -> None:
    driver = Driver(max_steps_in_flight=2)
    for id, stop in (("a", ()), ("b", (sample("b", 0),))):
        driver.scheduler.submit(spec(id, 10, 8, stop_token_ids=stop), 0)
    driver.plan()
    driver.plan()
    driver.abort("a")
    assert driver.scheduler.abort("a", 0) == driver.scheduler.abort("nobody", 0) == []
    driver.apply()  # b stops, one more token of it in flight
    assert driver.scheduler.abort("b", 0) == []
    driver.apply()
    assert driver.ended() == {"a": Finish.ABORT, "b": Finish.STOP}
    assert not driver.plan() and at_rest(driver.scheduler.view())


def test_results_apply_in_step_order_and_with_the_right_number_of_tokens() -> None:
    scheduler = replica(max_steps_in_flight=2)
    with pytest.raises(ValueError, match="result of step 1"):
        scheduler.apply(StepResult(1, []), 0)
    scheduler.submit(spec("a"), 0)
    scheduler.plan(0)
    scheduler.plan(0)
    with pytest.raises(ValueError, match="result of step 2; expected 1"):
        scheduler.apply(StepResult(2, [5]), 0)
    with pytest.raises(ValueError, match="brought 2 tokens, not 1"):
        scheduler.apply(StepResult(1, [5, 6]), 0)
    assert scheduler.apply(StepResult(1, [5]), 0) == [Started("a", 0), Token("a", 0, 5, None)]


def test_the_choices_of_one_submit_are_accepted_after_their_leader() -> None:
    scheduler = replica()
    assert scheduler.submit(spec("r.0"), 0) == Accepted("r.0")
    assert scheduler.submit(spec("r.1", leader="r.0"), 0) == Accepted("r.1")
    answer = scheduler.submit(spec("s.1", leader="s.0"), 0)
    assert isinstance(answer, Refused) and answer.reason is Refusal.UNKNOWN_LEADER and "'s.0'" in answer.message


def test_with_caching_off_a_choice_still_waits_for_its_leaders_prompt() -> None:
    scheduler = replica(prefix_caching=False, max_prefill_chunk=16)
    prompt = tuple(range(40))
    scheduler.submit(RequestSpec(id="r.0", prompt=prompt, max_tokens=9), 0)
    scheduler.submit(RequestSpec(id="r.1", prompt=prompt, max_tokens=9, leader="r.0"), 0)
    admitted = []
    for step in range(1, 5):
        plan = scheduler.plan(0)
        assert plan is not None
        admitted.append([admit.id for admit in plan.admits])
        scheduler.apply(StepResult(step, [7] * sum(part.sample for part in plan.slices)), 0)
    assert admitted == [["r.0"], [], [], ["r.1"]]


def test_keys_made_by_the_gateway_find_what_the_engine_entered() -> None:
    driver = Driver()
    prompt = tuple(range(50))
    driver.scheduler.submit(RequestSpec(id="a", prompt=prompt, max_tokens=1), 0)
    driver.step()
    keys = chain(scope_key(ROOT), prompt, 16)
    driver.scheduler.submit(RequestSpec(id="b", prompt=prompt, max_tokens=1, prefix_keys=keys), 0)
    driver.step()
    last = driver.events[-1]
    assert isinstance(last, Ended) and last.cached_tokens == 48
    wrong = chain(scope_key(ROOT, "other"), prompt, 16)
    driver.scheduler.submit(RequestSpec(id="c", prompt=prompt, max_tokens=1, prefix_keys=wrong), 0)
    driver.step()
    last = driver.events[-1]
    assert isinstance(last, Ended) and last.cached_tokens == 0


def test_what_the_output_filled_is_found_by_the_next_turn_of_a_conversation() -> None:
    driver = Driver()
    driver.scheduler.submit(RequestSpec(id="a", prompt=tuple(range(20)), max_tokens=30), 0)
    while driver.step():
        pass
    output = tuple(event.token for event in driver.events if isinstance(event, Token))
    driver.scheduler.submit(RequestSpec(id="b", prompt=(*range(20), *output, 7, 7), max_tokens=1), 0)
    driver.step()
    last = driver.events[-1]
    assert isinstance(last, Ended) and last.cached_tokens == 48, "49 tokens were computed: three full blocks"


def test_blocks_that_all_requests_fill_in_one_step_are_found_a_few_a_step_and_none_is_forgotten() -> None:
    driver = Driver(max_num_seqs=40)
    for number in range(40):
        prompt = (number,) * 15
        driver.scheduler.submit(RequestSpec(id=f"r{number}", prompt=prompt, max_tokens=3 if number == 39 else 5), 0)
    driver.step()
    driver.step()
    assert len(driver.scheduler._members.tables.index) == 32
    driver.step()  # the last one ends before its turn came: its block is entered as it leaves
    assert len(driver.scheduler._members.tables.index) == 40
    assert driver.scheduler.view().cached_blocks == 1


def test_a_replay_that_brings_all_its_tokens_ends_without_another() -> None:
    driver = Driver()
    driver.scheduler.submit(spec("a", 10, 3, output=(5, 6, 7)), 0)
    driver.step()
    assert driver.events == [Started("a", 0), Ended("a", Finish.LENGTH, None, 3, 0)]


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        ({"prompt": ()}, Refusal.EMPTY_PROMPT, ("prompt",)),
        ({"prompt": (1, 50_000)}, Refusal.TOKEN_OUT_OF_RANGE, ("prompt[1]", "50000", "49999")),
        ({"prompt": (-1,)}, Refusal.TOKEN_OUT_OF_RANGE, ("prompt[0]", "-1")),
        ({"output": (50_000,)}, Refusal.TOKEN_OUT_OF_RANGE, ("output[0]",)),
        ({"stop_token_ids": (3, 99_999)}, Refusal.TOKEN_OUT_OF_RANGE, ("stop_token_ids[1]", "99999")),
        (
            {"sampling": Sampling(logit_bias=((70_000, 1.0),))},
            Refusal.TOKEN_OUT_OF_RANGE,
            ("logit_bias[0]", "70000"),
        ),
        ({"max_tokens": -1}, Refusal.CONTEXT_LENGTH, ("max_tokens", "-1", "0")),
        ({"max_tokens": 4094}, Refusal.CONTEXT_LENGTH, ("max_tokens", "4094", "4097", "4096")),
        ({"prompt": tuple(range(3000))}, Refusal.KV_POOL, ("3000", "max_tokens", "188", "100")),
    ],
)
def test_a_refusal_names_field_value_and_limit(
    changes: dict[str, Any], reason: Refusal, words: tuple[str, ...]
) -> None:
    fields = {"id": "a", "prompt": (1, 2, 3), "max_tokens": 2} | changes
    answer = replica(num_blocks=100).submit(RequestSpec(**fields), 0)
    assert isinstance(answer, Refused) and answer.reason is reason
    assert all(word in answer.message for word in words), answer.message


def test_a_full_line_refuses_and_a_preempted_request_does_not_count_as_new() -> None:
    classes = {name: replace(service, max_queue=2) for name, service in DEFAULT_CLASSES.items()}
    scheduler = replica(classes=classes, max_num_seqs=1)
    assert isinstance(scheduler.submit(spec("a"), 0), Accepted)
    assert isinstance(scheduler.submit(spec("b"), 0), Accepted)
    answer = scheduler.submit(spec("c"), 0)
    assert isinstance(answer, Refused) and answer.reason is Refusal.QUEUE_FULL and "2" in answer.message
    assert answer.retry_after_ms > 0
    assert isinstance(scheduler.submit(replace(spec("d"), service_class="batch"), 0), Accepted), "a line of its own"


def test_an_unknown_class_is_refused_by_name() -> None:
    answer = replica().submit(replace(spec("a"), service_class="gold"), 0)
    assert isinstance(answer, Refused) and answer.reason is Refusal.UNKNOWN_CLASS
    assert answer.message == "service_class is 'gold'; there are batch, interactive, standard"


@pytest.mark.parametrize("name", ["num_blocks", "block_tokens", "max_num_seqs", "max_step_ns", "max_steps_in_flight"])
def test_limits_below_their_bounds_are_a_value_error(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0"):
        replica(**{name: 0})


def test_an_illegal_transition_is_an_assertion() -> None:
    request = Request(spec("a"), 1, Chain(b""), None, DEFAULT_CLASSES["standard"])
    request.move(State.FINISHED)
    with pytest.raises(AssertionError, match="a: finished -> running"):
        request.move(State.RUNNING)


def test_memory_grows_with_the_blocks_ever_used_not_with_the_pool() -> None:
    scheduler = replica(num_blocks=10**12, max_num_seqs=4)
    for number in range(50):
        scheduler.submit(spec(f"r{number}", 100, 1), 0)
    while (plan := scheduler.plan(0)) is not None:
        scheduler.apply(StepResult(plan.step, [7] * sum(part.sample for part in plan.slices)), 0)
    assert scheduler.view().free_blocks > 10**12 - 400
    scheduler.check()  # would not end if it were linear in the pool


def test_the_cost_model_learns_from_what_steps_took() -> None:
    scheduler = replica()
    scheduler.submit(spec("a", 10, 200), 0)
    for _ in range(200):
        plan = scheduler.plan(0)
        assert plan is not None
        scheduler.apply(StepResult(plan.step, [7], busy_ns=50_000_000), 0)
    assert plan.predicted_ns == pytest.approx(50_000_000, rel=0.05)
