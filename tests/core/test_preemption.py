"""Cases SCH-02 and SCH-03: who yields to whom, and that work always ends where KV is short."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from typing import Any

import pytest

from shoal.core.kv.hashing import root_key
from shoal.core.limits import Limits
from shoal.core.plan import Copied, Ended, Event, Parked, Preempted, StepPlan, Token
from shoal.core.request import RequestSpec
from shoal.core.scheduler import Scheduler
from tests.core.block_runner import BlockRunner
from tests.core.naive import VOCAB, Client, sample

STEP_NS = 100_000_000


class Clock:
    """A replica whose steps take one tick each; copies are done `copy_steps` after they began."""

    def __init__(self, copy_steps: int = 1, **limits: Any) -> None:
        fields = {"num_blocks": 1000, "max_model_len": 4096, "vocab_size": VOCAB, "block_bytes": 1000} | limits
        self.scheduler = Scheduler(Limits(**fields), hash_root=root_key("m", "float32", "1", 16))
        self.runner = BlockRunner(16, sample)
        self.clients: dict[str, Client] = {}
        self.tick = 0
        self.token_ticks: dict[str, list[int]] = {}
        self.end_ticks: dict[str, int] = {}
        self.yielded: list[list[str]] = []  # by tick
        self._copy_steps = copy_steps
        self._copies: deque[int] = deque()  # the ticks in which they are done

    def submit(self, id: str, prompt: int, max_tokens: int, priority: int = 0) -> None:
        first = sum(map(ord, id)) % VOCAB
        spec = RequestSpec(
            id=id, prompt=(first,) * prompt, max_tokens=max_tokens, priority=priority, salt=id
        )  # a salt each: nothing is shared, so blocks are counted plainly
        self.runner.scope = lambda id: id
        self.scheduler.submit(spec, self.tick * STEP_NS)
        self.clients[id] = Client(spec)
        self.token_ticks[id] = []

    def step(self) -> StepPlan | None:
        self.tick += 1
        while self._copies and self._copies[0] <= self.tick:
            self._copies.popleft()
            self._hear(self.scheduler.copied([self.runner.copy()], self.tick * STEP_NS))
        plan = self.scheduler.plan(self.tick * STEP_NS)
        self.yielded.append([])
        if plan is not None:
            self.runner.launch(plan)
            self._copies.extend([self.tick + self._copy_steps] * len(plan.ops))
            self._hear(self.scheduler.apply(self.runner.collect(), self.tick * STEP_NS))
            assert not {part.id for part in plan.slices} & set(self.yielded[-1]), "scheduled and preempted in one step"
        self.scheduler.check()
        return plan

    def run(self, limit: int = 2000) -> None:
        while len(self.end_ticks) < len(self.clients):
            self.step()
            assert self.tick < limit, f"{self.clients.keys() - self.end_ticks.keys()} do not end"

    def _hear(self, events: Sequence[Event]) -> None:
        for event in events:
            self.clients[event.id].hear(event)  # holds every token against the undisturbed run
            if isinstance(event, Token):
                self.token_ticks[event.id].append(self.tick)
            elif isinstance(event, Preempted | Parked):
                self.yielded[-1].append(event.id)
            elif isinstance(event, Ended):
                self.end_ticks[event.id] = self.tick

    @property
    def preemptions(self) -> int:
        return self.scheduler.view().preemptions


def test_sch_02_a_an_urgent_request_takes_the_slot_of_the_newest_least_urgent() -> None:
    clock = Clock(max_num_seqs=2)
    clock.submit("L1", 16, 200, priority=10)
    clock.submit("L2", 16, 200, priority=10)
    for _ in range(5):
        clock.step()
    clock.submit("H", 16, 5, priority=0)
    clock.submit("E", 16, 5, priority=10)
    clock.run()
    assert clock.token_ticks["H"][0] <= 5 + 2
    assert clock.preemptions <= 1 and ["L2"] in clock.yielded
    resumed = next(tick for tick in clock.token_ticks["L2"] if tick > 7)
    assert resumed < clock.token_ticks["E"][0], "a preempted request keeps its place before later equals"


def test_sch_02_b_equals_never_preempt_each_other() -> None:
    clock = Clock(max_num_seqs=2)
    clock.submit("L1", 16, 50, priority=10)
    clock.submit("L2", 16, 50, priority=10)
    for _ in range(5):
        clock.step()
    clock.submit("E", 16, 5, priority=10)
    clock.run()
    assert clock.preemptions == 0


@pytest.mark.parametrize("host", [0, 40])
def test_sch_02_c_when_kv_is_short_the_more_urgent_end_first(host: int) -> None:
    clock = Clock(max_num_seqs=4, num_blocks=9, num_host_blocks=host, preemption="swap")
    clock.submit("A", 30, 40, priority=5)
    clock.submit("B", 30, 40, priority=1)
    clock.submit("C", 30, 40, priority=3)
    clock.run()
    assert clock.end_ticks["B"] <= clock.end_ticks["C"] <= clock.end_ticks["A"]
    assert clock.preemptions <= 3


def test_sch_02_d_a_stream_of_urgent_requests_starves_nobody() -> None:
    clock = Clock(max_num_seqs=1)
    clock.submit("L", 16, 20, priority=10)
    for tick in range(400):
        if tick % 3 == 0:  # the slot is never free of them
            clock.submit(f"H{tick}", 16, 3, priority=0)
        clock.step()
    bound_s = clock.scheduler.limits.classes["standard"].max_wait_s
    assert clock.tick * STEP_NS / 1e9 < bound_s, "so far it may wait"
    tick = 400
    while "L" not in clock.end_ticks:
        if tick % 3 == 0:
            clock.submit(f"H{tick}", 16, 3, priority=0)
        clock.step()
        tick += 1
        assert tick * STEP_NS / 1e9 <= bound_s + 5, "L waits past its bound"
    assert len(clock.token_ticks["L"]) == 20


@pytest.mark.parametrize(("mode", "host", "recomputed"), [("recompute", 0, 128), ("swap", 40, 0)])
def test_sch_03_two_that_do_not_fit_together_end_one_after_the_other(mode: str, host: int, recomputed: int) -> None:
    clock = Clock(num_blocks=10, num_host_blocks=host, preemption=mode, prefix_caching=False)
    clock.submit("A", 64, 64)
    clock.submit("B", 64, 64)
    clock.run()
    assert clock.preemptions <= 2
    assert clock.scheduler.view().recomputed_tokens <= recomputed
    check_progress(clock)


def test_sch_03_c_victims_are_no_more_than_needed_while_blocks_come_back_late() -> None:
    clock = Clock(copy_steps=3, num_blocks=10, num_host_blocks=40, preemption="swap", prefix_caching=False)
    for number in range(8):
        clock.submit(f"R{number}", 16, 48)
    clock.run()
    assert clock.scheduler.view().recomputed_tokens == 0
    most_needed, own = 10, 2  # blocks that ten running could need at once; blocks of the smallest victim
    assert max(map(len, clock.yielded)) <= ceil(most_needed / own)
    check_progress(clock)


def check_progress(clock: Clock) -> None:
    ticks = sorted({tick for ticks in clock.token_ticks.values() for tick in ticks})
    gaps = [later - earlier for earlier, later in pairwise(ticks)]
    assert max(gaps) <= 3, f"no token for {max(gaps)} steps"


def test_a_host_tier_that_is_full_refuses_a_park() -> None:
    clock = Clock(num_blocks=10, num_host_blocks=2, preemption="swap", prefix_caching=False)
    clock.submit("A", 64, 64)
    clock.submit("B", 64, 64)
    clock.run()
    view = clock.scheduler.view()
    assert view.parks == 0 and view.preemptions > 0 and view.recomputed_tokens > 0


def test_aborts_at_every_moment_of_a_park_leave_nothing_behind() -> None:
    """The victim is aborted at each tick of its life in turn: running, parking, parked, returning, running again."""
    ends = set()
    for moment in range(1, 40):
        clock = Clock(copy_steps=3, max_num_seqs=1, num_host_blocks=40, preemption="swap")
        clock.submit("L", 40, 60, priority=10)
        for tick in range(1, moment + 1):
            if tick == 4:
                clock.submit("H", 16, 5)
            clock.step()
        ends.add(clock.scheduler._requests["L"].state)
        clock._hear(clock.scheduler.abort("L", clock.tick * STEP_NS))
        clock.scheduler.check()
        clock.run()
        while clock.runner.copies:
            clock.step()
        view = clock.scheduler.view()
        assert view.free_host_blocks + view.cached_host_blocks == 40 and view.free_blocks + view.cached_blocks == 1000
    assert {"running", "parking", "waiting", "returning"} <= ends


def test_a_copy_out_of_turn_is_an_error() -> None:
    with pytest.raises(ValueError, match="copy 7 is done; expected 0"):
        Clock().scheduler.copied([Copied(7, 1)], 0)
