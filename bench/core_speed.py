"""How long do the scheduler's decisions take: `plan() + apply()` with 512 requests running and 100,000 blocks?

steady   512 requests decode; nobody comes or goes. Every length modulo the block size occurs.
aligned  the same, but all lengths are equal: in every 16th step all requests need a block and fill one.
churn    512 run; each step some end and as many arrive, with prompts of 64 to 2,000 tokens, most of them sharing a
         beginning, so that chunks, admissions, prefix lookups, evictions and releases are in every step.
full     as steady, with 1,000 more that wait.

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
from shoal.core.plan import StepPlan, StepResult
from shoal.core.request import RequestSpec
from shoal.core.scheduler import Scheduler
from shoal.engine.process import calm_collector
from shoal.workload.latency import percentile

SEQS, BLOCKS, BLOCK = 512, 100_000, 16
ROOT = root_key("bench", "bfloat16", "1", BLOCK)
STEP_NS = 30_000_000
P50_MS, P99_MS = 1.0, 2.0


@dataclass
class Times:
    """Milliseconds per step; wall is of both calls."""

    plan: list[float] = field(default_factory=list)
    apply: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    @property
    def both(self) -> list[float]:
        return [a + b for a, b in zip(self.plan, self.apply, strict=True)]


def replica(budget: int) -> Scheduler:
    limits = Limits(
        num_blocks=BLOCKS,
        block_tokens=BLOCK,
        max_model_len=1 << 20,
        vocab_size=50_000,
        max_num_seqs=SEQS,
        max_num_batched_tokens=budget,
        max_queue=10_000,
        max_step_ns=10**12,  # here the step is never cut by time
    )
    return Scheduler(limits, hash_root=ROOT)


def prompt(chance: random.Random, count: int) -> tuple[int, ...]:
    return tuple(chance.choices(range(50_000), k=count))


def step(scheduler: Scheduler, times: Times | None) -> StepPlan:
    """One step as the engine's loop takes it, without the model."""
    wall, cpu = time.perf_counter(), time.thread_time()
    plan = scheduler.plan(0)
    planned, planned_cpu = time.perf_counter(), time.thread_time()
    assert plan is not None
    result = StepResult(plan.step, [7] * sum(part.sample for part in plan.slices), busy_ns=STEP_NS)
    returned, returned_cpu = time.perf_counter(), time.thread_time()
    scheduler.apply(result, 0)
    applied, applied_cpu = time.perf_counter(), time.thread_time()
    if times is not None:
        times.plan.append(1e3 * (planned_cpu - cpu))
        times.apply.append(1e3 * (applied_cpu - returned_cpu))
        times.wall.append(1e3 * (planned - wall + applied - returned))
    return plan


def decoding(lengths: Callable[[int], int], num_waiting: int = 0) -> Scheduler:
    """512 requests that have computed their prompts and go on for long."""
    chance = random.Random(1)
    scheduler = replica(budget=SEQS * 512)
    for number in range(SEQS + num_waiting):
        scheduler.submit(RequestSpec(id=f"r{number}", prompt=prompt(chance, lengths(number)), max_tokens=100_000), 0)
    while scheduler.view().num_running < SEQS:
        step(scheduler, None)
    step(scheduler, None)
    return scheduler


def steady(scheduler: Scheduler, num_steps: int) -> Times:
    times = Times()
    for _ in range(num_steps):
        assert len(step(scheduler, times).slices) == SEQS
    return times


def churn(num_steps: int) -> tuple[Times, Scheduler]:
    chance = random.Random(2)
    scheduler = replica(budget=2048)
    beginnings = [prompt(chance, count) for count in (48, 160, 400, 800)]
    number = 0

    def arrive() -> None:
        nonlocal number
        own = prompt(chance, min(2000, int(64 * 1.5 ** chance.uniform(0, 6))))
        begin = chance.choice(beginnings) if chance.random() < 0.7 else ()
        # So long that about 512 run: arrivals are limited by the token budget.
        tokens = (*begin, *own)
        keys = chain(scope_key(ROOT), tokens, BLOCK)  # as the gateway sends them
        max_tokens = chance.randrange(50, 400)
        scheduler.submit(RequestSpec(id=f"r{number}", prompt=tokens, max_tokens=max_tokens, prefix_keys=keys), 0)
        number += 1

    times = Times()
    warm_up = 400
    for count in range(warm_up + num_steps):
        while scheduler.view().num_waiting < 8:
            arrive()
        step(scheduler, times if count >= warm_up else None)
    return times, scheduler


def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    report = Report("core_speed", options)
    calm_collector()
    num_steps = 400 if options.quick else 2500  # more would overflow the pool

    measured = {
        "steady": steady(decoding(lambda number: 100 + 37 * number % 301), num_steps),
        "aligned": steady(decoding(lambda number: 128), num_steps),
        "full": steady(decoding(lambda number: 100 + 37 * number % 301, num_waiting=1000), num_steps),
    }
    measured["churn"], scheduler = churn(num_steps)
    view = scheduler.view()

    columns = ("case", "steps", "plan p50 ms", "apply p50 ms", "p50 ms", "p99 ms", "max ms", "wall p50", "wall p99")
    rows = []
    for name, times in measured.items():
        both = times.both
        parts = (percentile(times.plan, 50), percentile(times.apply, 50))
        whole = (percentile(both, 50), percentile(both, 99), max(both))
        rows.append((name, len(both), *parts, *whole, percentile(times.wall, 50), percentile(times.wall, 99)))
    report.table(f"plan() + apply(), {SEQS} running, {BLOCKS:,} blocks", columns, rows)
    churned = (view.num_running, view.prompt_tokens, view.prefix_hits, view.free_blocks, view.cached_blocks)
    report.table("churn", ("running", "prompt tokens", "prefix hits", "free blocks", "cached blocks"), [churned])
    view_us = 1e6 * min(_time(scheduler.view) for _ in range(200))
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
