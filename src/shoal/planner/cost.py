"""How long a step takes on a layout: core.stepcost's features, weighed by a roofline instead of by what was learned.

    a stage   overhead  +  max(FLOPs of its matrices / matrix rate,  weights read / bandwidth)
                        +  max(FLOPs of its attention / attention rate,  KV read / bandwidth)
                        +  all-reduces of its layers

Matrices and attention run one after the other, so each has a roof of its own (Williams, Waterman, Patterson, CACM
2009). Ranks that share a layer meet twice in it, those that share contexts once more. The stages of a pipeline work on
different microbatches at once: a token of each sequence takes a round through all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from shoal.core.stepcost import Features
from shoal.planner import kv, weights
from shoal.planner.catalogue import Gpu, Link
from shoal.planner.layouts import Cluster, Layout, stages
from shoal.planner.model import DTYPE_BYTES, KV_BYTES, Model
from shoal.planner.weights import Precision


@dataclass(frozen=True, slots=True)
class Rates:
    """What one rank reaches, not what is specified. `matrix`: (rows of a product, FLOP/s), ascending; between two
    numbers of rows the time is interpolated, beyond them the rate stays."""

    bytes_per_s: float
    matrix: tuple[tuple[int, float], ...]
    attention_flops_per_s: float
    kv_bytes_per_s: float
    step_s: float = 0.0  # of a step beside its arithmetic
    sequence_s: float = 0.0  # of each sequence in a step beside it: batching, sampling
    token_s: float = 0.0  # of each new token beside its products: norms, activations; shared by tensor-parallel ranks

    def matrix_s(self, flops_per_row: float, rows: int) -> float:
        (first, rate), *_ = self.matrix
        if rows <= first:
            return flops_per_row * rows / rate
        for (low, low_rate), (high, high_rate) in zip(self.matrix, self.matrix[1:], strict=False):
            if rows <= high:
                low_s, high_s = low / low_rate, high / high_rate
                return flops_per_row * (low_s + (high_s - low_s) * (rows - low) / (high - low))
        return flops_per_row * rows / self.matrix[-1][1]


def gpu_rates(gpu: Gpu, precision: Precision) -> Rates:
    """By the catalogue's figures and shares. Raises ValueError for a format that the GPU does not compute in."""
    dtype = precision.dtype
    if dtype not in gpu.flops_per_s:
        allowed = ", ".join(kind for kind in gpu.flops_per_s if kind in DTYPE_BYTES)
        raise ValueError(f"dtype is {dtype}; the catalogue has no matrix rate of {gpu.name} for it: allowed: {allowed}")
    kind = precision.quantization
    if kind is not None and kind.bits == 8:
        wanted = "fp8" if kind.name.startswith("fp8") else "int8"
        dtype = wanted if wanted in gpu.flops_per_s else dtype  # widened to 16 bits where it has no rate of its own
    flops = gpu.flops_per_s[dtype] * gpu.flops_share
    plain = gpu.flops_per_s[precision.dtype] * gpu.flops_share
    read = gpu.bytes_per_s * gpu.bytes_share
    return Rates(read, ((1, flops),), plain, read, gpu.step_s)


