"""Which layout to take.

What is usual (tensor parallelism within a node, replicas across) needs no reason. Pipeline stages of a node each, or
less usual things still, are taken only where that does not hold the model, does not serve what is asked, or is slower
by more than MARGIN. The reasons in words: explain.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.planner import layouts
from shoal.planner.catalogue import Gpu, Link, link
from shoal.planner.cost import Machine, Net, gpu_rates
from shoal.planner.layouts import Cluster, Layout
from shoal.planner.memory import Batch, RankMemory, host_tier_bytes, rank_memory
from shoal.planner.model import Model
from shoal.planner.predict import Forecast, Limits, Load, forecast
from shoal.planner.units import ms
from shoal.planner.weights import Precision

MARGIN = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be served. Targets in seconds; 0: none."""

    context: int
    load: Load
    concurrency: int
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    batch: Batch = field(default_factory=Batch)
    utilization: float = 0.9
    allocator: str = "pages"


@dataclass(frozen=True, slots=True)
class Option:
    """A layout, weighed."""

    layout: Layout
    memory: RankMemory
    need: int  # of a reason: 0 none, 1 pipeline stages of nodes, 2 anything else
    holds: int  # sequences of the load in all replicas at once
    forecast: Forecast | None  # of a replica; None: not even one sequence of the context fits
    tokens_per_s: float
    misses: tuple[str, ...]  # targets, in words

    @property
    def fits(self) -> bool:
        return self.forecast is not None

    @property
    def usual(self) -> bool:
        return not self.need


@dataclass(frozen=True, slots=True)
class Plan:
    model: Model
    gpu: Gpu
    cluster: Cluster
    within: Link
    between: Link | None
    precision: Precision
    kv_dtype: str
    wanted: Wanted
    options: tuple[Option, ...]  # best first
    chosen: Option | None


def plan(
    model: Model,
    gpu: Gpu,
    cluster: Cluster,
    wanted: Wanted,
    *,
    precision: Precision,
    kv_dtype: str,
    within: Link | None = None,
    between: Link | None = None,
    only: Layout | None = None,
) -> Plan:
    """`within`: the GPU's own link where None. `only`: tp, pp and cp that must be kept; 0 leaves one open."""
    within = within or link(gpu.link)
    net = Net(within, between if cluster.nodes > 1 else None)
    rates = gpu_rates(gpu, precision)
    found = []
    for layout in layouts.every(model, cluster):
        if only is not None and not _matches(layout, only):
            continue
        machine = Machine(model, precision, kv_dtype, rates, net, cluster, layout)
        found.append(weigh(machine, gpu.memory_bytes, wanted))
    found.sort(key=order)
    return Plan(model, gpu, cluster, within, between, precision, kv_dtype, wanted, tuple(found), choose(found))


def weigh(machine: Machine, memory_bytes: int, wanted: Wanted) -> Option:
    layout = machine.layout
    memory = rank_memory(
        machine.model,
        machine.precision,
        machine.kv_dtype,
        wanted.batch,
        memory_bytes,
        utilization=wanted.utilization,
        tp=layout.tp,
        cp=layout.cp,
        stages=machine.stages,
        allocator=wanted.allocator,
    )
    need = layouts.need(layout, machine.cluster)
    each = min(wanted.batch.max_seqs, memory.num_sequences(wanted.load.context)) if memory.pool > 0 else 0
    if not each or memory.max_context(wanted.context) < wanted.context:
        return Option(layout, memory, need, 0, None, 0.0, ())
    few, num_fuller = divmod(wanted.concurrency, layout.dp)  # replicas are as equally full as can be
    limits = Limits(wanted.batch.max_tokens)
    found = forecast(machine, wanted.load, min(each, few + bool(num_fuller)), limits)
    tokens_per_s = (num_fuller or layout.dp) * found.tokens_per_s(wanted.load)
    if few and num_fuller:
        others = forecast(machine, wanted.load, min(each, few), limits)
        tokens_per_s += (layout.dp - num_fuller) * others.tokens_per_s(wanted.load)
    holds = each * layout.dp
    misses = tuple(_misses(found, holds, wanted))
    return Option(layout, memory, need, holds, found, tokens_per_s, misses)


def _misses(found: Forecast, holds: int, wanted: Wanted) -> list[str]:
    misses = []
    if holds < wanted.concurrency:
        misses.append(f"holds {holds} of {wanted.concurrency} requests at once")
    for name, value_s, target_s in (("TTFT", found.ttft_s, wanted.ttft_s), ("TPOT", found.tpot_s, wanted.tpot_s)):
        if target_s and value_s > target_s:
            misses.append(f"{name} {ms(value_s)} ms, target {ms(target_s)} ms")
    return misses


def choose(found: Sequence[Option]) -> Option | None:
    """The best of those that need the least reason, unless one that needs more serves what these do not, or is faster
    by more than MARGIN."""
    chosen: Option | None = None
    for need in range(3):
        same = [option for option in found if option.fits and option.need == need]
        if not same:
            continue
        best = min(same, key=order)
        if (
            chosen is None
            or len(best.misses) < len(chosen.misses)
            or (len(best.misses) == len(chosen.misses) and best.tokens_per_s > (1 + MARGIN) * chosen.tokens_per_s)
        ):
            chosen = best
    return chosen


def order(option: Option) -> tuple[float, ...]:
    """Who misses the fewest targets, then the fastest, then the smallest replica."""
    layout = option.layout
    return (not option.fits, len(option.misses), -option.tokens_per_s, layout.ranks, layout.pp, layout.cp, layout.tp)


def _matches(layout: Layout, only: Layout) -> bool:
    pairs = ((layout.tp, only.tp), (layout.pp, only.pp), (layout.cp, only.cp))
    return all(not wanted or value == wanted for value, wanted in pairs)


def host_tier(plan: Plan, option: Option) -> int:
    """Main memory per replica that parks everything that runs there; 0 where nothing fits."""
    if option.forecast is None:
        return 0
    wanted = plan.wanted
    return host_tier_bytes(
        plan.model,
        plan.kv_dtype,
        wanted.batch,
        option.forecast.running,
        wanted.load.context,
        tp=option.layout.tp,
        allocator=wanted.allocator,
    )
