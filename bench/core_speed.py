"""How long do the scheduler's decisions take: `plan() + apply()` with 512 requests running and 100,000 blocks?

All of it is on: three classes with targets and waiting bounds, eight tenants, a host tier. Virtual time moves on with
the steps, so targets are missed and bounds come near as they would in an engine.

steady   512 requests decode; nobody comes or goes. Every length modulo the block size occurs.
aligned  the same, but all lengths are equal: in every 16th step all requests need a block and fill one.
churn    512 run; each step some end and as many arrive, with prompts of 64 to 2,000 tokens, most of them sharing a
         beginning, so that chunks, admissions, prefix lookups, evictions and releases are in every step.
full     as steady, with 1,000 more that wait: they take turns, as their bounds ask for.
parking  as churn, with fewer blocks than the requests grow to: some are parked, and come back.

The claims are about the thread's own CPU time, so that they hold on a machine that also does something else; the wall
time is printed beside it. Python's garbage collector runs as in an engine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from common import Report, arguments
from shoal.core.kv.hashing import chain, root_key, scope_key
from shoal.core.limits import Limits
from shoal.core.plan import Copied, Refused, StepPlan, StepResult
from shoal.core.request import RequestSpec
from shoal.core.scheduler import Scheduler
from shoal.engine.process import calm_collector
from shoal.workload.latency import percentile

SEQS, BLOCKS, BLOCK = 512, 100_000, 16
FEW_BLOCKS = 14_000
HOST_BLOCKS, BLOCK_BYTES = 50_000, 360 << 10
CLASSES = ("interactive", "standard", "standard", "batch")  # in turn
NUM_TENANTS = 8
ROOT = root_key("bench", "bfloat16", "1", BLOCK)
STEP_NS, COPY_NS = 30_000_000, 5_000_000
P50_MS, P99_MS = 1.0, 2.0


@dataclass
class Times:
    """Milliseconds per step; wall is of both calls."""

    plan: list[float] = field(default_factory=list)
    apply: list[float] = field(default_factory=list)  # `copied` included
    wall: list[float] = field(default_factory=list)

    @property
    def both(self) -> list[float]:
        return [a + b for a, b in zip(self.plan, self.apply, strict=True)]


class Replica:
    """A scheduler, and the time that its steps take."""

    def __init__(self, budget: int, num_blocks: int = BLOCKS) -> None:
        limits = Limits(
            num_blocks=num_blocks,
            block_tokens=BLOCK,
            max_model_len=1 << 20,
            vocab_size=50_000,
            max_num_seqs=SEQS,
            max_num_batched_tokens=budget,
            num_host_blocks=HOST_BLOCKS,
            block_bytes=BLOCK_BYTES,
            preemption="swap",  # a step of any size takes as long here: computing again would seem to cost nothing
        )
        self.scheduler = Scheduler(limits, hash_root=ROOT)
        self._now_ns = 0
        self._num_submitted = 0

    def submit(self, tokens: tuple[int, ...], max_tokens: int, keys: tuple[bytes, ...] = ()) -> None:
        number, self._num_submitted = self._num_submitted, self._num_submitted + 1
        spec = RequestSpec(
            id=f"r{number}",
            prompt=tokens,
            max_tokens=max_tokens,
            service_class=CLASSES[number % len(CLASSES)],
            tenant=f"t{number // len(CLASSES) % NUM_TENANTS}",
            prefix_keys=keys,
        )
        answer = self.scheduler.submit(spec, self._now_ns)
        assert not isinstance(answer, Refused), answer

    def step(self, times: Times | None) -> StepPlan:
        """One step as the engine's loop takes it, without the model. Copies are done when the step is."""
        scheduler = self.scheduler
        wall, cpu = time.perf_counter(), time.thread_time()
        plan = scheduler.plan(self._now_ns)
        planned, planned_cpu = time.perf_counter(), time.thread_time()
        assert plan is not None
        self._now_ns += STEP_NS
        tokens = [7] * sum(part.sample for part in plan.slices)
        result = StepResult(plan.step, tokens, busy_ns=STEP_NS if plan.slices else 0)
        copied = [Copied(op.number, COPY_NS) for op in plan.ops]
        returned, returned_cpu = time.perf_counter(), time.thread_time()
        scheduler.apply(result, self._now_ns)
        if copied:
            scheduler.copied(copied, self._now_ns)
        applied, applied_cpu = time.perf_counter(), time.thread_time()
        if times is not None:
            times.plan.append(1e3 * (planned_cpu - cpu))
            times.apply.append(1e3 * (applied_cpu - returned_cpu))
            times.wall.append(1e3 * (planned - wall + applied - returned))
        return plan


