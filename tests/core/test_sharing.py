"""Prefix blocks in the host tier: what is copied there, what makes room for what, and what looking for them costs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from shoal.core.kv import host, prefix
from shoal.core.kv.hashing import NO_KEY, chain, root_key, scope_key
from shoal.core.kv.host import HostEntry, HostTier
from shoal.core.kv.prefix import check
from shoal.core.limits import Limits
from shoal.core.plan import Ended, Held, KvOp, StepPlan
from shoal.core.request import RequestSpec
from shoal.core.scheduler import Scheduler
from tests.core.block_runner import BlockRunner
from tests.core.naive import VOCAB, Client, sample

STEP_NS = 100_000_000
SIZE = 4


class Replica:
    """Blocks of four tokens; steps take one tick, and copies are done when they are told to be."""

    def __init__(self, on_disk: Sequence[Held] = (), **limits: Any) -> None:
        fields = {
            "num_blocks": 64,
            "num_host_blocks": 64,
            "block_tokens": SIZE,
            "max_model_len": 400,
            "vocab_size": VOCAB,
            "block_bytes": 1000,
        }
        root = root_key("m", "float32", "1", SIZE)
        self.scheduler = Scheduler(Limits(**(fields | limits)), hash_root=root, on_disk=on_disk)
        self.runner = BlockRunner(SIZE, sample)
        self.clients: dict[str, Client] = {}
        self.ended: list[str] = []
        self.ops: list[KvOp] = []
        self._copies: deque[KvOp] = deque()
        self._tick = 0

    @property
    def host(self) -> HostTier:
        return self.scheduler._members.parking.host

    def submit(self, id: str, prompt: tuple[int, ...], max_tokens: int = 1, **fields: Any) -> None:
        spec = RequestSpec(id=id, prompt=prompt, max_tokens=max_tokens, **fields)
        self.scheduler.submit(spec, self._tick * STEP_NS)
        self.clients[id] = Client(spec)

    def step(self) -> StepPlan | None:
        self._tick += 1
        plan = self.scheduler.plan(self._tick * STEP_NS)
        if plan is not None:
            self.ops += plan.ops
            self._copies += plan.ops
            self.runner.launch(plan)
            for event in self.scheduler.apply(self.runner.collect(), self._tick * STEP_NS):
                self.clients[event.id].hear(event)
                self.ended += [event.id] if isinstance(event, Ended) else []
        self.scheduler.check()
        return plan

    def copy(self) -> bool:
        """All that are under way are done. False: none was."""
        num = len(self._copies)
        for _ in range(num):
            self._copies.popleft()
            self.scheduler.copied([self.runner.copy()], self._tick * STEP_NS)
        self.scheduler.check()
        return num > 0

    def run(self, *ids: str) -> None:
        for _ in range(200):
            self.step()
            self.copy()
            if set(ids) <= set(self.ended):
                return
        raise AssertionError(f"{set(ids) - set(self.ended)} do not end")

    def serve(self, id: str, prompt: tuple[int, ...], **fields: Any) -> None:
        self.submit(id, prompt, **fields)
        self.run(id)

    def rest(self, num_steps: int = 12) -> None:
        """Steps of a stream that needs one block, beside which copies are made."""
        self.submit(f"rest{self._tick}", (1,), max_tokens=3)
        for _ in range(num_steps):
            self.step()
            self.copy()


def prompt(number: int, num_blocks: int) -> tuple[int, ...]:
    """Whole blocks, and a token more."""
    return tuple((number * 31 + place * 7 + place // 5) % VOCAB for place in range(num_blocks * SIZE + 1))


def hosted(replica: Replica, tokens: tuple[int, ...]) -> list[int]:
    """Which blocks of a prompt the host tier has."""
    keys = chain(scope_key(root_key("m", "float32", "1", SIZE)), tokens, SIZE)
    return [place for place, key in enumerate(keys) if replica.host.find(key) is not None]


def left_after(replica: Replica, num_blocks: int, tokens: tuple[int, ...]) -> list[int]:
    """Which blocks of a prompt the host tier still has when somebody has taken so many."""
    replica.host.release(replica.host.allocate(num_blocks))
    return hosted(replica, tokens)


def test_a_prefix_makes_room_from_its_end() -> None:
    """Also right after it was copied."""
    replica = Replica(num_host_blocks=20)
    replica.serve("a", prompt(1, 20))
    while not hosted(replica, prompt(1, 20)):
        replica.rest(1)
    assert hosted(replica, prompt(1, 20)) == list(range(20))
    assert left_after(replica, 8, prompt(1, 20)) == list(range(12))


def test_a_prefix_of_which_the_device_has_the_start_makes_room_from_its_end_too() -> None:
    """What was found on the device counts as used in the host tier."""
    replica = Replica(num_blocks=20, num_host_blocks=40)
    replica.serve("a", prompt(1, 12))
    replica.rest()
    replica.serve("b", prompt(2, 15))  # the device keeps the start of "a" alone
    replica.rest()
    replica.submit("c", prompt(1, 12), max_tokens=20)
    while not replica.scheduler.view().host_hits:
        replica.step()
    assert 0 < replica.scheduler.view().host_hits < 48
    replica.copy()
    assert hosted(replica, prompt(1, 12)) == list(range(12))
    num_others = replica.host.num_available - 12
    assert left_after(replica, num_others + 4, prompt(1, 12)) == list(range(8))


def test_a_prefix_longer_than_the_tier_fills_it_once() -> None:
    """Its end never drives its own start out, and nothing is copied again and again."""
    replica = Replica(num_blocks=64, num_host_blocks=16)
    replica.serve("long", prompt(1, 40))
    replica.rest(30)
    assert hosted(replica, prompt(1, 40)) == list(range(16))
    assert sum(len(op.host_blocks) for op in replica.ops if op.out) <= 17  # one is of the stream beside


@pytest.mark.interpreted
def test_looking_again_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt whose blocks are in the host tier waits for its turn: nothing is looked at twice."""
    replica = Replica(num_blocks=64, num_host_blocks=200)
    replica.serve("a", prompt(1, 40))
    replica.rest()
    replica.serve("b", prompt(2, 60))  # on the device nothing is left of "a"
    replica.rest()
    members = replica.scheduler._members
    replica.submit("again", prompt(1, 40))
    (waiting,) = members.line.stamp(replica._tick * STEP_NS)
    members.tables.blocks_to_enter(waiting)
    matched = len(waiting.chain.matched)
    found = list(members.sharing.find(waiting))
    assert len(found) == 40 - matched > 30

    looked: list[int] = []
    monkeypatch.setattr(host, "check", lambda parent, ids: looked.append(ids) or check(parent, ids))
    for _ in range(10):
        assert members.sharing.find(waiting) == found and not looked
    tier, again = replica.host, found[20]
    for entry in reversed(found[20:]):
        tier.forget(entry)
    assert members.sharing.find(waiting) == found[:20] and not looked
    (again.block,) = tier.allocate(1)
    tier.keep(again)
    assert members.sharing.find(waiting) == [*found[:20], again] and len(looked) == 1


