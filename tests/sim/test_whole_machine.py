"""The whole machine at random: replicas with all tiers that fetch from each other and are killed, and their fleet.

Three replicas run the live Scheduler and have blocks with contents (lives.py). Around them are the decisions of the
gateway: fleet.stream for each prompt, gateway.migration. Streams are aborted, migrated, and replayed when their replica
is killed. Invariants hold after every operation of every scheduler, and each request ends once, with the tokens that
its prompt alone determines.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from hashlib import blake2b
from random import Random
from typing import Any, cast

import pytest

from shoal.core.classes import DEFAULT_CLASSES
from shoal.core.kv.hashing import chain, scope_key
from shoal.core.kv.news import DEVICE, DISK
from shoal.core.lending import Lending
from shoal.core.limits import Limits
from shoal.core.parking import Parking
from shoal.core.plan import Copied
from shoal.core.progress import Request
from shoal.core.request import Finish, Peer, RequestSpec, Sampling
from shoal.fleet import stream
from shoal.gateway import migration
from shoal.gateway.link import EngineLink
from shoal.gateway.migration import Migration, Outcome
from shoal.sim.agenda import Agenda
from shoal.wire.messages import Refusing, Update
from tests.sim import lives
from tests.sim.lives import MS, ROOT, SIZE, VOCAB, Disk, Life, expected

pytestmark = pytest.mark.interpreted  # its replicas inherit from Scheduler

SEEDS = 20
NAMES = ("p", "q", "r")
NUM_JOBS = 80
SPAN_NS = 3000 * MS  # in which they arrive
NUM_MIGRATIONS, NUM_FLIPS = 40, 60
MAX_MODEL_LEN = 128
STOPS = tuple(range(4))


class Plenty(stream.RetryBudget):
    def take(self) -> bool:
        return True


class Job:
    """One prompt and its choices, as gateway/dispatch.py has them: performs what `fleet.stream` decides."""

    def __init__(self, fleet: Fleet, specs: Sequence[RequestSpec]) -> None:
        self.specs = specs
        self.stream = stream.Stream(len(specs), fleet.budget)
        self.ended: dict[int, Finish] = {}
        self.failed: str | None = None
        self.cancelled = False
        self.num_lost = 0
        self._fleet = fleet
        self._link: Life | None = None
        self._ids: dict[int, str] = {}
        self._migration: Migration | None = None
        self._waits_since_ns = fleet.agenda.now_ns

    @property
    def over(self) -> bool:
        return self.stream.over

    @property
    def link(self) -> Life | None:
        return self._link if self.stream.phase is stream.Phase.STREAMING else None

    def place(self, avoid: frozenset[str] = frozenset()) -> None:
        if not self.over:
            lives = self._fleet.lives
            names = [name for name in lives if name not in avoid] or [*lives]
            link = lives[self._fleet.chance.choice(names)]
            self._send(link, self._fleet.peer(self.specs[0], link))

    def _send(self, link: Life, peer: Peer | None) -> None:
        self._link = link
        self.stream.sent(link.name)
        suffix = f".{self.stream.attempt}"
        specs = [self.specs[choice] for choice in self.stream.open_choices()]
        self._fleet.counts["replays"] += self.stream.begun
        specs = [
            replace(
                spec,
                id=spec.id + suffix,
                leader=None if spec is specs[0] else specs[0].id + suffix,
                output=tuple(self.stream.delivered(spec.choice)),
                sampling=replace(spec.sampling, prompt_logprobs=None) if self.stream.delivered(0) else spec.sampling,
                waited_ns=self._fleet.agenda.now_ns - self._waits_since_ns,
                peer=peer,
            )
            for spec in specs
        ]
        self._ids = {spec.choice: spec.id for spec in specs}
        link.submit(specs, self)

    def cancel(self) -> None:
        if not self.over:
            self.cancelled = True
            self._fleet.counts["aborts"] += 1
            self._perform(self.stream.cancel())

    def migrate(self, target: Life) -> None:
        source = self.link
        if source is not None and source is not target and self._migration is None:
            ends = cast(EngineLink, source), cast(EngineLink, target)
            self._migration = Migration(*ends, self._so_far, self._migration_over)
            self._migration.begin()

    @property
    def ends(self) -> tuple[Life, ...]:
        """Source and target of its migration, while it is under way."""
        over = self._migration
        return () if over is None else (cast(Life, over.source), cast(Life, over.target))

    def _so_far(self) -> list[RequestSpec]:
        if self.link is None:
            return []
        delivered = self.stream.delivered
        specs = [self.specs[choice] for choice in self.stream.open_choices()]
        return [replace(spec, prompt=spec.prompt + tuple(delivered(spec.choice))) for spec in specs]

    def _migration_over(self, outcome: Outcome) -> None:
        over, self._migration = self._migration, None
        assert over is not None
        self._fleet.counts[f"migrations that ended as {outcome}"] += 1
        if outcome is Outcome.MIGRATED:
            self._perform(self.stream.migrated())
            source, target = cast(Life, over.source), cast(Life, over.target)
            num_tokens = len(self.specs[0].prompt) + len(self.stream.delivered(self.stream.open_choices()[0]))
            self._send(target, Peer(source.name, source.incarnation, num_tokens // SIZE))

    # -- what the link reports -----------------------------------------------------------------------------------------

    def on_update(self, choice: int, update: Update) -> None:
        if update.waited_ns is not None or update.tokens:
            self._waits_since_ns = self._fleet.agenda.now_ns
        if not (update.tokens or update.prompt_logprobs or update.ending):
            return
        if update.prompt_logprobs:
            start, scores = update.prompt_start, update.prompt_logprobs
            assert [-int(each.logprob) for each in scores] == [*self.specs[0].prompt[start : start + len(scores)]]
            self._perform(self.stream.scored(start, len(scores)))
        end = update.ending
        ending = None if end is None else (end.reason, end.stop_token, end.cached_tokens, end.message)
        self._perform(self.stream.update(choice, update.index, update.tokens, update.logprobs, ending))

    def on_refused(self, choice: int, refusing: Refusing) -> None:
        self._perform(self.stream.refused(refusing.reason, refusing.message))

    def on_lost(self, message: str) -> None:
        self.num_lost += 1
        self._perform(self.stream.lost("replica_lost", message))

    def _perform(self, effects: Sequence[stream.Effect]) -> None:
        for effect in effects:
            match effect:
                case stream.Ended():
                    assert effect.choice not in self.ended, f"{self.specs[effect.choice].id} ends twice"
                    self.ended[effect.choice] = effect.reason
                case stream.Withdraw():
                    assert self._link is not None
                    if not self._link.over:
                        self._link.abort([self._ids[choice] for choice in effect.choices], "withdrawn")
                    if self._migration is not None and self.link is None:
                        self._migration.give_up()
                case stream.SendAgain():
                    when_ns = self._fleet.agenda.now_ns + effect.wait_ms * MS
                    self._fleet.agenda.at(when_ns, partial(self.place, effect.avoid))
                case stream.Failed():
                    self.failed = f"{effect.reason}: {effect.message}"

    def judge(self) -> None:
        assert self.over, f"{self.specs[0].id} has not ended"
        for spec in self.specs:
            text, finish = expected(spec)
            told = list(self.stream.delivered(spec.choice))
            assert told == text[: len(told)], f"{spec.id} says {told}, not {text}"
            if not (self.cancelled or self.failed):
                assert (told, self.ended[spec.choice]) == (text, finish)
        assert self.failed in (None, "replica_lost: killed"), self.failed
        if self.failed and self.num_lost < stream.MAX_ATTEMPTS:  # no retry was left for one that had not begun
            told_any = any(self.stream.delivered(spec.choice) for spec in self.specs)
            assert not told_any, f"given up after {self.num_lost} losses"


class Fleet:
    def __init__(self, seed: int) -> None:
        self.chance = chance = Random(seed)
        self.agenda = Agenda()
        self.budget = Plenty()
        self.counts = Counter[str]()
        self.lives: dict[str, Life] = {}
        self.jobs: list[Job] = []
        self._history = blake2b()
        self._started = Counter[str]()
        migration._numbers = itertools.count(1)  # of ids: they are the same in each run
        self._beginnings = [self._tokens(chance.choice((12, 24, 40))) for _ in range(4)]
        self._limits = {name: self._random_limits() for name in NAMES}
        for name in NAMES:
            self._start(name, {})
        for kind, count in ((self._arrive, NUM_JOBS), (self._migrate, NUM_MIGRATIONS), (self._flip, NUM_FLIPS)):
            for _ in range(count):
                self.agenda.at(chance.randrange(SPAN_NS), kind)
        for whom in (self._anyone, self._lending, self._migrating, self._migrating):
            self.agenda.at(chance.randrange(SPAN_NS // 4, SPAN_NS), partial(self._kill, whom))

    def run(self) -> tuple[str, Counter[str]]:
        """A digest of all that was done and answered; how often what happened."""
        self.agenda.run()
        for job in self.jobs:
            job.judge()
        for life in self.lives.values():
            life.check_at_rest()
            self._count(life)
            lost = life.scheduler.held[DISK] - life.disk.keys() - life.untold.keys()
            assert not lost, f"{len(lost)} blocks of {life.name} are on the disk as far as is known"
        return self._history.hexdigest(), self.counts

    def peer(self, spec: RequestSpec, but: Life) -> Peer | None:
        """Who is believed to hold most of a prompt; now and then that is wrong."""
        keys = chain(scope_key(ROOT, spec.salt), spec.prompt, SIZE)
        found = []
        for life in self.lives.values():
            held = life.scheduler.held[DEVICE]
            num_held = sum(1 for _ in itertools.takewhile(held.__contains__, keys))
            found.append((num_held, life.name, life.incarnation))
        num_held, name, incarnation = max([each for each in found if each[1] != but.name], default=(0, "", ""))
        num_held += self.chance.choice((0, 0, 0, 2))
        return Peer(name, incarnation, num_held) if num_held else None

    # -- what happens --------------------------------------------------------------------------------------------------

    def _start(self, name: str, disk: Disk) -> None:
        self._started[name] += 1
        self.lives[name] = Life(
            name,
            self._started[name],
            self._limits[name],
            self.chance,
            self.agenda,
            self.lives,
            disk,
            lambda what: self._history.update(repr(what).encode()),
            self.counts,
        )

    def _kill(self, whom: Callable[[], list[str]], num_tries: int = 100) -> None:
        """One of those, as soon as there is one and all others are there."""
        now_ns, names = self.agenda.now_ns, whom()
        if not names or len(self.lives) < len(NAMES):
            if num_tries:
                self.agenda.at(now_ns + 5 * MS, partial(self._kill, whom, num_tries - 1))
            return
        life = self.lives.pop(self.chance.choice(names))
        life.kill()
        self._count(life)
        self.counts["kills"] += 1
        self.agenda.at(now_ns + self.chance.randint(0, 5) * MS, life.lost)
        disk = life.disk if self.chance.random() < 0.7 else {}
        self.counts["starts with a disk"] += bool(disk)
        self.agenda.at(now_ns + self.chance.randint(20, 200) * MS, partial(self._start, life.name, disk))

    def _anyone(self) -> list[str]:
        return [*self.lives]

    def _lending(self) -> list[str]:
        return [name for name, life in self.lives.items() if life.lends]

    def _migrating(self) -> list[str]:
        """Sources and targets."""
        return [end.name for job in self.jobs for end in job.ends if end is self.lives.get(end.name)]

    def _migrate(self) -> None:
        streaming = [job for job in self.jobs if job.link is not None]
        if streaming:
            self.chance.choice(streaming).migrate(self.lives[self.chance.choice([*self.lives])])

    def _flip(self) -> None:
        self.lives[self.chance.choice([*self.lives])].flip()

    def _arrive(self) -> None:
        job = Job(self, self._specs())
        self.jobs.append(job)
        job.place()
        if self.chance.random() < 0.15:
            self.agenda.at(self.agenda.now_ns + self.chance.randrange(500) * MS, job.cancel)

    def _specs(self) -> list[RequestSpec]:
        """One client request: 1 to 3 choices of one prompt, which often begins as others do or goes on behind one."""
        chance, number = self.chance, len(self.jobs)
        salt = chance.choice(("", "", "", "acme"))
        done = [job for job in self.jobs if 0 in job.ended and job.specs[0].salt == salt]
        if done and chance.random() < 0.4:
            before = chance.choice(done)
            prompt = before.specs[0].prompt + tuple(before.stream.delivered(0))
        else:
            prompt = chance.choice(self._beginnings) if chance.random() < 0.8 else ()
        prompt = prompt[:90] + self._tokens(chance.choice((1, 5, 9)))
        first = f"r{number}.0"
        scored = 0 if chance.random() < 0.05 else None
        spec = RequestSpec(
            id=first,
            prompt=prompt,
            max_tokens=chance.choice((0, 1, 6, 15, 24, 24)),
            min_tokens=chance.choice((0, 0, 4)),
            stop_token_ids=chance.choice(((), (), STOPS)),
            priority=chance.choice((0, 0, 0, 1, 7)),
            service_class=chance.choice(("standard", "standard", "interactive", "batch")),
            tenant=chance.choice(("", "acme", "zenith")),
            salt=salt,
            prefix_keys=chain(scope_key(ROOT, salt), prompt, SIZE) if chance.random() < 0.7 else (),
            sampling=Sampling(seed=chance.randrange(1 << 32), prompt_logprobs=scored),
        )
        num_choices = chance.choice((1, 1, 1, 2, 3))
        unscored = replace(spec, leader=first, sampling=replace(spec.sampling, prompt_logprobs=None))
        return [spec, *(replace(unscored, id=f"r{number}.{n}", choice=n) for n in range(1, num_choices))]

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.chance.choices(range(VOCAB), k=count))

    def _random_limits(self) -> Limits:
        chance = self.chance
        return Limits(
            num_blocks=chance.choice((32, 40, 56)),
            block_tokens=SIZE,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB,
            max_num_seqs=chance.choice((3, 8)),
            max_num_batched_tokens=chance.choice((16, 64)),
            max_prefill_chunk=chance.choice((0, 16)),
            max_steps_in_flight=chance.choice((1, 1, 2)),
            classes={name: replace(each, max_wait_s=1e6) for name, each in DEFAULT_CLASSES.items()},
            num_host_blocks=chance.choice((12, 24, 48)),
            block_bytes=4000,
            copy_bytes_per_s=chance.choice((2e6, 1e8)),
            disk_bytes_per_s=1e8,
            fetch_bytes_per_s=1e8,
            preemption=chance.choice(("auto", "auto", "swap", "recompute")),
        )

    def _count(self, life: Life) -> None:
        view = life.scheduler.view()
        self.counts["parks"] += view.parks
        self.counts["preemptions"] += view.preemptions
        self.counts["tokens from the host tier"] += view.host_hits
        self.counts["tokens from the disk"] += view.disk_hits
        self.counts["tokens from peers"] += view.peer_hits
        self.counts["steps"] += view.step


@cache
def outcome(seed: int) -> tuple[str, Counter[str]]:
    return Fleet(seed).run()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_each_request_ends_once_with_its_tokens_and_every_block_is_accounted_for(seed: int) -> None:
    outcome(seed)


def test_the_worlds_are_rough_enough() -> None:
    """What the test above is about does happen in it."""
    counts = sum([outcome(seed)[1] for seed in range(8)], Counter[str]())
    least = {
        "kills": 20,
        "starts with a disk": 8,
        "owners killed in the middle": 3,
        "replays": 80,
        "aborts": 15,
        "migrations that ended as migrated": 50,
        "migrations that ended as lost": 3,
        "preemptions": 80,
        "parks": 50,
        "bad blocks": 8,
        "disk reads that failed": 10,
        "disk writes that failed": 50,
        "fetches that brought a part": 15,
        "blocks that changed on the wire": 4,
        "tokens from the host tier": 600,
        "tokens from the disk": 500,
        "tokens from peers": 500,
    }
    assert not {what: counts[what] for what, count in least.items() if counts[what] < count}, counts


@pytest.mark.parametrize("seed", range(2))
def test_equal_seeds_make_equal_histories(seed: int) -> None:
    assert Fleet(seed).run()[0] == outcome(seed)[0] != outcome(seed + 1)[0]


def lend_and_release(lending: Lending, lease: int, keys: Sequence[bytes]) -> list[int]:
    """What is lent is given to others."""
    found = LEND(lending, lease, keys)
    lending.unlend(lease)
    lending._leases[lease] = []
    return found


def use_bad(parking: Parking, copied: Copied) -> Request | None:
    """What came back with another content is used."""
    return COPY_DONE(parking, copied._replace(bad=()))


LEND, COPY_DONE = Lending.lend, Parking.done


@pytest.mark.parametrize(
    ("where", "name", "broken"),
    [
        (lives, "sound", lambda content, told: True),
        (Lending, "lend", lend_and_release),
        (Parking, "done", use_bad),
    ],
    ids=["no digest is checked", "what is lent is not held", "bad blocks are used"],
)
def test_wrong_kv_shows_in_the_text(where: Any, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, name, broken)
    with pytest.raises(AssertionError, match=" says "):
        deque(map(Fleet.run, map(Fleet, range(6))))
