"""The other way round: a rate of requests and targets are given; which and how many GPUs serve them, with how much main
memory?

Of each kind of GPU every replica that fits a few of its nodes is tried: the highest rate at which it keeps its targets,
by bisection, and from that how many replicas there must be. The smallest fleet of a kind is the one with the fewest
GPUs; of equals that with the shorter time per token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shoal.planner import layouts
from shoal.planner.catalogue import Gpu, Link, link
from shoal.planner.choose import Wanted
from shoal.planner.cost import Machine, Net, gpu_rates
from shoal.planner.layouts import Cluster, Layout
from shoal.planner.memory import RankMemory, host_tier_bytes, pinned_bytes, rank_memory
from shoal.planner.model import Model
from shoal.planner.predict import Curve, Forecast, Limits
from shoal.planner.weights import Precision

HEADROOM = 0.8  # of what a replica can do: the rest is for bursts, and for a replica that is lost
_STEPS = 24  # of the bisection


@dataclass(frozen=True, slots=True)
class Fleet:
    gpu: Gpu
    layout: Layout  # with the replicas that are needed
    nodes: int
    rate_per_replica: float  # requests/s that one replica can serve within the targets
    forecast: Forecast  # of one replica at its share of the rate
    memory: RankMemory
    host_bytes_per_node: int  # main memory to buy for the host tier

    @property
    def gpus(self) -> int:
        return self.layout.gpus


def smallest_fleets(
    model: Model,
    kinds: Iterable[Gpu],
    rate_per_s: float,
    wanted: Wanted,
    *,
    precision: Precision,
    kv_dtype: str,
    between: Link,
) -> list[Fleet]:
    """One per kind of GPU that can do it, the fewest GPUs first. `wanted.concurrency` is not looked at."""
    found = []
    for gpu in kinds:
        options = [
            fleet
            for layout in _replicas(model, gpu)
            if (fleet := _fleet(model, gpu, layout, rate_per_s, wanted, precision, kv_dtype, between)) is not None
        ]
        if options:
            found.append(min(options, key=_order))
    return sorted(found, key=_order)


def _order(fleet: Fleet) -> tuple[float, ...]:
    return (fleet.gpus, fleet.forecast.tpot_s, fleet.layout.ranks)


def _replicas(model: Model, gpu: Gpu) -> Iterator[Layout]:
    """Within a node by tensor parallelism, beyond it by stages of a node each."""
    widths = [tp for tp in layouts.allowed_tp(model) if tp <= gpu.per_node]
    for tp in widths:
        for pp in range(1, gpu.per_node // tp + 1):
            if pp <= model.num_layers:
                yield Layout(tp, pp)
    for nodes in (2, 3, 4):
        if widths[-1] == gpu.per_node and nodes <= model.num_layers:
            yield Layout(gpu.per_node, nodes)


def _fleet(
    model: Model,
    gpu: Gpu,
    layout: Layout,
    rate_per_s: float,
    wanted: Wanted,
    precision: Precision,
    kv_dtype: str,
    between: Link,
) -> Fleet | None:
    if precision.dtype == "bfloat16" and "bfloat16" not in gpu.flops_per_s:
        precision = Precision("float16", precision.quantization)  # as large
    nodes = -(-layout.ranks // gpu.per_node)
    cluster = Cluster(gpu.per_node, nodes)
    net = Net(link(gpu.link), between if nodes > 1 else None)
    machine = Machine(model, precision, kv_dtype, gpu_rates(gpu, precision), net, cluster, layout)
    memory = rank_memory(
        model,
        precision,
        kv_dtype,
        wanted.batch,
        gpu.memory_bytes,
        utilization=wanted.utilization,
        tp=layout.tp,
        stages=machine.stages,
        allocator=wanted.allocator,
    )
    if memory.pool <= 0 or memory.max_context(wanted.context) < wanted.context:
        return None
    most = min(wanted.batch.max_seqs, memory.num_sequences(wanted.load.context))
    if not most:
        return None
    curve = Curve(machine, wanted.load, most, Limits(wanted.batch.max_tokens))
    highest = _highest_rate(curve, wanted)
    if not highest:
        return None
    replicas = math.ceil(rate_per_s / (HEADROOM * highest))
    found = curve.at(rate_per_s / replicas)
    assert found is not None
    per_node = max(1, gpu.per_node // layout.ranks)
    context = wanted.load.context
    parked = host_tier_bytes(
        model, kv_dtype, wanted.batch, found.running, context, tp=layout.tp, allocator=wanted.allocator
    )
    ranks_of_a_node = min(layout.ranks, gpu.per_node) * min(replicas, per_node)
    return Fleet(
        gpu,
        Layout(layout.tp, layout.pp, 1, replicas),
        nodes * replicas if layout.ranks >= gpu.per_node else -(-replicas // per_node),
        highest,
        found,
        memory,
        ranks_of_a_node * pinned_bytes(-(-parked // layout.ranks)),
    )


def _highest_rate(curve: Curve, wanted: Wanted) -> float:
    """Requests/s within the targets; 0: not even a single request at a time keeps them."""

    def kept(rate: float) -> bool:
        found = curve.at(rate)
        if found is None:
            return False
        return not (wanted.ttft_s and found.ttft_s > wanted.ttft_s) and not (
            wanted.tpot_s and found.tpot_s > wanted.tpot_s
        )

    low, high = 1e-4, 1.0
    if not kept(low):
        return 0.0
    while kept(high):
        low, high = high, 2 * high
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if kept(middle) else (low, middle)
    return low
