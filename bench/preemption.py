"""What does preemption cost those that make way, and what does it give those that are in a hurry?

same text   streams that are parked again and again make the tokens that they make undisturbed (float32), none computed
            twice
pressure    a KV pool of a quarter of what is asked for: everything ends, few preemptions, steps that make tokens
urgent      interactive requests, one by one, into a replica that batch requests fill: their P99 TTFT beside that of an
            idle replica, both in turn, a few rounds of each, over all requests of all rounds. A step that is under way
            when one comes is not stopped, so a step is allowed on top: P99 of those measured under load, from the
            launch to the result
copies      swap or recompute: what is sooner, at which rate of copies and length, and what the scheduler chooses
            (swapping.py); simulated times are means over seeds, whose steps and copies take a little longer or shorter

In the real engine, with a host tier in main memory, and simulated; the grid of copies is simulated, with a few cells of
it in the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean, median
from typing import Any, NamedTuple

import swapping
from common import Report, arguments
from engine import Engine
from live import note, serve
from shoal.core.classes import DEFAULT_CLASSES, ServiceClass
from shoal.core.stepcost import StepCost
from shoal.sim import outcomes
from shoal.sim.load import simulate
from shoal.workload import trace
from shoal.workload.arrivals import ClosedLoop, OpenLoop
from shoal.workload.latency import percentile
from shoal.workload.lengths import Mix, Uniform
from shoal.workload.trace import Part, Row, Trace

INTERACTIVE, BATCH = "interactive", "batch"
HOST_BYTES = 1 << 30
MAX_STEP_MS = 50  # what an urgent request may have to wait for

SAME_STREAMS, SAME_PROMPT, SAME_EVERY_S = 8, 96, 0.3
SAME_URGENT = Row(0, 48, 8, INTERACTIVE)
SAME_PARKS, SAME_ROUNDS = 4, 5  # a slow machine serves calls together, and parks less: rounds until enough were seen

PRESSURE_MIX, PRESSURE_SEQS, PRESSURE_SHARE = Mix(Uniform(96, 0.5), Uniform(128, 0.5)), 16, 4
TOKENS_PER_PREEMPTION, STEPS_PER_TOKEN = 50, 3

URGENT_SEQS, URGENT_BLOCKS = 16, 300
URGENT_BATCH = Part(1, BATCH, Mix(Uniform(256, 0.5), Uniform(128, 0.5)))
URGENT = Part(1, INTERACTIVE, Mix(Uniform(32, 0.25), Uniform(4, 0.5)))
URGENT_TIMES, URGENT_SHARE = 2, 0.7  # of the time between two of them, one alone takes so much
URGENT_ROUNDS = 4
FILL_NS = 2_000_000_000  # the batch fills the replica before the first urgent one comes

CLOSE, BOTH_SHARE, SEEDS, LIVE_ROUNDS = 1.10, 0.25, 5, 5


class World(NamedTuple):
    """The engine, or the simulator with the costs that the engine measured."""

    name: str
    engine: Engine

    def run(self, load: Trace, what: str, *, until: str = "", **limits: Any) -> outcomes.Report:
        """`until`: may end when the requests of this class have."""
        note(f"{self.name}, {what}")
        limits = {"prefix_caching": False} | limits
        if self.name == "live":
            return serve(self.engine, load, seed=1, name=what, stop=lambda ledger: ended(ledger, load, until), **limits)
        return simulate(load, replace(self.engine.limits, **limits), StepCost(self.engine.cost), seed=1)


def ended(ledger: outcomes.Ledger, load: Trace, service_class: str) -> bool:
    """Whether all requests of a class have."""
    wanted = sum(row.service_class == service_class for row in load.rows)
    found = [each for each in ledger.outcomes.values() if each.row.service_class == service_class]
    return 0 < wanted == sum(each.finish is not None or each.refusal is not None for each in found)


def main() -> None:
    report = Report("preemption", arguments(__doc__.splitlines()[0]).parse_args())
    same_text(report)
    engine = Engine(max_num_seqs=URGENT_SEQS, max_step_ms=MAX_STEP_MS, host_cache_bytes=HOST_BYTES)
    worlds = World("live", engine), World("simulated", engine)
    worlds[0].run(Trace((Row(0, 64, 4),) * 4), "what is set up at first use")
    pressure(report, worlds)
    report.save()
    urgent(report, worlds)
    report.save()
    copies(report, engine)
    report.finish()


# -- the same text -----------------------------------------------------------------------------------------------------


def same_text(report: Report) -> None:
    engine = Engine(dtype="float32", max_num_seqs=SAME_STREAMS, host_cache_bytes=HOST_BYTES)
    world = World("live", engine)
    num_urgent, num_tokens, num_blocks = (6, 64, 60) if report.quick else (24, 192, 110)
    streams = [Row(0, SAME_PROMPT, num_tokens, BATCH)] * SAME_STREAMS
    calls = [SAME_URGENT._replace(due_ns=int((number + 1) * SAME_EVERY_S * 1e9)) for number in range(num_urgent)]
    quiet = world.run(Trace(tuple(streams)), "float32, undisturbed", num_blocks=200)
    views, num_compared, num_other = [], 0, 0
    while len(views) < SAME_ROUNDS and sum(view.parks for view in views) < SAME_PARKS:
        loud = world.run(Trace((*streams, *calls)), "float32, parked", num_blocks=num_blocks, preemption="swap")
        pairs = list(zip(quiet.outcomes, loud.outcomes, strict=False))  # the same streams come first in both
        num_compared += len(pairs)
        num_other += sum(a.tokens != b.tokens or not b.answered for a, b in pairs)
        views.append(loud.view)
    parks, again = (sum(counts) for counts in zip(*((v.parks, v.recomputed_tokens) for v in views), strict=True))
    report.table(
        f"the same text: {SAME_STREAMS} streams of {num_tokens} tokens, {num_urgent} urgent requests, by round",
        ("parked", "preempted", "recomputed tokens", "swapped out MB", "back MB"),
        [(view.parks, view.preemptions, view.recomputed_tokens, view.swapped_out_bytes / 1e6,
          view.swapped_in_bytes / 1e6) for view in views],
    )  # fmt: skip
    name = f"times a stream was parked, in {len(views)} of at most {SAME_ROUNDS} rounds"
    report.claim(name, parks, f">= {SAME_PARKS}", parks >= SAME_PARKS)
    report.claim(f"texts that are not the undisturbed ones, of {num_compared}", num_other, "0", num_other == 0)
    report.claim("tokens computed again, swapping", again, "0", again == 0)


# -- under pressure ----------------------------------------------------------------------------------------------------


def pressure(report: Report, worlds: Iterable[World]) -> None:
    rows = []
    for world in worlds:
        num_requests = PRESSURE_SEQS if world.name == "live" else 4 * PRESSURE_SEQS
        load = trace.make(ClosedLoop(PRESSURE_SEQS), PRESSURE_MIX, num_requests, seed=4)
        size = world.engine.limits.block_tokens
        asked = [-(-(row.prompt_tokens + row.output_tokens) // size) for row in load.rows[:PRESSURE_SEQS]]
        num_blocks = max(*asked, sum(asked) // PRESSURE_SHARE)
        for mode in ("swap",) if report.quick and world.name == "live" else ("swap", "recompute"):
            what = f"a quarter of the pool, {mode}"
            found = world.run(load, what, num_blocks=num_blocks, max_num_seqs=PRESSURE_SEQS, preemption=mode)
            num_tokens = sum(len(outcome.tokens) for outcome in found.outcomes)
            per_preemption = num_tokens / max(1, found.num_preemptions)
            num_ended = sum(outcome.answered for outcome in found.outcomes)
            rows.append(
                (world.name, mode, num_requests, num_ended, num_tokens, found.num_steps, found.num_preemptions,
                 found.view.parks, found.recomputed_tokens)
            )  # fmt: skip
            name = f"{world.name}, {mode}"
            report.claim(f"{name}: requests that ended", num_ended, str(num_requests), num_ended == num_requests)
            ok = per_preemption >= TOKENS_PER_PREEMPTION
            report.claim(f"{name}: tokens per preemption", round(per_preemption), f">= {TOKENS_PER_PREEMPTION}", ok)
            steps = found.num_steps / num_tokens
            report.claim(f"{name}: steps per token", round(steps, 2), f"<= {STEPS_PER_TOKEN}", steps <= STEPS_PER_TOKEN)
            if mode == "swap":
                again = found.recomputed_tokens
                report.claim(f"{name}: tokens computed again", again, "0", again == 0)
    columns = ("where", "mode", "requests", "ended", "tokens", "steps", "preempted", "parked", "recomputed tokens")
    report.table(f"{PRESSURE_SEQS} at once in a quarter of the blocks that they ask for", columns, rows)


# -- urgent requests under full load -----------------------------------------------------------------------------------


def urgent(report: Report, worlds: Iterable[World]) -> None:
    rows = []
    for world in worlds:
        num_each = (100 if report.quick and world.name == "live" else 200) // URGENT_ROUNDS
        rounds = [urgent_round(world, num_each, seed) for seed in range(5, 5 + URGENT_ROUNDS)]
        alone, served = (
            [each.ttft_ns / 1e6 for figures in part for each in figures.latencies]
            for part in ([alone for alone, _ in rounds], [found.by_class()[INTERACTIVE] for _, found in rounds])
        )
        steps = [step_ns / 1e6 for _, found in rounds for step_ns in found.steps_ns]
        usual, p99, step_ms = percentile(alone, 99), percentile(served, 99), percentile(steps, 99)
        most_ms = URGENT_TIMES * usual + step_ms
        rows.append(
            (world.name, len(served), median(alone), usual, median(served), p99, max(served),
             fmean(found.step_met_ns() for _, found in rounds) / 1e6, step_ms, max(steps),
             *(sum(getattr(found.view, name) for _, found in rounds)
               for name in ("preemptions", "parks", "recomputed_tokens")))
        )  # fmt: skip
        name = f"{world.name}: P99 TTFT ms of {len(served)} urgent requests"
        target = f"<= {most_ms:.1f}, {URGENT_TIMES} x {usual:.1f} alone + a step of {step_ms:.1f}"
        report.claim(name, round(p99, 1), target, p99 <= most_ms)
    columns = (
        "where", "urgent", "alone: TTFT P50 ms", "P99 ms", "among batch: P50 ms", "P99 ms ", "most ms",
        "step that is met, ms", "P99 step ms", "longest step ms", "preempted", "parked", "recomputed tokens",
    )  # fmt: skip
    report.table("urgent requests while batch requests fill every slot", columns, rows)


def urgent_round(world: World, num_urgent: int, seed: int) -> tuple[outcomes.Report, outcomes.Report]:
    """Urgent requests alone, and then as many among batch requests, at a pace and with targets from the former."""
    alone = world.run(trace.mixed(ClosedLoop(1), [URGENT], num_urgent, seed), "urgent requests alone")
    takes = alone.e2e_ns
    assert takes is not None
    calls = trace.mixed(OpenLoop(URGENT_SHARE / takes.mean * 1e9), [URGENT], num_urgent, seed).rows
    num_fill = 2 * (num_urgent + URGENT_SEQS)
    fill = [row._replace(due_ns=0) for row in trace.mixed(ClosedLoop(1), [URGENT_BATCH], num_fill, seed).rows]
    load = Trace((*fill, *(row._replace(due_ns=row.due_ns + FILL_NS) for row in calls)))
    found = world.run(
        load, "urgent requests among batch", until=INTERACTIVE, num_blocks=URGENT_BLOCKS, classes=hurried(alone)
    )
    for part in (alone, found.by_class()[INTERACTIVE]):
        assert len(part.latencies) == num_urgent, f"{len(part.latencies)} of {num_urgent} were answered"
    last_ns = max(row.due_ns for row in load.rows)
    num_open = sum(not each.answered or each.last_ns > last_ns for each in found.by_class()[BATCH].outcomes)
    assert num_open > URGENT_SEQS, "the batch ended before the last urgent request came"
    return alone, found


def hurried(alone: outcomes.Report) -> dict[str, ServiceClass]:
    """The default classes, with targets for the interactive one such as the claim."""
    ttft, tpot = alone.ttft_ns, alone.tpot_ns
    assert ttft is not None and tpot is not None
    targets = {"ttft_ms": URGENT_TIMES * ttft.p50 / 1e6, "tpot_ms": URGENT_TIMES * tpot.p50 / 1e6}
    return DEFAULT_CLASSES | {INTERACTIVE: replace(DEFAULT_CLASSES[INTERACTIVE], **targets)}


# -- swap or recompute -------------------------------------------------------------------------------------------------


def copies(report: Report, engine: Engine) -> None:
    note("simulated, copies")
    by_seed = [
        {cell: {mode: swapping.simulated(cell, mode, seed) for mode in swapping.MODES} for cell in swapping.GRID}
        for seed in range(2 if report.quick else SEEDS)
    ]
    found = {cell: {mode: fmean(each[cell][mode] for each in by_seed) for mode in swapping.MODES}
             for cell in swapping.GRID}  # fmt: skip
    show(report, "simulated", found)
    worst = max(swapping.loss(seconds) for each in by_seed for seconds in each.values())
    report.claim(f"simulated: worst cell of any of {len(by_seed)} seeds", round(worst, 3), f"<= {CLOSE:g}",
                 worst <= CLOSE)  # fmt: skip
    shares = {}
    for mode in ("swap", "recompute"):
        others = "recompute" if mode == "swap" else "swap"
        shares[mode] = sum(seconds[mode] < seconds[others] for seconds in found.values()) / len(found)
        report.claim(f"share of cells in which to {mode} is right", round(shares[mode], 2), f">= {BOTH_SHARE:g}",
                     shares[mode] >= BOTH_SHARE)  # fmt: skip
    if report.quick:
        return
    live: dict[swapping.Cell, dict[swapping.Mode, float]] = {}
    for cell in swapping.LIVE_GRID:
        note(f"live, copies at {cell.mb_per_s} MB/s, {cell.num_tokens} tokens")
        rounds = [{mode: swapping.live(engine, cell, mode) for mode in swapping.MODES} for _ in range(LIVE_ROUNDS)]
        live[cell] = {mode: median(each[mode] for each in rounds) for mode in swapping.MODES}
    show(report, "live", live)


def show(report: Report, where: str, found: dict[swapping.Cell, dict[swapping.Mode, float]]) -> None:
    columns = ("MB/s", "tokens", "backlog", "swap s", "recompute s", "better", "chosen s", "chosen / better")
    report.table(f"{where}: from leaving the batch to the next token", columns, swapping.rows_of(found))
    worst = max(swapping.loss(seconds) for seconds in found.values())
    report.claim(
        f"{where}: the choice by the better of both, worst cell", round(worst, 3), f"<= {CLOSE:g}", worst <= CLOSE
    )


if __name__ == "__main__":
    main()
