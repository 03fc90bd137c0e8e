"""Which ways there are to lay a model over GPUs: tensor × pipeline × context ranks make a replica, replicas a fleet.

Ranks of a replica are numbered with the tensor-parallel one fastest, then context, then pipeline, and fill nodes in
that order, so what talks most sits closest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from shoal.planner import weights
from shoal.planner.model import Model

MAX_CP = 8


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1  # replicas

    @property
    def ranks(self) -> int:
        """Of one replica."""
        return self.tp * self.pp * self.cp

    @property
    def gpus(self) -> int:
        return self.ranks * self.dp

    def __str__(self) -> str:
        parts = [f"TP={self.tp}"]
        parts += [f"PP={self.pp}"] * (self.pp > 1) + [f"CP={self.cp}"] * (self.cp > 1)
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Cluster:
    gpus_per_node: int
    nodes: int = 1

    @property
    def gpus(self) -> int:
        return self.gpus_per_node * self.nodes

    def spans(self, group: int, stride: int = 1) -> int:
        """Nodes that a group of ranks, `stride` apart, touches."""
        return min(group, -(-group * stride // self.gpus_per_node))


def every(model: Model, cluster: Cluster) -> Iterator[Layout]:
    """All that the model can be split into and that use as many of the GPUs as they can: with as many replicas as fit.

    A replica fills whole nodes, or several of them fill one: nothing straddles a node's border that need not.
    """
    for tp in range(1, cluster.gpus + 1):
        if why_not_tp(model, tp):
            continue
        for pp in range(1, min(model.num_layers, cluster.gpus // tp) + 1):
            for cp in _powers(min(MAX_CP, cluster.gpus // (tp * pp))):
                ranks = tp * pp * cp
                if _straddles(ranks, tp, cluster):
                    continue
                if ranks <= cluster.gpus_per_node:
                    dp = cluster.gpus_per_node // ranks * cluster.nodes
                else:
                    dp = cluster.gpus // ranks
                yield Layout(tp, pp, cp, dp)


def _straddles(ranks: int, tp: int, cluster: Cluster) -> bool:
    node = cluster.gpus_per_node
    return ranks > node and (ranks % node != 0 or (node % tp != 0 and tp % node != 0))


def _powers(most: int) -> Iterator[int]:
    value = 1
    while value <= most:
        yield value
        value *= 2


def need(layout: Layout, cluster: Cluster) -> int:
    """How much of a reason it needs. 0: tensor parallelism within a node, replicas across. 1: pipeline stages, for what
    a node is too small for. 2: anything else."""
    if layout.cp > 1 or layout.tp > cluster.gpus_per_node:
        return 2
    if layout.pp == 1:
        return 0
    return 1 if layout.tp == cluster.gpus_per_node else 2


def why_not_tp(model: Model, tp: int) -> str:
    """Empty: the model can be split so."""
    if model.num_heads % tp:
        return f"tp is {tp}; must divide the {model.num_heads} attention heads: {_listed(allowed_tp(model))}"
    if model.latent is None and model.num_kv_heads % tp and tp % model.num_kv_heads:
        return (
            f"tp is {tp}; must divide the {model.num_kv_heads} KV heads or be a multiple: {_listed(allowed_tp(model))}"
        )
    return ""


def allowed_tp(model: Model) -> list[int]:
    """Heads are split evenly; the MLP and the vocabulary need not be."""
    heads, kv_heads = model.num_heads, model.num_kv_heads
    shared = model.latent is not None  # each rank has the one latent vector
    return [
        tp for tp in range(1, heads + 1) if heads % tp == 0 and (shared or kv_heads % tp == 0 or tp % kv_heads == 0)
    ]


def _listed(values: list[int]) -> str:
    return "allowed: " + ", ".join(map(str, values))


@lru_cache(maxsize=256)
def stages(model: Model, pp: int) -> tuple[range, ...]:
    """Layers of each pipeline stage, so that the slowest is as fast as can be: a layer costs its weights, the output
    matrix is the last stage's; the embedding is a look-up."""
    costs = [weights.token_flops(model, layers=range(layer, layer + 1)) for layer in range(model.num_layers)]
    output = weights.logit_flops(model)
    if len(set(costs)) > 1:
        return tuple(_balanced([*costs[:-1], costs[-1] + output], pp))
    return tuple(equal_stages(model.num_layers, costs[0], output, pp))


def equal_stages(num_layers: int, layer: float, output: float, pp: int) -> list[range]:
    """Of layers that cost alike. The last stage, which also has the output matrix, gets as many as make the slowest
    stage the fastest; the others share the rest."""
    if pp == 1:
        return [range(num_layers)]

    def slowest(last: int) -> tuple[float, int]:
        others = -(-(num_layers - last) // (pp - 1))
        return max(others * layer, last * layer + output), -last

    last = min(range(1, num_layers - pp + 2), key=slowest)
    borders = [(num_layers - last) * stage // (pp - 1) for stage in range(pp)] + [num_layers]
    return [range(first, end) for first, end in pairwise(borders)]


def _balanced(costs: list[int], pp: int) -> list[range]:
    """Contiguous parts, none empty, with the least maximum: bisection over it."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(costs, middle)) <= pp:
            high = middle
        else:
            low = middle + 1
    found = _filled(costs, low)
    while len(found) < pp:  # fewer parts do it: the longest is halved
        index = max(range(len(found)), key=lambda part: len(found[part]))
        part = found[index]
        half = part.start + len(part) // 2
        found[index : index + 1] = [range(part.start, half), range(half, part.stop)]
    return found


def _filled(costs: list[int], most: int) -> list[range]:
    """From the last layer on, since that stage also has the output matrix."""
    parts: list[range] = []
    end, total = len(costs), 0
    for layer in range(len(costs) - 1, -1, -1):
        if total + costs[layer] > most:
            parts.append(range(layer + 1, end))
            end, total = layer + 1, 0
        total += costs[layer]
    parts.append(range(0, end))
    return parts[::-1]
