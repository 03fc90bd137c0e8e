"""What do swaps and a transfer from another engine do to the steps beside them?

16 requests decode, again and again the same ones to the same length; meanwhile, part by part in turn:

alone       nothing else
beside      KV of 2,000 tokens is swapped out and back, and a prefix of 2,000 tokens is fetched from another engine over
            TCP, again and again at a bounded rate: a plan asks for them, other threads do them
swaps       the same without fetches
fetches     the same without swaps
unbounded   as beside, but both as fast as it goes
waited for  as beside, but the step thread waits for each before it computes: what it costs to do them there

The engine is built as an engine process builds it: runner, copier, peers, step loop. What moves is planned beside the
scheduler, into blocks that its pool does not have, so that all parts compute the same steps. A step counts from the end
of the one before to its own, with all that the loop does. The other engine is a process of its own.

One thread computes, on one core; everything else, the engine's other threads and the other engine, which in life has a
machine of its own, has the other core ("apart"); and the same where only the other engine is bound to a core, and the
system places threads ("free"). Two threads compute on both cores, the other engine again on the second. On a machine
that others use too, the step thread waits for its core now and then ("waits"), apart for strangers alone; ratios are
told without that as well.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple

from common import Report, arguments
from engine import GREEDY, SESSION, Engine, equal_classes
from live import note
from neighbour import SECRET, Neighbour, process
from shoal.core.kv.hashing import chain, scope_key
from shoal.core.limits import Limits
from shoal.core.plan import Brought, Copied, Event, Fetch, KvOp, StepPlan
from shoal.core.request import RequestSpec
from shoal.core.scheduler import Scheduler
from shoal.core.stepcost import StepCost
from shoal.engine.loop import StepLoop, Turn
from shoal.engine.transfer.copier import Copier
from shoal.engine.transfer.peers import Peers
from shoal.engine.transfer.tcp import Tcp
from shoal.wire.messages import EngineInfo
from shoal.workload.latency import percentile

NUM_ROWS, PROMPT_TOKENS = 16, 128
CONTEXT = 150  # of a row, about
MOVED_TOKENS = 2000  # of one swap, and of one fetch
SWAP_BYTES_PER_S = 400_000_000  # out and back together
FETCH_BYTES_PER_S = 235_000_000  # while one is under way; each has a beginning and an end
LEAST_BYTES_PER_S = 200_000_000
SETTLE_STEPS = 3  # of a part that do not count
P50_TARGET, P99_TARGET = 1.1, 1.4
POOL_BYTES, HOST_BYTES = 800 << 20, 128 << 20
LIMIT_S = 30.0


@dataclass(frozen=True)
class Part:
    """What moves meanwhile."""

    name: str
    swaps: bool = False
    fetches: bool = False
    bounded: bool = True
    waits: bool = False


ALONE, BESIDE = Part("alone"), Part("beside", swaps=True, fetches=True)
PARTS = (
    ALONE,
    BESIDE,
    Part("swaps", swaps=True),
    Part("fetches", fetches=True),
    Part("unbounded", swaps=True, fetches=True, bounded=False),
    Part("waited for", swaps=True, fetches=True, waits=True),
)


class Place(NamedTuple):
    """Who computes where."""

    name: str
    threads: int
    apart: bool  # the step thread and everything else have a core each


APART = Place("1, apart", 1, True)
PLACES = (APART, Place("1, free", 1, False), Place("2", 2, False))


class Shape(NamedTuple):
    part_s: float  # about
    num_rounds: int
    places: tuple[Place, ...]


FULL, QUICK = Shape(3.0, 8, PLACES), Shape(1.2, 3, (APART,))
LEAST_STEPS, MOST_STEPS = 10, 200  # of a part


RATES = ("fetched_bytes_per_s", "swapped_bytes_per_s")


@dataclass
class Found:
    """Of one part in one round."""

    steps_ns: list[int] = field(default_factory=list)
    waits_ns: list[int] = field(default_factory=list)  # of them, while another process had the step thread's core
    swapped_bytes_per_s: float = 0.0
    fetched_bytes_per_s: float = 0.0


Round = dict[Part, Found]


# -- what moves --------------------------------------------------------------------------------------------------------


class Work:
    """Swaps and fetches, one of each at a time; the step thread's."""

    def __init__(self, engine: Engine, fetch: Fetch) -> None:
        """`fetch`: of what from where; its blocks are filled in here."""
        num_blocks = len(fetch.keys)
        end = engine.runner.num_blocks
        self.num_blocks = 2 * num_blocks  # the last ones of the device
        self.part = ALONE
        self.swapped_bytes = 0
        self._bytes = num_blocks * engine.limits.block_bytes
        self._swapped, self._host = tuple(range(end - num_blocks, end)), tuple(range(num_blocks))
        fetched = tuple(range(end - 2 * num_blocks, end - num_blocks))
        self._fetch = fetch._replace(blocks=fetched)
        self._num_swaps = self._num_fetches = 0
        self._swapping = self._fetching = False
        self._swap_due_ns = self._fetch_due_ns = 0

    def begin(self, part: Part) -> None:
        self.part = part
        self._swap_due_ns = self._fetch_due_ns = 0

    @property
    def idle(self) -> bool:
        return not (self._swapping or self._fetching)

    def add(self, plan: StepPlan, now_ns: int) -> None:
        """What begins with this plan. What is waited for takes no time of its own: it is due at its rate."""
        part = self.part
        if part.swaps and not self._swapping and not (part.bounded and now_ns < self._swap_due_ns):
            self._swapping = True
            self._swap_due_ns = _next(self._swap_due_ns, now_ns, self._bytes / SWAP_BYTES_PER_S)
            self._num_swaps += 1
            plan.ops.append(KvOp(self._num_swaps, "", self._num_swaps % 2 == 1, self._swapped, self._host))
        if part.fetches and not self._fetching and not (part.waits and now_ns < self._fetch_due_ns):
            self._fetching = True
            self._fetch_due_ns = _next(self._fetch_due_ns, now_ns, self._bytes / FETCH_BYTES_PER_S)
            self._num_fetches += 1
            plan.fetches.append(self._fetch._replace(number=self._num_fetches))

    def copied(self, done: Iterable[Copied]) -> None:
        for copied in done:
            assert not copied.bad, copied
            self._swapping = False
            self.swapped_bytes += self._bytes

    def fetched(self, done: Iterable[Brought]) -> None:
        for brought in done:
            assert brought.num_good == len(self._fetch.keys), brought
            self._fetching = False


