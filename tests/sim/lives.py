"""One life of a simulated replica whose blocks have contents: KV that follows from all the KV that was read for it.

    state 0 = the salt      kv i = H(state i, token i)      state i + 1 = H(state i, kv i)      next token = H(state)

A step reads the KV of each position before its own from the blocks, so whatever is wrong there shows in its tokens.
Blocks that are being written hold TORN until that is done. What crosses a tier or a wire has a digest, which is checked
at the other end and tells of bits that were flipped, and of nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any
from zlib import crc32

from shoal.core.kv.hashing import root_key
from shoal.core.kv.news import TIERS
from shoal.core.limits import Limits
from shoal.core.plan import (
    Accepted,
    Admit,
    Brought,
    Copied,
    Ended,
    Event,
    Fetch,
    Held,
    KvOp,
    Logprobs,
    Refused,
    Slice,
    StepPlan,
    StepResult,
)
from shoal.core.request import Finish, RequestSpec, Sampling
from shoal.core.scheduler import Scheduler
from shoal.core.stepcost import StepCost
from shoal.engine.updates import Updates
from shoal.gateway.link import Sink
from shoal.sim.agenda import Agenda
from shoal.sim.replica import Replica
from shoal.wire.messages import Refusing
from tests.core.naive import expected_output

MS = 1_000_000
SIZE = 4  # tokens of a block
VOCAB = 256
ROOT = root_key("m", "float32", "1", SIZE)
COST = (2e6, 1e6, 0.0, 1e5, 1e3)
WIRE_NS = 200_000  # from an engine to a gateway

Content = tuple[int, ...]  # of a block: KV by position
TORN: Content = (-7,) * SIZE
Disk = dict[bytes, tuple[Held, Content, int]]  # with the digest


def digest(content: Content) -> int:
    return hash(content)


def sound(content: Content, told: int) -> bool:
    """Whether it is what it was when its digest was made."""
    return digest(content) == told


def scope(salt: str) -> int:
    return crc32(salt.encode())


def behind(state: int, kv: int) -> int:
    return hash((state, kv))


def kv_of(state: int, token: int) -> int:
    return hash((state, token, 1))


def sampled(state: int, sampling: Sampling, choice: int) -> int:
    return hash((state, sampling.seed, choice)) % VOCAB


def expected(spec: RequestSpec) -> tuple[list[int], Finish]:
    state = scope(spec.salt)
    for token in spec.prompt:
        state = behind(state, kv_of(state, token))

    def choose(id: str, index: int) -> int:
        nonlocal state
        token = sampled(state, spec.sampling, spec.choice)
        state = behind(state, kv_of(state, token))
        return token

    return expected_output(spec, choose)


class Until(Agenda):
    """The agenda as one life sees it: what was to happen after its end does not."""

    def __init__(self, agenda: Agenda) -> None:
        self.over = False
        self._agenda = agenda

    @property
    def now_ns(self) -> int:  # type: ignore[override]
        return self._agenda.now_ns

    def at(self, when_ns: int, action: Callable[[], None]) -> None:
        self._agenda.at(when_ns, lambda: None if self.over else action())


class Watched(Scheduler):
    """Checked and written down after every operation; copies and fetches bring what became of them in the meantime."""

    def __init__(self, life: Life, limits: Limits, on_disk: Iterable[Held]) -> None:
        super().__init__(limits, hash_root=ROOT, cost=StepCost(COST), on_disk=on_disk)
        self.held: dict[int, set[bytes]] = {tier: set() for tier in TIERS}  # as its news say
        self._life = life
        self._done(None)

    def _done(self, answer: Any, *operation: object) -> Any:
        self._life.write(operation, answer)
        self.check()
        for key, _, tier, stored in self.kv_news():
            held = self.held[tier]
            assert (key in held) is not stored, f"stored twice, or dropped twice: {key.hex()} in tier {tier}"
            (held.add if stored else held.remove)(key)
        return answer

    def submit(self, spec: RequestSpec, now_ns: int) -> Accepted | Refused:
        return self._done(super().submit(spec, now_ns), "submit", spec)  # type: ignore[no-any-return]

    def abort(self, id: str, now_ns: int) -> list[Event]:
        return self._done(super().abort(id, now_ns), "abort", id)  # type: ignore[no-any-return]

    def plan(self, now_ns: int) -> StepPlan | None:
        return self._done(super().plan(now_ns), "plan")  # type: ignore[no-any-return]

    def apply(self, result: StepResult, now_ns: int) -> list[Event]:
        return self._done(super().apply(result, now_ns), "apply", result)  # type: ignore[no-any-return]

    def copied(self, done: Iterable[Copied], now_ns: int) -> list[Event]:
        done = [self._life.copied.pop(each.number) for each in done]
        return self._done(super().copied(done, now_ns), "copied", done)  # type: ignore[no-any-return]

    def fetched(self, done: Iterable[Brought], now_ns: int) -> list[Event]:
        done = [self._life.brought.pop(each.number) for each in done]
        return self._done(super().fetched(done, now_ns), "fetched", done)  # type: ignore[no-any-return]

    def lend(self, lease: int, keys: Sequence[bytes], now_ns: int) -> list[int]:
        blocks = super().lend(lease, keys, now_ns)
        self._life.leases[lease].lent(blocks, now_ns)
        return self._done(blocks, "lend", lease, keys)  # type: ignore[no-any-return]

    def unlend(self, lease: int, now_ns: int) -> None:
        super().unlend(lease, now_ns)
        self._done(None, "unlend", lease)


@dataclass(slots=True)
class Known:
    """One request as a runner keeps it."""

    admit: Admit
    tokens: list[int]
    table: list[int]


@dataclass(slots=True)
class Loan:
    """A fetch as its owner sees it: blocks cross one after the other until it is done."""

    fetch: Fetch
    owner: Life | None
    lease: int
    done_ns: int
    blocks: list[int] = field(default_factory=list)
    asked: bool = False
    since_ns: int = -1  # -1: the owner has not lent yet
    crossed: list[Content] | None = None  # None: under way

    def lent(self, blocks: list[int], now_ns: int) -> None:
        self.blocks, self.since_ns = blocks, now_ns

    def stop(self, now_ns: int) -> list[Content]:
        """Nothing crosses any more; what has until now."""
        if self.crossed is None:
            assert self.owner is not None
            share = (now_ns - self.since_ns) / max(1, self.done_ns - self.since_ns) if self.since_ns >= 0 else 0.0
            blocks = self.blocks[: int(len(self.blocks) * share)]
            self.crossed = [tuple(self.owner.device[block]) for block in blocks]
        return self.crossed


class Life:
    """A replica from its start to its end: the Machine that it runs on, and the link by which a gateway reaches it."""

    def __init__(
        self,
        name: str,
        number: int,
        limits: Limits,
        chance: Random,
        agenda: Agenda,
        lives: Mapping[str, Life],
        disk: Disk,
        write: Callable[[object], None],
        counts: Counter[str],
    ) -> None:
        """`lives`: those that are there, by name, this one included; `disk`: as an earlier one left it."""
        self.name = name
        self.incarnation = f"{name}.{number}"
        self.info = SimpleNamespace(peers=name, hash_block_tokens=SIZE)
        self.device = [list(TORN) for _ in range(limits.num_blocks)]
        self.host: list[tuple[Content, int]] = [(TORN, digest(TORN))] * limits.num_host_blocks  # with the digest
        self.disk = disk
        self.copied: dict[int, Copied] = {}  # that are done, and were not told yet
        self.brought: dict[int, Brought] = {}
        self.leases: dict[int, Loan] = {}  # that this one gives
        self.untold: dict[bytes, None] = {}  # keys that the disk has dropped
        self._chance = chance
        self._agenda = Until(agenda)
        self._lives = lives
        self._write = write
        self._counts = counts
        self._limits = limits
        self._salts: dict[str, str] = {}
        self._known: dict[str, Known] = {}
        self._moves: dict[int, KvOp] = {}  # with the disk, under way
        self._loans: dict[int, Loan] = {}  # that this one takes, by fetch
        self._ended: set[str] = set()
        self._sinks: dict[str, tuple[Sink, int]] = {}
        self.scheduler = Watched(self, limits, [held for held, _, _ in disk.values()])
        self.replica = Replica(self.scheduler, self, self._agenda, tell=self._tell)

    def write(self, *what: object) -> None:
        self._write((self._agenda.now_ns, self.incarnation, *what))

    @property
    def over(self) -> bool:
        return self._agenda.over

    # -- the gateway's end ---------------------------------------------------------------------------------------------

    def submit(self, specs: Sequence[RequestSpec], sink: Sink) -> None:
        for spec in specs:
            assert spec.id not in self._salts, f"{spec.id} was here before"
            self._salts[spec.id] = spec.salt
            self._sinks[spec.id] = sink, spec.choice
            self.replica.submit(spec)

    prefetch = submit

    def abort(self, ids: Iterable[str], reason: str) -> None:
        for id in [each for each in ids if self._sinks.pop(each, None) is not None]:
            self.replica.abort(id)

    def lost(self) -> None:
        """The gateway notices that it has ended."""
        sinks = dict.fromkeys(sink for sink, _ in self._sinks.values())
        self._sinks.clear()
        for sink in sinks:
            sink.on_lost("killed")

    def _tell(self, told: Iterable[Event | Refused]) -> None:
        told = list(told)
        self._agenda.at(self._agenda.now_ns + WIRE_NS, partial(self._hear, told))

    def _hear(self, told: list[Event | Refused]) -> None:
        updates = Updates()
        for each in told:
            if isinstance(each, Refused):
                sink, choice = self._sinks.pop(each.id, (None, 0))
                if sink is not None:
                    sink.on_refused(choice, Refusing(*each))
                continue
            self._expect(each)
            updates.add_all([each])
        for update in updates.finished():
            sink, choice = self._sinks.get(update.id, (None, 0))
            if update.ending is not None:
                self._sinks.pop(update.id, None)
            if sink is not None:
                sink.on_update(choice, update)

    def _expect(self, event: Event) -> None:
        assert event.id in self._salts and event.id not in self._ended, f"{event} after its end"
        if isinstance(event, Ended):
            self._ended.add(event.id)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def turn_delay_ns(self) -> int:
        return self._chance.randint(MS // 10, 2 * MS)

    def run(self, plan: StepPlan, now_ns: int, free_ns: int) -> tuple[int, StepResult]:
        for id in plan.leaves:
            del self._known[id]
        for admit in plan.admits:
            assert admit.id not in self._known, f"{admit.id} is admitted twice"
            self._known[admit.id] = Known(admit, list(admit.tokens), list(admit.blocks))
        parts = [(part, self._known[part.id]) for part in plan.slices]
        for part, known in parts:
            known.table += part.blocks
            for place in range(part.start, part.start + part.count):
                self.device[known.table[place // SIZE]][place % SIZE] = TORN[0]
        result = StepResult(plan.step, [])
        done_ns = max(now_ns, free_ns)
        if parts:
            cost = StepCost(COST)
            result.busy_ns = int(cost.predict(cost.features(plan.slices)) * self._rough())
            done_ns += result.busy_ns
            result.latency_ns = done_ns - now_ns
            self._agenda.at(done_ns, partial(self._compute, parts, result))
        return done_ns, result

    def _rough(self) -> float:
        return self._chance.choice((0.7, 1.0, 1.0, 1.3, 4.0))

    def _compute(self, parts: list[tuple[Slice, Known]], result: StepResult) -> None:
        for part, known in parts:
            admit, tokens, end = known.admit, known.tokens, part.start + part.count
            assert part.count > 0 and end <= len(tokens), f"{part}: only {len(tokens)} tokens are known"
            before = [kv for block in known.table[: -(-part.start // SIZE)] for kv in self.device[block]]
            state = scope(self._salts[part.id])
            for kv in before[: part.start]:
                state = behind(state, kv)
            for place in range(part.start, end):
                kv = kv_of(state, tokens[place])
                self.device[known.table[place // SIZE]][place % SIZE] = kv
                state = behind(state, kv)
            if admit.sampling.prompt_logprobs is not None and part.start < admit.num_prompt:
                places = range(max(part.start, 1), min(end, admit.num_prompt))
                result.prompt_logprobs[part.id] = [Logprobs(-float(tokens[place]), ()) for place in places]
            if part.sample:
                assert end == len(tokens), f"{part} samples in the middle of {len(tokens)} tokens"
                tokens.append(sampled(state, admit.sampling, admit.choice))
                result.tokens.append(tokens[-1])

    # -- copies --------------------------------------------------------------------------------------------------------

    def copy(self, op: KvOp, num_bytes: int, now_ns: int, free_ns: int) -> tuple[int, Copied]:
        if op.disk:
            busy_ns = self._chance.choice((1, 10, 100)) * MS
            self._moves[op.number] = op
        else:
            busy_ns = int(num_bytes / self._limits.copy_bytes_per_s * 1e9 * self._rough())
        if op.disk or op.out:
            for block in () if op.disk and op.out else op.host_blocks:
                self.host[block] = TORN, digest(TORN)
        else:
            for block in op.device_blocks:
                self.device[block][:] = TORN
        done_ns = max(now_ns, free_ns) + busy_ns
        self._agenda.at(done_ns, partial(self._carry_out, op, busy_ns))
        return done_ns, Copied(op.number, busy_ns)

    def _carry_out(self, op: KvOp, busy_ns: int) -> None:
        if op.disk:
            del self._moves[op.number]
            bad = self._write_disk(op) if op.out else self._read_disk(op)
            dropped: tuple[bytes, ...] = ()
            if self._chance.random() < 0.7:
                dropped, self.untold = tuple(self.untold), {}
            self.copied[op.number] = Copied(op.number, busy_ns, tuple(bad), dropped)
            return
        bad = []
        for place, (device, host) in enumerate(zip(op.device_blocks, op.host_blocks, strict=True)):
            if op.out:
                content = tuple(self.device[device])
                self.host[host] = content, digest(content)
            else:
                content, told = self.host[host]
                self.device[device][:] = content
                if not sound(content, told):
                    bad.append(place)
        self._counts["bad blocks"] += len(bad)
        self.copied[op.number] = Copied(op.number, busy_ns, tuple(bad))

    def _write_disk(self, op: KvOp) -> list[int]:
        bad = []
        for place, (held, block) in enumerate(zip(op.disk, op.host_blocks, strict=True)):
            content, told = self.host[block]
            if not sound(content, told) or self._chance.random() < 0.05:
                bad.append(place)
                self._counts["disk writes that failed"] += 1
                continue
            self.disk[held.key] = held, content, told
            self.untold.pop(held.key, None)
            if len(self.disk) > 2 * self._limits.num_host_blocks:
                self._drop(next(iter(self.disk)))
        return bad

    def _read_disk(self, op: KvOp) -> list[int]:
        bad = []
        for place, (held, block) in enumerate(zip(op.disk, op.host_blocks, strict=True)):
            there, content, told = self.disk.get(held.key, (held, TORN, 0))
            assert there == held, "it was written for another prefix"
            if self._chance.random() < 0.05:
                bad.append(place)
            elif held.key not in self.disk or not sound(content, told):
                bad.append(place)
                self._drop(held.key)
            else:
                self.host[block] = content, told
        self._counts["disk reads that failed"] += len(bad)
        return bad

    def _drop(self, key: bytes) -> None:
        self.disk.pop(key, None)
        self.untold[key] = None

    def flip(self) -> None:
        """A bit of a block in memory, or of one on the disk."""
        places = [place for place, (content, _) in enumerate(self.host) if content != TORN]
        if self.disk and self._chance.random() < 0.3:
            key = self._chance.choice([*self.disk])
            held, content, told = self.disk[key]
            self.disk[key] = held, self._flipped(content), told
        elif places:
            place = self._chance.choice(places)
            content, told = self.host[place]
            self.host[place] = self._flipped(content), told

    def _flipped(self, content: Content) -> Content:
        place = self._chance.randrange(SIZE)
        return (*content[:place], content[place] ^ 1 << self._chance.randrange(40), *content[place + 1 :])

    # -- fetches -------------------------------------------------------------------------------------------------------

    def fetch(self, fetch: Fetch, num_bytes: int, now_ns: int) -> tuple[int, Brought]:
        for block in fetch.blocks:
            self.device[block][:] = TORN
        owner = self._lives.get(fetch.address)
        done_ns = now_ns + min(fetch.limit_ns, self._chance.randint(15, 90) * MS)
        if owner is None or owner.incarnation != fetch.incarnation or owner.over:
            self._counts["owners that were gone"] += 1
            loan = Loan(fetch, None, 0, done_ns, crossed=[])
        else:
            loan = Loan(fetch, owner, owner.new_lease(), done_ns)
            owner.leases[loan.lease] = loan
            self._agenda.at(now_ns + self._chance.randint(1, 8) * MS, partial(self._ask, loan))
        self._loans[fetch.number] = loan
        self._agenda.at(done_ns, partial(self._arrive, loan, done_ns - now_ns))
        return done_ns, Brought(fetch.number, 0, done_ns - now_ns)

    def new_lease(self) -> int:
        self._counts["leases"] += 1
        return self._counts["leases"]

    def _ask(self, loan: Loan) -> None:
        if loan.owner is not None and not loan.owner.over:
            loan.asked = True
            loan.owner.replica.lend(loan.lease, loan.fetch.keys)

    def _arrive(self, loan: Loan, busy_ns: int) -> None:
        del self._loans[loan.fetch.number]
        crossed = loan.stop(self._agenda.now_ns)
        self._let_go(loan)
        if self._chance.random() < 0.1:  # the connection was cut
            crossed = crossed[: self._chance.randint(0, len(crossed))]
        num_good, whole = 0, True
        for block, content in zip(loan.fetch.blocks, crossed, strict=False):
            came = self._flipped(content) if self._chance.random() < 0.03 else content
            whole = whole and sound(came, digest(content))
            num_good += whole
            self.device[block][:] = came
        self._counts["blocks that changed on the wire"] += not whole
        self._counts["blocks from peers"] += num_good
        self._counts["fetches that brought a part"] += 0 < num_good < len(loan.fetch.blocks)
        self.brought[loan.fetch.number] = Brought(loan.fetch.number, num_good, busy_ns)

    def _let_go(self, loan: Loan) -> None:
        if loan.asked and loan.owner is not None and not loan.owner.over:
            loan.owner.replica.unlend(loan.lease)

    @property
    def lends(self) -> bool:
        """To anyone, right now."""
        return any(loan.since_ns >= 0 and loan.crossed is None for loan in self.leases.values())

    # -- the end -------------------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """Whatever it does or was asked for is gone; of writes to the disk under way, some were done just now."""
        self._agenda.over = True
        now_ns = self._agenda.now_ns
        for loan in self.leases.values():
            if loan.crossed is None:
                loan.stop(now_ns)
                self._counts["owners killed in the middle"] += 1
        for loan in self._loans.values():
            loan.stop(now_ns)
            self._let_go(loan)
        for op in self._moves.values():
            if op.out and self._chance.random() < 0.5:
                self._write_disk(op)

    def check_at_rest(self) -> None:
        """Nothing is going on: every block is there, and nobody is owed anything."""
        view, limits = self.scheduler.view(), self._limits
        assert view.num_running == view.num_waiting == view.waiting_tokens == self.scheduler.num_in_flight == 0
        assert view.free_blocks + view.cached_blocks == limits.num_blocks
        assert view.free_host_blocks + view.cached_host_blocks == limits.num_host_blocks
        assert view.lent_blocks == self.scheduler._promises.given == view.hash_collisions == 0
        assert not (self._sinks or self._loans or self._moves or self.copied or self.brought)
