"""Blocks from other engines and for them: whatever comes of a fetch, each request comes to what it must."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from shoal.core.classes import DEFAULT_CLASSES
from shoal.core.fetching import AHEAD_LIMIT_NS, KNOWN_NS, LATENCY_NS, LEAST_LIMIT_NS, MAX_FETCHES, REST_NS
from shoal.core.kv.hashing import chain, root_key, scope_key
from shoal.core.lending import LENT_SHARE
from shoal.core.limits import Limits
from shoal.core.plan import Accepted, Brought, Ended, Fetch, StepPlan, StepResult
from shoal.core.request import Finish, Peer, RequestSpec
from shoal.core.scheduler import Scheduler
from shoal.core.stepcost import StepCost
from tests.core.block_runner import BlockRunner
from tests.core.naive import Client, random_specs, sample
from tests.core.test_properties import Composer, World

MS = 1_000_000
ROOT = root_key("m", "float32", "1", 4)
STEPS = 150
WORLDS: list[tuple[Composer, int]] = [("value", seed) for seed in range(24)]
WORLDS += [("fcfs", seed) for seed in range(8)] + [("static", seed) for seed in range(4)]


def ahead_of(spec: RequestSpec) -> RequestSpec:
    """What brings its prefix before it comes."""
    greedy = replace(spec.sampling, prompt_logprobs=None)
    prompt = spec.prompt + spec.output
    return replace(
        spec,
        id=f"{spec.id}, ahead",
        prompt=prompt,
        output=(),
        max_tokens=0,
        sampling=greedy,
        leader=None,
        prefetch=True,
    )


class PeerWorld(World):
    """Prompts that others hold, fetches that bring any part of them at any time, and others that read blocks."""

    def __init__(self, seed: int, composer: Composer = "value") -> None:
        super().__init__(seed, composer)
        self.limits = replace(self.limits, fetch_bytes_per_s=self.chance.choice((1e6, 1e8)))
        self.scheduler = Scheduler(self.limits, hash_root=ROOT, cost=StepCost((0, 10e6, 1e4, 0, 0)))
        self.num_fetches = self.num_leases = self.num_lent = 0

    def submit(self) -> None:
        for spec in random_specs(self.chance, self.submitted):
            peer = Peer(self.chance.choice("pqrstuvw"), "i", self.chance.randrange(12))
            spec = replace(spec, peer=self.chance.choice((peer, peer, None)))
            specs = [spec]
            if self.chance.random() < 0.3:
                specs.insert(self.chance.randrange(2), ahead_of(spec))
            for each in specs:
                if isinstance(self.scheduler.submit(each, self.now_ns), Accepted):
                    self.clients[each.id] = Client(each)
        self.submitted += 1

    def fetched(self) -> None:
        """Some of those under way, in any order."""
        numbers = [*self.runner.fetches]
        for number in self.chance.sample(numbers, self.chance.randint(0, len(numbers))):
            fetch = self.runner.fetches[number]
            client = self.clients[fetch.id]
            tokens = [*client.spec.prompt, *client.spec.output]
            keys = chain(scope_key(ROOT, client.spec.salt), tokens, 4)
            num_good = self.chance.randint(0, len(fetch.blocks))
            brought = self.runner.fetched(number, tokens, keys.index(fetch.keys[0]), num_good)
            self.num_fetches += 1
            self.hear(self.scheduler.fetched([brought], self.now_ns))

    def lend(self) -> None:
        spec = self.chance.choice([*self.clients.values()]).spec if self.clients else None
        if spec is not None and len(self.runner.lent) < 3:
            keys = chain(scope_key(ROOT, spec.salt), spec.prompt, 4)[self.chance.randrange(3) :]
            self.num_leases += 1
            blocks = self.scheduler.lend(self.num_leases, keys, self.now_ns)
            self.num_lent += len(blocks)
            self.runner.lend(self.num_leases, blocks)

    def unlend(self) -> None:
        if self.runner.lent:
            lease = self.chance.choice([*self.runner.lent])
            self.runner.unlend(lease)
            self.scheduler.unlend(lease, self.now_ns)

    def drain(self) -> None:
        for _ in range(20_000):
            planned = self.plan()
            self.scheduler.check()
            moving = self.runner.flights or self.runner.copies or self.runner.fetches or self.runner.lent
            if not planned and not moving:
                break
            for turn in (self.apply, self.copy, self.fetched, self.unlend):
                if not planned or self.chance.random() < 0.5:
                    turn()
        super().drain()


@pytest.mark.parametrize(("composer", "seed"), WORLDS)
def test_every_request_comes_to_what_it_must(composer: Composer, seed: int) -> None:
    world = PeerWorld(seed, composer)
    turns = [world.plan] * 6 + [world.apply] * 5 + [world.copy] * 2 + [world.submit] * 2 + [world.abort]
    turns += [world.fetched] * 2 + [world.lend, world.unlend]
    while world.scheduler.view().step < STEPS:
        world.chance.choice(turns)()
        world.scheduler.check()
    world.drain()


def test_the_worlds_are_rough_enough() -> None:
    num_fetches = num_lent = num_brought = 0
    for seed in range(8):
        world = PeerWorld(seed)
        for _ in range(100):
            for turn in (world.submit, world.plan, world.lend, world.apply, world.copy, world.fetched, world.unlend):
                turn()
        num_fetches += world.num_fetches
        num_lent += world.num_lent
        num_brought += world.scheduler.view().peer_hits
    assert num_fetches > 12 and num_brought > 100 and num_lent > 50


class Clock:
    """A replica of 100 blocks of 4 tokens and 1 MB; a token takes 10 ms, and 1 MB/ms is fetched."""

    def __init__(self, **changes: object) -> None:
        settings = {"num_blocks": 100, "block_tokens": 4, "max_model_len": 400, "vocab_size": 1000}
        settings |= {"block_bytes": 1_000_000, "fetch_bytes_per_s": 1e9, **changes}
        limits = Limits(**settings, classes=DEFAULT_CLASSES)  # type: ignore[arg-type]
        self.scheduler = Scheduler(limits, hash_root=ROOT, cost=StepCost((0, 10e6, 0, 0, 0)))
        self.runner = BlockRunner(4, sample)
        self.now_ns = 0

    def submit(self, id: str, first: int = 0, *, length: int = 41, held: int = 10, address: str = "p") -> RequestSpec:
        prompt = tuple(range(first, first + length))
        spec = RequestSpec(id=id, prompt=prompt, max_tokens=2, peer=Peer(address, "i", held))
        assert isinstance(self.scheduler.submit(spec, self.now_ns), Accepted)
        return spec

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan(self.now_ns)
        assert plan is not None
        return plan

    def step(self) -> StepPlan:
        plan = self.plan()
        self.scheduler.apply(StepResult(plan.step, [7] * sum(part.sample for part in plan.slices)), self.now_ns)
        self.scheduler.check()
        return plan

    def fetches(self) -> list[Fetch]:
        return self.step().fetches

    def brought(self, fetch: Fetch, num_good: int, busy_ms: float = 20) -> None:
        self.scheduler.fetched([Brought(fetch.number, num_good, int(busy_ms * MS))], self.now_ns)
        self.scheduler.check()

    def run(self) -> Iterator[StepPlan]:
        while (plan := self.scheduler.plan(self.now_ns)) is not None:
            self.scheduler.apply(StepResult(plan.step, [7] * sum(part.sample for part in plan.slices)), self.now_ns)
            self.scheduler.check()
            yield plan


def test_a_prompt_that_a_peer_holds_is_fetched_and_the_rest_computed() -> None:
    clock = Clock()
    spec = clock.submit("a")
    (fetch,) = clock.fetches()
    assert (fetch.id, fetch.address, fetch.incarnation) == ("a", "p", "i")
    assert fetch.keys == chain(scope_key(ROOT), spec.prompt, 4)
    assert fetch.limit_ns == 400 * MS  # as long as computing
    clock.brought(fetch, 7)
    plan = next(clock.run())
    assert [admit.computed for admit in plan.admits] == [28]
    assert [(part.start, part.count) for part in plan.slices] == [(28, 13)]
    assert clock.scheduler.view().peer_hits == 28


def test_what_was_fetched_is_found_by_others() -> None:
    clock = Clock()
    clock.submit("a")
    (fetch,) = clock.fetches()
    clock.submit("b")
    assert clock.scheduler.plan(1) is None, "the same blocks are on their way for somebody else"
    clock.brought(fetch, 10)
    plan = next(clock.run())
    assert {admit.id: admit.computed for admit in plan.admits} == {"a": 40, "b": 40}
    assert not plan.fetches


@pytest.mark.parametrize(
    ("held", "length", "rate", "fetched"),
    [
        (10, 41, 1e9, True),  # 20 ms, or 400 ms
        (10, 41, 25.7e6, True),  # 399 ms
        (10, 41, 25.6e6, False),  # 401 ms
        (10, 40, 1e9, True),  # one token is computed at least: nine blocks
        (1, 41, 1e9, True),  # 11 ms, or 40 ms
        (0, 41, 1e9, False),
        (-1, 41, 1e9, False),
        (10, 41, 0.0, False),
    ],
)
def test_a_fetch_is_made_where_it_is_sooner_done_than_computing(
    held: int, length: int, rate: float, fetched: bool
) -> None:
    clock = Clock(fetch_bytes_per_s=rate)
    clock.submit("a", held=held, length=length)
    fetches = clock.fetches()
    assert [len(fetch.blocks) for fetch in fetches] == ([min(held, (length - 1) // 4)] if fetched else [])


def test_what_is_here_is_not_fetched() -> None:
    clock = Clock()
    clock.submit("a", held=0)
    for _ in clock.run():
        pass
    clock.submit("b", length=81, held=20)
    assert [len(fetch.blocks) for fetch in clock.fetches()] == [10]


def test_others_in_line_go_on_meanwhile() -> None:
    clock = Clock()
    clock.submit("a")
    clock.submit("b", first=100, held=0)
    plan = clock.step()
    assert [fetch.id for fetch in plan.fetches] == ["a"] and [part.id for part in plan.slices] == ["b"]


def test_one_that_is_aborted_gives_its_blocks_back_when_its_fetch_is_done() -> None:
    clock = Clock()
    clock.submit("a")
    (fetch,) = clock.fetches()
    assert len(clock.scheduler.abort("a", 1)) == 1
    clock.scheduler.check()
    assert clock.scheduler.view().free_blocks == 89
    clock.brought(fetch, 10)
    assert clock.scheduler.view().free_blocks == 100


def test_a_peer_that_brought_nothing_is_left_alone_for_a_while() -> None:
    clock = Clock()
    clock.submit("a")
    clock.brought(clock.fetches()[0], 0)
    clock.submit("b", first=100)
    clock.submit("c", first=200, address="q")
    assert [fetch.id for fetch in clock.fetches()] == ["c"]
    clock.now_ns = REST_NS
    clock.submit("d", first=300)
    assert [fetch.id for fetch in clock.fetches()] == ["d"]


def test_the_rate_is_learned_by_peer_and_forgotten_in_the_end() -> None:
    clock = Clock()
    for number in range(12):
        clock.submit(f"a{number}", first=50 * number, length=21)
        fetches = clock.fetches()
        if not fetches:
            break
        clock.brought(fetches[0], 5, busy_ms=LATENCY_NS / MS + 500)  # 100 ms a block, which takes 40 ms to compute
    assert 0 < number < 11, "a slow peer is not asked any more"
    clock.submit("q", first=700, length=21, address="q")
    assert clock.fetches()
    clock.now_ns = KNOWN_NS
    clock.submit("p", first=800, length=21)
    assert clock.fetches()


def test_only_so_many_are_fetched_at_once() -> None:
    clock = Clock()
    for number in range(MAX_FETCHES + 1):
        clock.submit(f"a{number}", first=50 * number, length=21)
    plan = clock.step()
    assert len(plan.fetches) == MAX_FETCHES
    assert [part.id for part in plan.slices] == [f"a{MAX_FETCHES}"]


def test_a_fetch_has_its_limit_also_where_computing_takes_no_time() -> None:
    clock = Clock()
    clock.submit("a", length=9)
    assert clock.fetches()[0].limit_ns == LEAST_LIMIT_NS


def test_what_never_began_or_brings_too_much_is_refused() -> None:
    clock = Clock()
    clock.submit("a")
    (fetch,) = clock.fetches()
    for number, num_good in ((fetch.number + 1, 1), (fetch.number, 11), (fetch.number, -1)):
        with pytest.raises(ValueError, match="under way"):
            clock.scheduler.fetched([Brought(number, num_good, 1)], 0)


# -- lending ---------------------------------------------------------------------------------------------------------


def test_what_is_lent_stays_until_the_lease_is_over() -> None:
    clock = Clock(num_blocks=44, max_model_len=170)
    spec = clock.submit("a", held=0)
    for _ in clock.run():
        pass
    keys = chain(scope_key(ROOT), spec.prompt, 4)
    blocks = clock.scheduler.lend(1, keys[2:], 0)
    assert len(blocks) == 8
    clock.submit("b", first=100, length=33 * 4, held=0)
    for _ in clock.run():
        clock.scheduler.check()
    assert clock.scheduler.lend(2, keys[2:], 0) == [], "no more than a part of all blocks is lent"
    clock.scheduler.unlend(2, 0)
    clock.scheduler.unlend(1, 0)
    assert clock.scheduler.lend(3, keys[2:], 0) == blocks
    clock.scheduler.unlend(3, 0)
    clock.submit("c", first=300, length=42 * 4, held=0)
    for _ in clock.run():
        clock.scheduler.check()
    assert clock.scheduler.lend(4, keys[2:], 0) == []


def test_one_that_needs_what_is_lent_waits_for_it() -> None:
    clock = Clock(num_blocks=40, max_model_len=160)
    spec = clock.submit("a", held=0)
    for _ in clock.run():
        pass
    assert len(clock.scheduler.lend(1, chain(scope_key(ROOT), spec.prompt, 4), 0)) == 40 // LENT_SHARE
    clock.submit("b", first=100, length=4 * 32, held=0)
    assert clock.scheduler.plan(1) is None
    clock.scheduler.unlend(1, 2)
    assert clock.plan().slices


def test_nothing_is_lent_of_what_is_not_here_and_no_lease_twice() -> None:
    clock = Clock()
    spec = clock.submit("a", held=0)
    for _ in clock.run():
        pass
    keys = chain(scope_key(ROOT), spec.prompt, 4)
    assert clock.scheduler.lend(1, [b"x" * 16, *keys], 0) == []
    assert len(clock.scheduler.lend(2, [*keys[:3], b"x" * 16, *keys[3:]], 0)) == 3
    assert len(clock.scheduler.lend(3, [keys[0], keys[2]], 0)) == 1, "not one behind the other"
    with pytest.raises(ValueError, match="lease 2"):
        clock.scheduler.lend(2, keys, 0)
    clock.scheduler.unlend(2, 0)
    with pytest.raises(ValueError, match="lease 2"):
        clock.scheduler.unlend(2, 0)


# -- fetching ahead ----------------------------------------------------------------------------------------------------


def ends(clock: Clock) -> list[Ended]:
    """Steps until there is nothing to do; how requests ended meanwhile."""
    ended: list[Ended] = []
    while (plan := clock.scheduler.plan(clock.now_ns)) is not None:
        result = StepResult(plan.step, [7] * sum(part.sample for part in plan.slices))
        ended += [each for each in clock.scheduler.apply(result, clock.now_ns) if isinstance(each, Ended)]
        clock.scheduler.check()
    return ended


def ahead(clock: Clock, **fields: object) -> RequestSpec:
    fields = {"id": "m", "prompt": tuple(range(41)), "max_tokens": 0, "peer": Peer("p", "i", 10)} | fields
    spec = RequestSpec(prefetch=True, **fields)  # type: ignore[arg-type]
    assert isinstance(clock.scheduler.submit(spec, clock.now_ns), Accepted)
    return spec


def test_a_prefetch_brings_blocks_and_computes_nothing() -> None:
    clock = Clock(fetch_bytes_per_s=1e3)  # slower than computing; nobody waits for it
    ahead(clock)
    plan = clock.step()
    (fetch,) = plan.fetches
    assert not plan.slices and len(fetch.blocks) == 10
    assert fetch.limit_ns == AHEAD_LIMIT_NS
    (ended,) = clock.scheduler.fetched([Brought(fetch.number, 9, 1)], 0)
    clock.scheduler.check()
    assert ended == Ended("m", Finish.LENGTH, None, 0, 36)
    view = clock.scheduler.view()
    assert (view.free_blocks, view.cached_blocks, view.prefix_queries) == (91, 9, 0)
    clock.submit("a", held=0)
    assert [admit.computed for admit in clock.step().admits] == [36]


@pytest.mark.parametrize(
    "fields",
    [{"peer": None}, {"peer": Peer("p", "i", 0)}, {"peer": Peer("rests", "i", 10)}, {"prompt": (1, 2, 3)}],
)
def test_where_nothing_can_be_fetched_that_is_told_at_once(fields: dict[str, object]) -> None:
    clock = Clock()
    clock.submit("a", first=100, address="rests")
    clock.brought(clock.fetches()[0], 0)
    for _ in clock.run():
        pass
    ahead(clock, **fields)
    assert ends(clock) == [Ended("m", Finish.LENGTH, None, 0, 0)]


def test_what_is_here_is_told_and_not_fetched_again() -> None:
    clock = Clock()
    clock.submit("a", held=0)
    ends(clock)
    ahead(clock)
    assert ends(clock) == [Ended("m", Finish.LENGTH, None, 0, 40)]


def test_nobody_makes_way_for_a_prefetch() -> None:
    clock = Clock(num_blocks=20, max_model_len=80)
    clock.submit("a", first=100, length=41, held=0)
    clock.step()
    ahead(clock)
    plan = clock.step()
    assert not plan.fetches and [part.id for part in plan.slices] == ["a"]
    assert clock.scheduler.view().preemptions == 0


def test_a_prefetch_that_is_taken_back_leaves_nothing_behind() -> None:
    clock = Clock()
    ahead(clock, id="waits")
    assert [each.reason for each in clock.scheduler.abort("waits", 0) if isinstance(each, Ended)] == [Finish.ABORT]
    clock.scheduler.check()
    ahead(clock, id="comes")
    (fetch,) = clock.fetches()
    assert len(clock.scheduler.abort("comes", 0)) == 1
    clock.brought(fetch, 10)
    ahead(clock, id="told", peer=None)
    assert clock.scheduler.plan(0) is not None
    assert len(clock.scheduler.abort("told", 0)) == 1
    clock.scheduler.check()
    assert clock.scheduler.view().free_blocks == 100


def test_a_replay_goes_on_where_others_would_be_refused_and_has_its_next_token_due() -> None:
    classes = {name: replace(service, max_queue=0) for name, service in DEFAULT_CLASSES.items()}
    clock = Clock()
    clock.scheduler.limits = replace(clock.scheduler.limits, classes=classes)
    spec = RequestSpec(id="r", prompt=tuple(range(9)), max_tokens=5)
    assert not isinstance(clock.scheduler.submit(spec, 0), Accepted)
    assert isinstance(clock.scheduler.submit(replace(spec, output=(7,)), 0), Accepted)
    clock.plan()
    request = clock.scheduler._requests["r"]
    assert request.token_due_ns == request.tpot_ns > 0