def _next(due_ns: int, now_ns: int, seconds: float) -> int:
    """What is late by less than a tenth of a second is made up for."""
    return max(due_ns, now_ns - 100_000_000) + int(seconds * 1e9)


class Planner(Scheduler):
    """Moves nothing itself, and plans with what moves beside it."""

    def __init__(self, limits: Limits, *, hash_root: bytes, cost: StepCost, work: Work) -> None:
        super().__init__(limits, hash_root=hash_root, cost=cost)
        self._work = work

    def plan(self, now_ns: int) -> StepPlan | None:
        plan = super().plan(now_ns)
        if plan is not None:
            self._work.add(plan, now_ns)
        return plan

    def copied(self, done: Iterable[Copied], now_ns: int) -> list[Event]:
        self._work.copied(done)
        return []

    def fetched(self, done: Iterable[Brought], now_ns: int) -> list[Event]:
        self._work.fetched(done)
        return []


class Movers:
    """The engine's copier and peers; where the part says so, whoever asks waits until it is done."""

    def __init__(self, copier: Copier, bounded: Peers, unbounded: Peers, work: Work) -> None:
        self.close = copier.close
        self._copier, self._bounded, self._unbounded, self._work = copier, bounded, unbounded, work

    @property
    def fetched_bytes(self) -> int:
        return self._bounded.fetched_bytes + self._unbounded.fetched_bytes

    def start(self, op: KvOp, tell: Callable[[Copied | Exception], None]) -> None:
        self._do(self._copier.start, op, tell)

    def fetch(self, fetch: Fetch, tell: Callable[[Brought], None]) -> None:
        part = self._work.part
        peers = self._bounded if part.bounded and not part.waits else self._unbounded
        self._do(peers.fetch, fetch, tell)

    def _do(self, start: Callable[..., None], what: Any, tell: Callable[[Any], None]) -> None:
        if not self._work.part.waits:
            start(what, tell)
            return
        done = threading.Event()

        def told(outcome: Any) -> None:
            tell(outcome)
            done.set()

        start(what, told)
        assert done.wait(LIMIT_S)


# -- the steps ---------------------------------------------------------------------------------------------------------