def test_nobody_makes_way_for_one_whose_prefix_is_still_coming() -> None:
    """Two urgent requests share a prefix in the host tier. The second one needs a slot when the copy is done."""
    replica = Replica(max_num_seqs=2, num_host_blocks=200)
    replica.serve("a", prompt(1, 20))
    replica.rest()
    replica.serve("b", prompt(2, 60))  # on the device nothing is left of "a"
    replica.rest()
    replica.submit("low", (5,), max_tokens=60, service_class="batch")
    replica.step()
    for id in ("first", "second"):
        replica.submit(id, prompt(1, 20), max_tokens=3, service_class="interactive")
        for _ in range(3):
            replica.step()
    assert replica.scheduler.view().preemptions == 0
    assert [op.id for op in replica.ops if not op.out] == ["first"]
    replica.copy()
    replica.step()
    assert replica.scheduler.view().preemptions == 1
    replica.run("first", "second", "low")


@pytest.mark.interpreted
def test_kv_02_d_with_a_constant_hash_a_lookup_in_the_host_tier_is_a_miss_and_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix, "block_key", lambda parent, tokens: b"the same 16 byte")
    replica = Replica()
    replica.serve("a", prompt(1, 1))
    replica.rest()
    assert replica.host.num_cached == 1
    replica.scheduler._members.tables.pool.allocate(64)  # on the device nothing is left of "a"
    assert replica.scheduler.view().cached_blocks == 0
    before = replica.scheduler.view().hash_collisions
    tier = replica.scheduler._members.sharing
    replica.submit("b", prompt(2, 1))
    replica.submit("c", prompt(1, 1))
    line = {request.id: request for request in replica.scheduler._members.line}
    assert tier.find(line["b"]) == [] and replica.scheduler.view().hash_collisions == before + 1
    assert len(tier.find(line["c"])) == 1 and replica.scheduler.view().hash_collisions == before + 1


@pytest.mark.interpreted
@pytest.mark.parametrize("right", [False, True])
def test_kv_02_d_with_a_constant_hash_a_lookup_on_the_disk_is_a_miss_and_is_counted(
    monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    key = b"the same 16 byte"
    monkeypatch.setattr(prefix, "block_key", lambda parent, tokens: key)
    tokens = prompt(1, 1)
    replica = Replica([Held(key, NO_KEY, tokens[:SIZE] if right else (9,) * SIZE)], disk_bytes_per_s=1e9)
    replica.submit("a", tokens)
    plan = replica.scheduler.plan(1)
    assert plan is not None and [len(op.disk) for op in plan.ops] == [1] * right
    assert replica.scheduler.view().hash_collisions == (not right)


def test_a_host_block_stays_while_a_copy_reads_it() -> None:
    tier = HostTier(3, prefix.PrefixIndex(SIZE))
    entries = [
        HostEntry(bytes([number]) * 16, b"", (number,), number, block) for number, block in enumerate(tier.allocate(3))
    ]
    assert all(tier.keep(entry) for entry in entries)
    tier.hold(entries[:2])
    tier.hold(entries[:1])
    assert (tier.num_available, tier.allocate(1)) == (1, [entries[2].block])
    tier.let_go(entries[:2])
    assert tier.num_available == 1, "one still reads the first"
    assert tier.allocate(1) == [entries[1].block]
    tier.let_go(entries[:1])
    assert tier.allocate(1) == [entries[0].block]
    tier.check([[0, 1, 2]])