def prompt(chance: random.Random, count: int) -> tuple[int, ...]:
    return tuple(chance.choices(range(50_000), k=count))


def decoding(lengths: Callable[[int], int], num_steps: int, num_waiting: int = 0) -> Replica:
    """512 requests that have computed their prompts and go on for longer than is measured."""
    chance = random.Random(1)
    replica = Replica(budget=SEQS * 512)
    for number in range(SEQS + num_waiting):
        replica.submit(prompt(chance, lengths(number)), num_steps + 200)
    while replica.scheduler.view().num_running < SEQS:
        replica.step(None)
    replica.step(None)
    return replica


def steady(replica: Replica, num_steps: int) -> Times:
    times = Times()
    for _ in range(num_steps):
        replica.step(times)
    return times


def churn(num_steps: int, num_blocks: int) -> tuple[Times, Replica]:
    chance = random.Random(2)
    replica = Replica(budget=2048, num_blocks=num_blocks)
    beginnings = [prompt(chance, count) for count in (48, 160, 400, 800)]

    def arrive() -> None:
        own = prompt(chance, min(2000, int(64 * 1.5 ** chance.uniform(0, 6))))
        begin = chance.choice(beginnings) if chance.random() < 0.7 else ()
        # So long that about 512 run: arrivals are limited by the token budget.
        tokens = (*begin, *own)
        keys = chain(scope_key(ROOT), tokens, BLOCK)  # as the gateway sends them
        replica.submit(tokens, chance.randrange(50, 400), keys)

    times = Times()
    warm_up = 400
    for count in range(warm_up + num_steps):
        while replica.scheduler.view().num_waiting < 8:
            arrive()
        replica.step(times if count >= warm_up else None)
    return times, replica


def uneven(number: int) -> int:
    """Prompt lengths that take every value modulo the block size."""
    return 100 + 37 * number % 301


def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    report = Report("core_speed", options)
    calm_collector()
    num_steps = 400 if options.quick else 1200  # more, and the bounds of all could not be promised

    measured = {
        "steady": steady(decoding(uneven, num_steps), num_steps),
        "aligned": steady(decoding(lambda number: 128, num_steps), num_steps),
        "full": steady(decoding(uneven, num_steps, num_waiting=1000), num_steps),
    }
    churns = {}
    for name, num_blocks in (("churn", BLOCKS), ("parking", FEW_BLOCKS)):
        measured[name], churns[name] = churn(num_steps, num_blocks)

    columns = ("case", "steps", "plan p50 ms", "apply p50 ms", "p50 ms", "p99 ms", "max ms", "wall p50", "wall p99")
    rows = []
    for name, times in measured.items():
        both = times.both
        parts = (percentile(times.plan, 50), percentile(times.apply, 50))
        whole = (percentile(both, 50), percentile(both, 99), max(both))
        rows.append((name, len(both), *parts, *whole, percentile(times.wall, 50), percentile(times.wall, 99)))
    report.table(f"plan() + apply(), {SEQS} running, {BLOCKS:,} blocks", columns, rows)
    rows = []
    for name, replica in churns.items():
        view = replica.scheduler.view()
        blocks = (view.free_blocks, view.cached_blocks)
        rows.append(
            (name, view.num_running, view.prompt_tokens, view.prefix_hits, *blocks, view.preemptions, view.parks)
        )
    columns = ("case", "running", "prompt tokens", "prefix hits", "free blocks", "cached blocks", "preempted", "parked")
    report.table("requests that come and go", columns, rows)
    view_us = 1e6 * min(_time(churns["churn"].scheduler.view) for _ in range(200))
    report.table("other calls", ("call", "us"), [("view()", view_us)])

    for name, times in measured.items():
        p50, p99 = percentile(times.both, 50), percentile(times.both, 99)
        report.claim(f"{name} p50 ms", round(p50, 3), f"<= {P50_MS:g}", p50 <= P50_MS)
        report.claim(f"{name} p99 ms", round(p99, 3), f"<= {P99_MS:g}", p99 <= P99_MS)
    report.finish()


def _time(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
