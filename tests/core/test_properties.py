"""Random work on tiny pools: whatever is submitted, aborted and preempted, each request comes to what it must.

Every plan is carried out by a runner that sees when a block holds anything but the request's own prefix, or is reused
while a step in flight names it. `check()` runs after every operation.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal, get_args

import pytest

from shoal.core.classes import DEFAULT_CLASSES
from shoal.core.kv.hashing import root_key
from shoal.core.limits import Eviction, Limits
from shoal.core.plan import Accepted, Ended, Event, Held, Logprobs, PromptScored, Refused, Token
from shoal.core.request import Finish, RequestSpec
from shoal.core.scheduler import Scheduler
from shoal.core.stepcost import StepCost
from tests.core.block_runner import BlockRunner
from tests.core.naive import VOCAB, Client, random_specs, sample

SEEDS = 40
STEPS = 250  # x SEEDS = 10,000
Composer = Literal["value", "fcfs", "static"]
Disk = dict[bytes, tuple[Held, list[tuple[int, int] | None]]]
EVICTIONS = get_args(Eviction)
WORLDS: list[tuple[Composer, int]] = [("value", seed) for seed in range(SEEDS)]
WORLDS += [("fcfs", seed) for seed in range(SEEDS // 2)] + [("static", seed) for seed in range(SEEDS // 2)]


class World:
    """One scheduler, its runner and its clients, driven at random."""

    def __init__(self, seed: int, composer: Composer = "value", left: Disk | None = None) -> None:
        """`left`: on the disk, by an earlier run; None: there may be no disk."""
        self.chance = chance = random.Random(seed)
        max_wait_s = chance.choice((40.0, 1e6))
        self.now_ns = 0
        num_host_blocks = chance.choice((0, 5, 12, 60))
        has_disk = num_host_blocks > 0 and chance.random() < 0.7
        self.limits = Limits(
            num_blocks=chance.choice((8, 11, 16, 40)),
            block_tokens=4,
            max_model_len=200,
            vocab_size=VOCAB,
            max_num_seqs=chance.choice((1, 3, 8)),
            max_num_batched_tokens=chance.choice((2, 9, 32, 200)),
            max_prefill_chunk=chance.choice((0, 5, 16)),
            max_step_ns=chance.choice((500, 12, 5)) * 1_000_000,
            prefix_caching=chance.random() < 0.8 or left is not None,
            max_steps_in_flight=chance.choice((1, 2, 3)),
            composer=composer,
            classes={
                name: replace(service, max_queue=20, max_wait_s=max_wait_s, ttft_ms=chance.choice((0.0, 50.0)))
                for name, service in DEFAULT_CLASSES.items()
            },
            num_host_blocks=num_host_blocks if left is None else 12,
            disk_bytes_per_s=1e8 if has_disk or left is not None else 0.0,
            block_bytes=4000,
            copy_bytes_per_s=chance.choice((1e6, 1e8)),
            preemption=chance.choice(("auto", "auto", "swap", "recompute")),
            eviction=EVICTIONS[seed % len(EVICTIONS)],
        )
        if seed % 4 == 3:  # with one step in flight, too: then it is no pipeline
            self.limits = replace(self.limits, num_stages=self.limits.max_steps_in_flight)
        cost = StepCost((0, 1e6, 1e4, 0, 0))
        root = root_key("m", "float32", "1", 4)
        on_disk = [held for held, _ in left.values()] if left else ()
        self.scheduler = Scheduler(self.limits, hash_root=root, cost=cost, on_disk=on_disk)
        self.clients: dict[str, Client] = {}
        self.runner = BlockRunner(4, sample, scope=lambda id: self.clients[id].spec.salt)
        self.runner.disk = dict(left or {})
        self.submitted = 0

    def hear(self, events: Iterable[Event]) -> None:
        for event in events:
            self.clients[event.id].hear(event)

    def submit(self) -> None:
        for spec in random_specs(self.chance, self.submitted):
            answer = self.scheduler.submit(spec, self.now_ns)
            if isinstance(answer, Accepted):
                self.clients[spec.id] = Client(spec)
            else:
                assert isinstance(answer, Refused) and answer.message
        self.submitted += 1

    def abort(self) -> None:
        ids = list(self.clients)
        if ids:
            id = self.chance.choice(ids[-8:])
            ended = self.clients[id].ended
            events = self.scheduler.abort(id, self.now_ns)
            assert len(events) == (ended is None)
            self.hear(events)

    def plan(self) -> bool:
        before = self.scheduler.view().preemptions
        self.now_ns += self.chance.choice((0, 1, 10, 10, 3000)) * 1_000_000
        plan = self.scheduler.plan(self.now_ns)
        if plan is not None:
            again = {admit.id for admit in plan.admits} & set(plan.leaves)
            assert not again or before == self.scheduler.view().preemptions, f"{again} leave and enter in one step"
            something = plan.slices or plan.ops or plan.fetches or self.scheduler._members.prefetched
            assert something, "a plan of nothing, and nothing to tell"
            self.runner.launch(plan)
            if self.limits.num_stages > 1:
                assert all(part.from_step == -1 for part in plan.slices), "a stage would wait for the last one"
        return plan is not None

    def apply(self) -> None:
        if self.runner.flights:
            self.hear(self.scheduler.apply(self.runner.collect(), self.now_ns))

    def copy(self) -> None:
        if self.runner.copies:
            copied = self.runner.copy(lambda: self.chance.random() < 0.05)
            self.hear(self.scheduler.copied([copied], self.now_ns))

    def move(self) -> None:
        if self.runner.moves:
            self.hear(self.scheduler.copied([self.runner.move(self.chance)], self.now_ns))

    def drain(self) -> None:
        """Everything ends, in bounded time, and nothing is left behind."""
        for _ in range(20_000):
            planned = self.plan()
            self.scheduler.check()
            if not planned and not self.runner.flights and not self.runner.copies and not self.runner.moves:
                break
            if not planned or self.chance.random() < 0.5:
                self.apply()
            if not planned or self.chance.random() < 0.5:
                self.copy()
                self.move()
        assert all(client.ended for client in self.clients.values())
        view = self.scheduler.view()
        assert view.num_running == view.num_waiting == view.waiting_tokens == self.scheduler.num_in_flight == 0
        assert view.free_blocks + view.cached_blocks == self.limits.num_blocks
        assert view.free_host_blocks + view.cached_host_blocks == self.limits.num_host_blocks
        delivered = sum(len(client.output) - len(client.spec.output) for client in self.clients.values())
        assert view.generation_tokens == delivered
        assert view.hash_collisions == 0


@pytest.mark.parametrize(("composer", "seed"), WORLDS)
def test_every_request_comes_to_what_it_must(composer: Composer, seed: int) -> None:
    world = World(seed, composer)
    turns = (
        [world.plan] * 6 + [world.apply] * 5 + [world.copy, world.copy, world.move] + [world.submit] * 2 + [world.abort]
    )
    while world.scheduler.view().step < STEPS:
        world.chance.choice(turns)()
        world.scheduler.check()
    world.drain()


def test_a_run_finds_on_the_disk_what_the_one_before_it_left() -> None:
    """Each seed asks for the same prompts twice; blocks of the disk fail, and are dropped by it, meanwhile."""
    num_hit = 0
    for seed in range(12):
        left: Disk = {}
        for _ in range(2):
            world = World(seed, left=left)
            turns = (
                [world.plan] * 6 + [world.apply] * 5 + [world.copy, world.move] * 2 + [world.submit] * 2 + [world.abort]
            )
            while world.scheduler.view().step < 150:
                world.chance.choice(turns)()
                world.scheduler.check()
            world.drain()
            left = world.runner.disk
            num_hit += world.scheduler.view().disk_hits
    assert num_hit > 200


@pytest.mark.parametrize("seed", range(3))
def test_equal_inputs_print_equal_plans(seed: int) -> None:
    def story() -> list[str]:
        world, lines = World(seed), []
        for turn in range(300):
            if turn % 3 == 0:
                world.submit()
            plan = world.scheduler.plan(turn * 5_000_000)
            lines.append(repr(plan))
            if plan is not None:
                world.runner.launch(plan)
            world.apply()
        return lines

    assert story() == story()


@pytest.mark.parametrize(
    ("composer", "preemptions", "parks", "hits"),
    [("value", 40, 5, 1000), ("fcfs", 20, 5, 1000), ("static", 1, 0, 500)],
)
def test_the_worlds_are_rough_enough(composer: Composer, preemptions: int, parks: int, hits: int) -> None:
    """What the property test is about does happen in it."""
    views = []
    for seed in range(12):
        world = World(seed, composer)
        for _ in range(150):
            world.submit()
            while world.plan():
                pass
            world.apply()
            world.copy()
            world.move()
        views.append(world.scheduler.view())
    assert sum(view.preemptions for view in views) >= preemptions
    assert sum(view.parks for view in views) >= parks
    assert sum(view.prefix_hits for view in views) > hits
    assert sum(view.recomputed_tokens for view in views) >= preemptions


def test_the_judge_is_not_blind() -> None:
    spec = RequestSpec(id="a", prompt=(1,), max_tokens=2)
    for wrong in (
        Token("a", 1, sample("a", 1), None),  # a gap
        Ended("a", Finish.LENGTH, None, 0, 0),  # too short
        Ended("a", Finish.ABORT, None, 3, 0),  # a wrong count
        PromptScored("a", 2, [Logprobs(-1.0, ())]),  # a gap
    ):
        with pytest.raises(AssertionError):
            Client(spec).hear(wrong)
    client = Client(spec)
    client.hear(Ended("a", Finish.ABORT, None, 0, 0))
    with pytest.raises(AssertionError, match="after the end"):
        client.hear(Ended("a", Finish.ABORT, None, 0, 0))