class Stage:
    """One step loop that goes through all parts, round by round."""

    def __init__(self, engine: Engine, movers: Movers, work: Work, shape: Shape, settled: Callable[[], None]) -> None:
        """`settled` is called before the steps of each part that count."""
        limits = replace(
            engine.limits,
            num_blocks=engine.limits.num_blocks - work.num_blocks,
            num_host_blocks=0,
            fetch_bytes_per_s=0.0,
            classes=equal_classes(),
        )
        engine.runner.forget_all()
        self._loop = StepLoop(
            Planner(limits, hash_root=engine.runner.hash_root, cost=StepCost(engine.cost), work=work),
            engine.runner,
            publish=self._on_turn,
            announce=lambda predicted_ns: None,
            failed=self._on_failure,
            copier=movers,
            peers=movers,
        )
        chance = Random(1)
        self._prompts = [tuple(chance.choices(range(limits.vocab_size), k=PROMPT_TOKENS)) for _ in range(NUM_ROWS)]
        self._movers, self._work = movers, work
        step_s = StepCost(engine.cost).predict((1, NUM_ROWS, NUM_ROWS * CONTEXT, NUM_ROWS, NUM_ROWS * CONTEXT)) / 1e9
        self._num_steps = min(max(LEAST_STEPS, int(shape.part_s / step_s)), MOST_STEPS)
        self._settled = settled
        self._to_come = [part for _ in range(shape.num_rounds + 1) for part in reversed(PARTS)]
        self._found: list[Found] = []
        self._num_open = 0
        self._num_done = 0  # steps of all rows in this part
        self._moved_before = (0, 0)  # bytes swapped and fetched
        self._began_ns = self._last_ns = self._waited_ns = 0
        self._error: BaseException | None = None

    def run(self) -> list[Round]:
        """Without the first round, in which memory is touched for the first time."""
        self._start()
        self._loop.run()
        if self._error is not None:
            raise self._error
        found = iter(self._found)
        return [dict(zip(PARTS, each, strict=True)) for each in zip(*[found] * len(PARTS), strict=True)][1:]

    def _start(self) -> None:
        self._work.begin(self._to_come.pop())
        self._found.append(Found())
        self._num_open, self._num_done = NUM_ROWS, 0
        max_tokens = SETTLE_STEPS + self._num_steps + 1
        self._loop.submit(
            SESSION,
            [
                RequestSpec(id=f"{len(self._found)}.{row}", prompt=prompt, max_tokens=max_tokens, sampling=GREEDY)
                for row, prompt in enumerate(self._prompts)
            ],
        )

    def _on_turn(self, turn: Turn) -> None:
        now_ns, waited_ns = time.monotonic_ns(), waited()
        assert not turn.refused, turn.refused
        found, work = self._found[-1], self._work
        if turn.step is not None and turn.step.kind == "decode" and turn.step.num_tokens == NUM_ROWS:
            self._num_done += 1
            if self._num_done == SETTLE_STEPS:
                self._settled()
                self._moved_before = (work.swapped_bytes, self._movers.fetched_bytes)
                self._began_ns = now_ns = time.monotonic_ns()
            elif self._num_done > SETTLE_STEPS:
                found.steps_ns.append(now_ns - self._last_ns)
                found.waits_ns.append(waited_ns - self._waited_ns)
        self._last_ns, self._waited_ns = now_ns, waited_ns
        num_ended = sum(update.ending is not None for update in turn.updates.get(SESSION, ()))
        self._num_open -= num_ended
        if num_ended and not self._num_open:
            seconds = (now_ns - self._began_ns) / 1e9
            swapped, fetched = self._moved_before
            found.swapped_bytes_per_s = (work.swapped_bytes - swapped) / seconds
            found.fetched_bytes_per_s = (self._movers.fetched_bytes - fetched) / seconds
        if not self._num_open and work.idle:
            if self._to_come:
                self._start()
            else:
                self._loop.stop(0)

    def _on_failure(self, error: BaseException) -> None:
        self._error = error


def waited() -> int:
    """Nanoseconds that this thread was ready to run and had no core, since it began."""
    return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1])


class NoLeases:
    """Nobody borrows from the engine under test."""

    def lend(self, lease: int, keys: Sequence[bytes], tell: Callable[[Sequence[int]], None]) -> None:
        tell(())

    def unlend(self, lease: int) -> None:
        pass


@contextmanager
def opened(engine: Engine, *bounds: int) -> Iterator[list[Peers]]:
    """Its peers, one for each bound in bytes/s, on an event loop that has a thread of its own."""
    runner, loop = engine.runner, asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="events", daemon=True)
    thread.start()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(LIMIT_S)

    made = [Peers(runner.blocks, "tcp:127.0.0.1:0", [Tcp()], max_bytes_per_s=bound) for bound in bounds]
    info = EngineInfo(
        model="", model_digest="", hash_root=runner.hash_root, hash_block_tokens=0, max_model_len=0, vocab_size=0
    )
    for peers in made:
        run(peers.open(NoLeases(), name="under test", incarnation="1", secret=SECRET, info=info))
    try:
        yield made
    finally:
        for peers in made:
            assert run(peers.close(LIMIT_S))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def spread(steps: int | None) -> None:
    """The thread `steps` to the first core, all others of this process to the second; None: as the system likes."""
    for task in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(task, {0, 1} if steps is None else {0} if task == steps else {1})


