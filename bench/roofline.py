"""How much of what this machine's arithmetic and memory allow does the engine reach at 16 concurrent requests?

The load: 64 requests, prompts of 64 to 192 tokens, outputs of 32 to 96, 16 at a time, through the engine's own step
loop. Its floors are computed from the steps that the scheduler really planned:

    FLOPs of a step   2 · (weights of all layers) · new tokens  +  2 · (vocabulary · hidden) · sampled rows
                      + 4 · (query heads · head size) · layers · positions attended to
    bytes of a step   the layers' weights once, the output matrix once if anything is sampled, keys and values of every
                      sequence once, and those written

    arithmetic floor  FLOPs of all steps / the best matrix rate that was measured at any number of rows and in any way.
                      A batch of 16 cannot reach it: its decode steps must wait for the weights to come from memory.
    roofline          the sum over steps of the larger of FLOPs / that rate and bytes / the best bandwidth that was
                      measured (Williams, Waterman, Patterson, CACM 2009, step by step). Nothing that plans these steps
                      and keeps its weights in this format can be faster.
    arithmetic at 16  FLOPs of all steps / the best rate that a library's own linear layers reach at 16 rows: what an
                      engine made of them would take in its matrix products if prompts were no cheaper than decodes.

Rates come from the same process (bench/rates.py), before and after each run of the load; a run is held against the
better of its two neighbours, and the claims are about medians over runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from common import Report, arguments
from engine import Engine, Run, Step
from rates import Pass, Products, layer_weights, memory
from shoal.core.stepcost import attended_tokens
from shoal.engine.model.config import ModelConfig
from shoal.engine.model.registry import read_config
from shoal.workload import trace
from shoal.workload.arrivals import ClosedLoop
from shoal.workload.lengths import Mix, Uniform

CONCURRENCY, NUM_REQUESTS = 16, 64
LENGTHS = Mix(prompt=Uniform(128, 0.5), output=Uniform(64, 0.5))
ROWS = (1, 16, 64, 512)
DTYPE, ITEM_BYTES = "bfloat16", 2
TARGET = 0.6


class Work(NamedTuple):
    """What a step cannot do without."""

    flops: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of one moment."""

    passes: list[Pass]
    memory: dict[str, float]

    @property
    def flops_per_s(self) -> float:
        return max(each.flops_per_s for each in self.passes)

    @property
    def library_flops_per_s(self) -> float:
        return max(each.flops_per_s for each in self.passes if each.rows == CONCURRENCY and each.way != "shoal")

    @property
    def bytes_per_s(self) -> float:
        return max(*self.memory.values(), *(each.bytes_per_s for each in self.passes))


class Floor(NamedTuple):
    """Seconds."""

    arithmetic: float
    memory: float
    roofline: float
    arithmetic_at_16: float


def main() -> None:
    report = Report("roofline", arguments(__doc__.splitlines()[0]).parse_args())
    num_runs, num_passes = (2, 3) if report.quick else (5, 7)
    engine = Engine(max_num_seqs=CONCURRENCY, dtype=DTYPE, device="cpu")
    config = read_config(engine.folder)
    products = Products(config, DTYPE)
    load = trace.make(ClosedLoop(CONCURRENCY), LENGTHS, NUM_REQUESTS, seed=1)
    engine.serve(trace.make(ClosedLoop(4), LENGTHS, 4, seed=2), seed=2)  # what is set up at first use

    machines, runs = [measure(products, config, num_passes)], []
    for _ in range(num_runs):
        runs.append(engine.serve(load, seed=1))
        machines.append(measure(products, config, num_passes))
    show_rates(report, machines)
    floors = []
    for run, before, after in zip(runs, machines, machines[1:], strict=False):
        floors.append(floor([work(step, config) for step in run.steps], before, after))
    show_runs(report, runs, floors)
    show_steps(report, runs[-1], config, machines[-2:])
    for name, field in (("arithmetic floor", "arithmetic"), ("roofline", "roofline")):
        share = reached(field, runs, floors)
        report.claim(f"tokens/s, share of the {name}", round(share, 2), f">= {TARGET:g}", share >= TARGET)
    report.finish()


# -- the floor ---------------------------------------------------------------------------------------------------------


def work(step: Step, config: ModelConfig) -> Work:
    layers, head = layer_weights(config), config.vocab_size * config.hidden_size
    kv_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * ITEM_BYTES  # of one token
    new = sum(part.count for part in step.slices)
    sampled = sum(part.sample for part in step.slices)
    attended = sum(attended_tokens(part.start, part.count) for part in step.slices)
    held = sum(part.start + part.count for part in step.slices)  # read once each; the new ones among them are written
    flops = 2 * layers * new + 2 * head * sampled
    flops += 4 * config.num_heads * config.head_dim * config.num_layers * attended
    return Work(flops, ITEM_BYTES * (layers + head * bool(sampled)) + kv_bytes * held)


