"""One rank's memory: weights, activations at the largest step, what libraries keep, and the KV pool that is left.

    memory · utilization  =  weights + activations + KV pool          the rest is the workspace: the driver's context,
                                                                      collectives' buffers, what an allocator loses

The engine sizes its pool by the same two functions, `pool_bytes` and kv.block_bytes, with what it measured in the place
of what is estimated here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shoal.planner import kv, weights
from shoal.planner.model import Model
from shoal.planner.weights import Parts, Precision, total_bytes

_FLOAT_BYTES = 4  # of a logit
_ID_BYTES = 8
_LIBRARY_BYTES = 6_000_000  # what a CPU's matrix products keep to pack operands into


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The largest step that an engine plans, and the block of its pool."""

    max_tokens: int = 2048
    max_seqs: int = 64
    block_tokens: int = 16


def pool_bytes(memory_bytes: int, utilization: float, weight_bytes: int, activation_bytes: int) -> int:
    """What is left for keys and values; below 0: so much is missing."""
    return int(memory_bytes * utilization) - weight_bytes - activation_bytes


def activation_bytes(model: Model, item_bytes: int, batch: Batch, *, tp: int = 1, cp: int = 1) -> int:
    """At their highest in a step of so many tokens, of which so many rows are sampled, where attention reads keys and
    values where they lie.

    In a layer the hidden state, what attention began and ended with, and the MLP live together: gate and up,
    silu(gate), their product. Behind the layers the logits do, in float32.
    """
    hidden, heads = model.hidden_size, -(-model.num_heads // tp)
    if model.latent is not None:
        latent = model.latent
        begun = latent.q_rank + latent.kv_rank + latent.rope_dim
        begun += heads * (latent.kv_rank + latent.nope_dim + latent.rope_dim)
        ended = heads * max(latent.kv_rank, latent.v_dim)
    else:
        begun = (heads + 2 * weights.kv_heads(model, tp)) * model.head_dim
        ended = heads * model.head_dim
    state = hidden + begun + ended
    mlp = _mlp_width(model, tp * cp)
    layer = batch.max_tokens * (state + mlp) * item_bytes
    rows = min(batch.max_seqs, batch.max_tokens)
    logits = rows * (2 * hidden * item_bytes + model.vocab_size * _FLOAT_BYTES)
    if item_bytes != _FLOAT_BYTES:
        logits += rows * -(-model.vocab_size // (tp * cp)) * item_bytes
    return max(layer, batch.max_tokens * state * item_bytes + logits)


def _mlp_width(model: Model, ranks: int) -> int:
    """Numbers per token."""
    width = 4 * -(-model.intermediate_size // ranks)
    if model.experts is not None:
        experts = model.experts
        own = 2 * model.hidden_size  # input and output, in the order of experts
        one = 4 * -(-experts.inner // ranks) + own
        width = max(width * bool(experts.first), experts.per_token * one + 4 * -(-experts.shared_inner // ranks))
    return width


def cpu_workspace_bytes(batch: Batch, max_model_len: int) -> int:
    """Of an engine on a CPU: tokens and block tables of its rows, and what the matrix library keeps."""
    cells = batch.max_seqs * max_model_len
    return cells * _ID_BYTES + cells // batch.block_tokens * 4 + _LIBRARY_BYTES


@dataclass(frozen=True)
class RankMemory:
    """Of the rank that has the least left for KV. All in bytes."""

    memory: int
    utilization: float
    parts: Parts
    activations: int
    groups: tuple[kv.Group, ...]  # of its layers, for blocks of `block_tokens`
    block_tokens: int
    cp: int = 1
    allocator: str = "pages"

    @cached_property
    def weights(self) -> int:
        return total_bytes(self.parts)

    @cached_property
    def pool(self) -> int:
        """May be below 0."""
        return pool_bytes(self.memory, self.utilization, self.weights, self.activations)

    @property
    def workspace(self) -> int:
        return self.memory - int(self.memory * self.utilization)

    @cached_property
    def pool_tokens(self) -> int:
        """That a group of `cp` ranks holds: blocks · tokens of a block."""
        block = sum(group.num_layers * group.block_bytes for group in self.groups)
        return max(0, self.pool) // block * self.block_tokens * self.cp

    def sequence_bytes(self, num_tokens: int) -> int:
        """What a sequence of so many tokens takes of this rank's pool."""
        mine = -(-num_tokens // self.cp)
        return kv.num_bytes(self.groups, mine, block_tokens=self.block_tokens, allocator=self.allocator)

    def num_sequences(self, num_tokens: int) -> int:
        """That fit at once, each with so many tokens."""
        return max(0, self.pool) // self.sequence_bytes(num_tokens)

    def max_context(self, most: int) -> int:
        """The longest sequence that the pool holds."""
        return min(
            most,
            self.cp
            * kv.capacity(self.groups, max(0, self.pool), block_tokens=self.block_tokens, allocator=self.allocator),
        )


def rank_memory(
    model: Model,
    precision: Precision,
    kv_dtype: str,
    batch: Batch,
    memory_bytes: int,
    *,
    utilization: float = 0.9,
    tp: int = 1,
    cp: int = 1,
    stages: tuple[range, ...] | None = None,
    allocator: str = "pages",
) -> RankMemory:
    """Of the stage whose pool holds the fewest tokens."""
    found = [
        RankMemory(
            memory=memory_bytes,
            utilization=utilization,
            parts=weights.parts(model, precision, tp=tp, cp=cp, layers=layers),
            activations=activation_bytes(model, precision.item_bytes, batch, tp=tp, cp=cp),
            groups=kv.groups(model, kv_dtype, tp=tp, layers=layers, block_tokens=batch.block_tokens),
            block_tokens=batch.block_tokens,
            cp=cp,
            allocator=allocator,
        )
        for layers in stages or (range(model.num_layers),)
    ]
    return min(found, key=lambda each: (each.pool_tokens, each.pool))


# -- the host tier -----------------------------------------------------------------------------------------------------


def host_tier_bytes(
    model: Model,
    kv_dtype: str,
    batch: Batch,
    num_sequences: int,
    num_tokens: int,
    *,
    tp: int = 1,
    allocator: str = "pages",
) -> int:
    """Main memory that parks so many running sequences of a replica at once: the most that preemption can ask for. Of
    all its ranks together: what several tensor-parallel ranks have alike is parked by each."""
    groups = kv.groups(model, kv_dtype, tp=tp, block_tokens=batch.block_tokens)
    one = kv.num_bytes(groups, num_tokens, block_tokens=batch.block_tokens, allocator=allocator)
    return tp * num_sequences * one


def pinned_bytes(num_bytes: int) -> int:
    """What a pinned buffer of a CUDA process really takes: torch rounds it up to a power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0