@dataclass(frozen=True, slots=True)
class Net:
    """Links within a node and between nodes. `between` is None where there is one node."""

    within: Link
    between: Link | None = None

    def all_reduce_s(self, num_bytes: float, ranks: int, nodes: int) -> float:
        """Within nodes a tree's latency and a ring's bytes; between them the same again, on each rank's share."""
        if ranks == 1:
            return 0.0
        local = -(-ranks // nodes)
        seconds = _all_reduce(self.within, num_bytes, local, 1)
        if nodes > 1:
            assert self.between is not None
            sharing = local if self.between.per_node else 1
            seconds += _all_reduce(self.between, num_bytes / local, nodes, sharing)
        return seconds

    def send_s(self, num_bytes: float, across: bool) -> float:
        link = self.between if across and self.between is not None else self.within
        return link.latency_s + num_bytes / (link.bytes_per_s * link.efficiency)


def _all_reduce(link: Link, num_bytes: float, ranks: int, sharing: int) -> float:
    if ranks == 1:
        return 0.0
    rate = link.bytes_per_s * link.efficiency / sharing
    return 2 * math.log2(ranks) * link.latency_s + 2 * (ranks - 1) / ranks * num_bytes / rate


@dataclass(frozen=True)
class Machine:
    """A layout of a model over GPUs, ready to be asked how long steps take."""

    model: Model
    precision: Precision
    kv_dtype: str
    rates: Rates
    net: Net
    cluster: Cluster
    layout: Layout

    @cached_property
    def stages(self) -> tuple[range, ...]:
        return stages(self.model, self.layout.pp)

    @cached_property
    def _stage_costs(self) -> tuple[_Stage, ...]:
        return tuple(_Stage(self, layers) for layers in self.stages)

    def stage_seconds(self, features: Features, sampled: int) -> list[float]:
        """Of each stage. `features` as StepCost.features gives them."""
        _, new, attended, sequences, context = features
        return [stage.seconds(new, attended, sequences, context, sampled) for stage in self._stage_costs]

    def predict(self, features: Features, sampled: int) -> float:
        """Seconds of one step with nothing else in flight, as StepCost.predict says it in nanoseconds."""
        times = self.stage_seconds(features, sampled)
        return sum(times) + (len(times) - 1) * self.hop_s(features[1])

    def hop_s(self, new_tokens: int) -> float:
        """Hidden states from one stage to the next."""
        across = self.layout.ranks > self.cluster.gpus_per_node
        return self.net.send_s(new_tokens * self.model.hidden_size * self.precision.item_bytes, across)

    def all_reduce_s(self, num_tokens: int) -> float:
        """One over the ranks that share a layer: the hidden states of so many tokens."""
        num_bytes = num_tokens * self.model.hidden_size * self.precision.item_bytes
        ranks = self.layout.tp * self.layout.cp
        return self.net.all_reduce_s(num_bytes, ranks, self.cluster.spans(ranks))

    def merge_s(self, num_tokens: int) -> float:
        """Partial attention of the ranks that share contexts: float32 results with their weights, of which each rank
        goes on with its share."""
        model, layout = self.model, self.layout
        heads = -(-model.num_heads // layout.tp)
        num_bytes = 4 * num_tokens * heads * (model.head_dim + 1)
        return self.net.all_reduce_s(num_bytes, layout.cp, self.cluster.spans(layout.cp, layout.tp)) / 2


class _Stage:
    def __init__(self, machine: Machine, layers: range) -> None:
        model, layout = machine.model, machine.layout
        self._machine = machine
        self._layers = layers
        self._token_flops = weights.token_flops(model, tp=layout.tp, cp=layout.cp, layers=layers)
        self._logit_flops = weights.logit_flops(model, ranks=layout.tp * layout.cp, layers=layers)
        self._pair_flops = len(layers) * pair_flops(model) / layout.tp / layout.cp
        self._groups = kv.groups(model, machine.kv_dtype, tp=layout.tp, layers=layers)
        self._read = weights.Read(model, machine.precision, tp=layout.tp, cp=layout.cp, layers=layers)

    def seconds(self, new: int, attended: int, sequences: int, context: int, sampled: int) -> float:
        machine = self._machine
        rates = machine.rates
        flops = rates.matrix_s(self._token_flops, new)
        if sampled and self._logit_flops:
            flops += rates.matrix_s(self._logit_flops, sampled)
        matrices = max(flops, self._read.num_bytes(new) / rates.bytes_per_s)
        mean = context / max(1, sequences)
        kv_bytes = sum(count * one * sequences * min(mean, window or mean) for count, one, window in self._groups)
        kv_bytes /= machine.layout.cp
        attention = max(self._pair_flops * attended / rates.attention_flops_per_s, kv_bytes / rates.kv_bytes_per_s)
        layers = len(self._layers)
        meeting = layers * (2 * machine.all_reduce_s(new) + machine.merge_s(new) * (machine.layout.cp > 1))
        share = len(self._layers) / machine.model.num_layers / machine.layout.tp / machine.layout.cp
        beside = rates.step_s + rates.sequence_s * sequences + rates.token_s * new * share
        return beside + matrices + attention + meeting


def pair_flops(model: Model) -> int:
    """Of one new token and one that it attends to, in one layer: the product with the key and that with the value."""
    if model.latent is not None:  # with the projections absorbed, heads meet latent vectors
        return 2 * model.num_heads * (2 * model.latent.kv_rank + model.latent.rope_dim)
    return 4 * model.num_heads * model.head_dim


def kv_token_bytes(model: Model, kv_dtype: str) -> float:
    """Of the whole model: what is moved, parked or fetched for one token."""
    assert kv_dtype in KV_BYTES
    return kv.token_bytes(kv.groups(model, kv_dtype))