def floor(works: Sequence[Work], *machines: Machine) -> Floor:
    """Of these steps, at the best rates of the given moments."""
    flops_per_s = max(machine.flops_per_s for machine in machines)
    bytes_per_s = max(machine.bytes_per_s for machine in machines)
    flops = sum(each.flops for each in works)
    return Floor(
        arithmetic=flops / flops_per_s,
        memory=sum(each.bytes for each in works) / bytes_per_s,
        roofline=sum(max(each.flops / flops_per_s, each.bytes / bytes_per_s) for each in works),
        arithmetic_at_16=flops / max(machine.library_flops_per_s for machine in machines),
    )


def measure(products: Products, config: ModelConfig, count: int) -> Machine:
    passes = [products.measure(way, rows, count) for rows in ROWS for way in products.ways]
    weights = layer_weights(config) + config.vocab_size * config.hidden_size
    return Machine(passes, memory(ITEM_BYTES * weights, count))


# -- what is shown -----------------------------------------------------------------------------------------------------


def show_rates(report: Report, machines: Sequence[Machine]) -> None:
    rows = []
    for same in zip(*(machine.passes for machine in machines), strict=True):
        middle = sorted(same, key=lambda each: each.layers_s)[len(same) // 2]
        head_ms = 1e3 * median(each.head_s for each in same)
        rates = (middle.flops_per_s / 1e9, middle.bytes_per_s / 1e9)
        rows.append((f"{middle.rows}, {middle.way}", 1e3 * middle.layers_s, *rates, head_ms))
    columns = ("rows, way", "layers ms", "GFLOP/s", "GB/s", "output matrix ms")
    report.table(f"matrix rate, {DTYPE}, medians of {len(machines)} moments", columns, rows)
    names = machines[0].memory
    rates = [(name, median(machine.memory[name] for machine in machines) / 1e9) for name in names]
    report.table("memory, all threads", ("what", "GB/s"), rates)


def show_runs(report: Report, runs: Sequence[Run], floors: Sequence[Floor]) -> None:
    rows = [
        (number, run.tokens_per_s, run.seconds, sum(step.busy_ns for step in run.steps) / 1e9, len(run.steps))
        for number, run in enumerate(runs, start=1)
    ]
    columns = ("run", "tokens/s", "seconds", "in steps s", "steps")
    report.table(f"{NUM_REQUESTS} requests 128/64, {CONCURRENCY} at a time", columns, rows)
    rows = []
    for name in Floor._fields:
        seconds = median(getattr(each, name) for each in floors)
        allowed = median(run.num_tokens / getattr(each, name) for run, each in zip(runs, floors, strict=True))
        rows.append((name.replace("_", " "), seconds, allowed, reached(name, runs, floors)))
    report.table("floors of its steps, medians", ("floor", "seconds", "allows tokens/s", "reached"), rows)


def reached(name: str, runs: Sequence[Run], floors: Sequence[Floor]) -> float:
    """Share of the tokens/s that a floor allows, median over the runs."""
    return median(getattr(each, name) / run.seconds for run, each in zip(runs, floors, strict=True))


def show_steps(report: Report, run: Run, config: ModelConfig, machines: Sequence[Machine]) -> None:
    """Of the last run."""
    kinds: dict[str, list[Step]] = {"decodes": [], "prompts": []}
    for step in run.steps:
        kinds["decodes" if all(part.count == 1 for part in step.slices) else "prompts"].append(step)
    rows = [(kind, *_step_figures(steps, config, machines)) for kind, steps in kinds.items() if steps]
    columns = ("with", "steps", "tokens", "ms", "arithmetic", "memory", "roofline", "reached")
    report.table("kinds of steps in the last run, means; floors in ms", columns, rows)


def _step_figures(steps: Sequence[Step], config: ModelConfig, machines: Iterable[Machine]) -> tuple[float | int, ...]:
    count = len(steps)
    least = floor([work(step, config) for step in steps], *machines)
    seconds = sum(step.busy_ns for step in steps) / 1e9
    tokens = sum(part.count for step in steps for part in step.slices)
    times = (seconds, least.arithmetic, least.memory, least.roofline)
    return count, tokens / count, *(1e3 * each / count for each in times), least.roofline / seconds


if __name__ == "__main__":
    main()
