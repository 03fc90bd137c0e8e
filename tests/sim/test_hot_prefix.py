"""Four replicas, a router and a directory on one clock: where requests with a common beginning go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from random import Random

import pytest

from shoal.core.kv.hashing import chain, root_key, scope_key
from shoal.core.limits import Limits
from shoal.core.plan import Ended, Event, Refused
from shoal.core.request import RequestSpec
from shoal.core.scheduler import Scheduler
from shoal.core.stepcost import StepCost
from shoal.engine.holdings import Feed, Holdings
from shoal.fleet import route
from shoal.fleet.directory import Directory
from shoal.fleet.scorers import Errand
from shoal.fleet.view import ReplicaView
from shoal.sim.agenda import Agenda
from shoal.sim.replica import Modelled, Replica

BLOCK, ROOT = 16, root_key("simulated", "none", "none", 16)
COSTS = (8e6, 1e5, 50.0, 1e4, 300.0)  # a prompt of 2,000 tokens takes 0.3 s, a decode among sixteen of them 18 ms
SECOND_NS = 1_000_000_000


class Engine:
    """One simulated replica, and what it tells of itself."""

    def __init__(self, name: str, agenda: Agenda, tell: Fleet) -> None:
        limits = Limits(num_blocks=3000, block_tokens=BLOCK, max_model_len=8192, vocab_size=1000, max_num_seqs=32)
        self.name = name
        self.scheduler = Scheduler(limits, hash_root=ROOT, cost=StepCost(COSTS))
        self.scheduler.kv_news()
        self.holdings = Holdings()
        self.feed: Feed = self.holdings.follow()
        self.replica = Replica(self.scheduler, Modelled(StepCost(COSTS)), agenda, tell=partial(tell.hear, self))

    def view(self) -> ReplicaView:
        view = self.scheduler.view()
        return ReplicaView(
            name=self.name,
            ready=True,
            num_running=view.num_running,
            num_waiting=view.num_waiting,
            waiting_tokens=view.waiting_tokens,
            context_tokens=view.context_tokens,
            costs=COSTS,
        )


class Fleet:
    def __init__(self, informed: bool) -> None:
        self.agenda = Agenda()
        self.engines = [Engine(name, self.agenda, self) for name in "abcd"]
        self.where: dict[str, str] = {}
        self.cached: Counter[str] = Counter()
        self.expected: Counter[str] = Counter()
        self._directory = Directory(max_entries=20_000)
        self._informed = informed
        self._chance = Random(7)
        self._num_sent = 0

    def hear(self, engine: Engine, events: Iterable[Event | Refused]) -> None:
        for event in events:
            assert not isinstance(event, Refused), event
            if isinstance(event, Ended):
                self.cached[engine.name] += event.cached_tokens
        engine.holdings.take(engine.scheduler.kv_news())
        while self._informed and engine.feed:
            news = engine.feed.piece()
            self._directory.tell(engine.name, news.keys, news.parents, news.tiers)

    def send(self, prompt: tuple[int, ...], max_tokens: int = 64) -> None:
        keys = chain(scope_key(ROOT), prompt, BLOCK)
        errand = Errand(keys=keys, block_tokens=BLOCK, prompt_tokens=len(prompt))
        views = [engine.view() for engine in self.engines]
        picked = route.pick(errand, views, self._directory.holders(keys), self._chance.sample)
        assert picked is not None
        id = f"r{self._num_sent}"
        self._num_sent += 1
        self.where[id] = picked.name
        self.expected[picked.name] += picked.cached_tokens
        engine = next(engine for engine in self.engines if engine.name == picked.name)
        engine.replica.submit(RequestSpec(id=id, prompt=prompt, max_tokens=max_tokens, prefix_keys=keys))

    def run(self, prompts: list[tuple[int, ...]], gap_ns: int) -> None:
        begin_ns = self.agenda.now_ns
        for number, prompt in enumerate(prompts):
            self.agenda.at(begin_ns + number * gap_ns, partial(self.send, prompt))
        self.agenda.run()
        for engine in self.engines:
            engine.scheduler.check()


def tokens(chance: Random, count: int) -> tuple[int, ...]:
    return tuple(chance.choices(range(1000), k=count))


def test_a_prefix_that_all_ask_for_is_held_by_as_many_as_its_load_needs() -> None:
    """120 requests in 6 s share 2,000 tokens, and one replica holds them when they come."""
    fleets = {}
    for informed in (True, False):
        chance = Random(1)
        common = tokens(chance, 2000)
        fleets[informed] = fleet = Fleet(informed)
        fleet.run([common], 0)  # one holds it when the others come
        fleet.run([common + tokens(chance, 40) for _ in range(120)], SECOND_NS // 20)
    shares = Counter(fleets[True].where.values())
    assert len(shares) >= 3 and max(shares.values()) <= 60, shares
    ends_ns = {informed: fleet.agenda.now_ns for informed, fleet in fleets.items()}
    assert ends_ns[True] <= 1.1 * ends_ns[False]


def test_a_light_load_stays_where_the_prefix_is() -> None:
    chance = Random(1)
    common = tokens(chance, 2000)
    fleet = Fleet(informed=True)
    fleet.run([common + tokens(chance, 40) for _ in range(20)], 2 * SECOND_NS)
    assert len(set(fleet.where.values())) == 1
    assert sum(fleet.cached.values()) == sum(fleet.expected.values()) == 19 * 2000


@pytest.mark.parametrize("seed", range(3))
def test_conversations_return_to_the_replica_that_knows_them(seed: int) -> None:
    chance = Random(seed)
    fleets = {}
    talks = [tokens(chance, 400) for _ in range(12)]
    prompts = []
    for _ in range(6):
        chance.shuffle(talks)
        talks = [talk + tokens(chance, 160) for talk in talks]
        prompts += talks
    for informed in (True, False):
        fleets[informed] = fleet = Fleet(informed)
        fleet.run(prompts, SECOND_NS // 4)
    cached = {informed: sum(fleet.cached.values()) for informed, fleet in fleets.items()}
    most = sum(len(prompt) - 160 for prompt in prompts) - 12 * 400
    assert cached[True] >= 0.9 * most
    assert cached[True] >= 1.5 * cached[False]
    assert sum(fleets[True].expected.values()) == pytest.approx(cached[True], rel=0.05)