def measure(place: Place, other: Neighbour, prefix: Sequence[int], shape: Shape) -> list[Round]:
    """On a thread of its own, which computes the steps. The other engine has the prefix."""
    note(f"threads: {place.name}")
    engine = Engine(
        threads=place.threads, max_num_seqs=NUM_ROWS, kv_cache_bytes=POOL_BYTES, host_cache_bytes=HOST_BYTES
    )
    keys = chain(scope_key(engine.runner.hash_root), prefix, engine.limits.block_tokens)
    peer = other.peer(len(prefix))
    work = Work(engine, Fetch(0, "", peer.address, peer.incarnation, keys, (), int(LIMIT_S * 1e9)))
    steps = threading.get_native_id() if place.apart else None
    with opened(engine, FETCH_BYTES_PER_S, 0) as (bounded, unbounded):
        movers = Movers(Copier(engine.runner.host), bounded, unbounded, work)
        stage = Stage(engine, movers, work, shape, lambda: spread(steps))
        try:
            return stage.run()
        finally:
            spread(None)


# -- the report --------------------------------------------------------------------------------------------------------


def ratios(part: Part, rounds: Sequence[Round], of: Callable[[Found], list[int]]) -> tuple[float, float, float]:
    """P50, P99 and mean of a part's steps, by the same of steps alone. For P99 and mean each step is taken by the
    median of those alone in its round: the machine is not as fast in each."""
    usual = [median(of(each[ALONE])) for each in rounds]
    found, alone = (
        [step / by for each, by in zip(rounds, usual, strict=True) for step in of(each[which])]
        for which in (part, ALONE)
    )
    p50 = median(median(of(each[part])) / by for each, by in zip(rounds, usual, strict=True))
    return p50, percentile(found, 99) / percentile(alone, 99), fmean(found) / fmean(alone)


def whole(found: Found) -> list[int]:
    return found.steps_ns


def with_a_core(found: Found) -> list[int]:
    """Without what the step thread waited for its core while somebody else had it."""
    return [step_ns - wait_ns for step_ns, wait_ns in zip(found.steps_ns, found.waits_ns, strict=True)]


def row(place: Place, part: Part, rounds: Sequence[Round]) -> tuple[Any, ...]:
    found = [each[part] for each in rounds]
    steps_ns = [step_ns for each in found for step_ns in each.steps_ns]
    rates = (median(getattr(each, name) for each in found) / 1e6 for name in RATES)
    waits_ms = fmean([wait_ns for each in found for wait_ns in each.waits_ns]) / 1e6
    served = ratios(part, rounds, with_a_core)[:2]
    times_ms = (value / 1e6 for value in (median(steps_ns), percentile(steps_ns, 99)))
    return (place.name, part.name, len(steps_ns), *times_ms, *ratios(part, rounds, whole), waits_ms, *served, *rates)


async def bench(report: Report, shape: Shape) -> None:
    found: dict[Place, list[Round]] = {}
    async with process("other", transport="tcp", core=1) as other:
        prefix = Random(2).choices(range(other.info.vocab_size), k=MOVED_TOKENS)
        await other.ask([*prefix, 1])
        for place in shape.places:
            found[place] = await asyncio.to_thread(measure, place, other, prefix, shape)
    columns = ("threads", "part", "steps", "P50 ms", "P99 ms", "P50 ratio", "P99 ratio", "mean ratio",
               "waits ms", "P50 less waits", "P99 less waits", "fetch MB/s", "swap MB/s")  # fmt: skip
    rows = [row(place, part, rounds) for place, rounds in found.items() for part in PARTS]
    report.table(f"steps of {NUM_ROWS} decodes in {shape.num_rounds} rounds; ratios are by those alone", columns, rows)
    rounds = found[APART]
    p50, p99, _ = ratios(BESIDE, rounds, whole)
    for name, value, target in (("P50", p50, P50_TARGET), ("P99", p99, P99_TARGET)):
        what = f"one thread: {name} of steps beside swaps and a fetch, by alone"
        report.claim(what, round(value, 3), f"<= {target:g}", value <= target)
    rate = median(each[BESIDE].fetched_bytes_per_s for each in rounds)
    least = LEAST_BYTES_PER_S
    report.claim("fetched beside them, MB/s", round(rate / 1e6), f">= {least / 1e6:g}", rate >= least)


def main() -> None:
    report = Report("overlap", arguments(__doc__.splitlines()[0]).parse_args())
    asyncio.run(bench(report, QUICK if report.quick else FULL))
    report.finish()


if __name__ == "__main__":
    main()
