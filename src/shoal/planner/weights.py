"""Weights by part: of the whole model, and of one rank where tensor and pipeline parallelism split them.

Each tensor of the model is listed once with how it is split; parameters, bytes and what a token computes all follow
from that list. Matrices are [outputs, inputs].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shoal.planner.model import DTYPE_BYTES, Model, Quantization

PARTS = ("embedding", "attention", "mlp", "experts", "norms", "logits")


class Tensor(NamedTuple):
    part: str
    rows: int
    columns: int = 1
    split: str = (
        "none"  # over tensor-parallel ranks: "rows", "columns", "kv": rows of KV heads, or "none": each has all
    )
    copies: int = 1  # experts
    used: int = 1  # of the copies, by one token
    plain: bool = False  # never quantized
    item_bytes: int = 0  # 0: the model's


@dataclass(frozen=True, slots=True)
class Precision:
    """In what the model is stored and computed."""

    dtype: str
    quantization: Quantization | None = None

    @property
    def item_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Part:
    parameters: int
    num_bytes: int


Parts = dict[str, Part]


def parts(
    model: Model, precision: Precision, *, tp: int = 1, cp: int = 1, layers: range | None = None, draft: bool = False
) -> Parts:
    """Of one rank: its share of the tensors of `layers` (all where None), of the embedding with the first layer, of the
    output matrix with the last. `draft`: with the modules that predict further tokens, as the checkpoint has them."""
    totals = {part: [0, 0.0] for part in PARTS}
    for tensor in tensors(model, layers, draft=draft):
        rows, columns = shard(tensor, model, tp, cp)
        totals[tensor.part][0] += tensor.copies * rows * columns
        totals[tensor.part][1] += tensor.copies * _num_bytes(tensor, rows, columns, precision)
    return {part: Part(int(parameters), int(num_bytes)) for part, (parameters, num_bytes) in totals.items()}


def total_bytes(found: Parts) -> int:
    return sum(part.num_bytes for part in found.values())


def parameters(model: Model) -> int:
    """Of the whole model, without modules that predict further tokens."""
    return sum(tensor.copies * tensor.rows * tensor.columns for tensor in tensors(model))


class Read:
    """What a step reads of one rank's weights: all but the embedding, of which rows are looked up; of the experts those
    that any token takes, if each takes its own by chance: n (1 - (1 - k/n)^tokens) of n."""

    def __init__(
        self, model: Model, precision: Precision, *, tp: int = 1, cp: int = 1, layers: range | None = None
    ) -> None:
        self._always = 0.0
        self._experts: dict[float, float] = {}  # bytes by the share of the copies that one token uses
        for tensor in tensors(model, layers):
            if tensor.part != "embedding":
                num_bytes = tensor.copies * _num_bytes(tensor, *shard(tensor, model, tp, cp), precision)
                share = tensor.used / tensor.copies
                if share < 1:
                    self._experts[share] = self._experts.get(share, 0.0) + num_bytes
                else:
                    self._always += num_bytes
        if model.tied and _has_last(model, layers):
            self._always += _num_bytes(_output(model), *shard(_output(model), model, tp, cp), precision)

    def num_bytes(self, num_tokens: int) -> float:
        touched = sum(num_bytes * (1.0 - (1.0 - share) ** num_tokens) for share, num_bytes in self._experts.items())
        return self._always + touched


def token_flops(model: Model, *, tp: int = 1, cp: int = 1, layers: range | None = None) -> int:
    """Multiplications and additions of one token in one rank's layers; not the output matrix, not attention itself."""
    flops = 0
    for tensor in tensors(model, layers):
        if tensor.columns > 1 and tensor.part not in ("embedding", "logits"):
            rows, columns = shard(tensor, model, tp, cp)
            flops += 2 * rows * columns * tensor.used
    return flops


def logit_flops(model: Model, *, ranks: int = 1, layers: range | None = None) -> int:
    """Of one row that is sampled, where so many ranks share the vocabulary; 0 on one that lacks the last layer."""
    return 2 * -(-model.vocab_size // ranks) * model.hidden_size if _has_last(model, layers) else 0


def shard(tensor: Tensor, model: Model, tp: int, cp: int = 1) -> tuple[int, int]:
    """Rows and columns of the rank that has the most. Where KV heads are fewer than ranks, each has a whole one. Ranks
    that share contexts compute the same queries, keys and values, and share what is behind the attention."""
    rows = tp if tensor.part == "attention" else tp * cp
    if tensor.split == "rows":
        return -(-tensor.rows // rows), tensor.columns
    if tensor.split == "columns":
        return tensor.rows, -(-tensor.columns // (tp * cp))
    if tensor.split == "kv":
        return tensor.rows // model.num_kv_heads * kv_heads(model, tp), tensor.columns
    return tensor.rows, tensor.columns


def kv_heads(model: Model, tp: int) -> int:
    """KV heads of one rank: split, or replicated where there are fewer than ranks."""
    return max(1, model.num_kv_heads // tp)


# -- the list ----------------------------------------------------------------------------------------------------------


def tensors(model: Model, layers: range | None = None, *, draft: bool = False) -> Iterator[Tensor]:
    layers = range(model.num_layers) if layers is None else layers
    if 0 in layers:
        yield _embedding(model)
    for layer in layers:
        yield from layer_tensors(model, layer)
    if _has_last(model, layers):
        yield Tensor("norms", model.hidden_size, plain=True)
        if not model.tied:
            yield _output(model)
    if draft:
        for _ in range(model.draft_layers):
            yield from _draft_module(model)


def _has_last(model: Model, layers: range | None) -> bool:
    return layers is None or model.num_layers - 1 in layers


def _embedding(model: Model) -> Tensor:
    return Tensor("embedding", model.vocab_size, model.hidden_size, "rows")


def _output(model: Model) -> Tensor:
    return Tensor("logits", model.vocab_size, model.hidden_size, "rows")


def layer_tensors(model: Model, layer: int) -> Iterator[Tensor]:
    yield from _latent_attention(model) if model.latent is not None else _attention(model)
    yield from _experts(model) if model.sparse(layer) else _mlp(model, model.intermediate_size, "mlp")
    for _ in range(model.norms_per_layer):
        yield Tensor("norms", model.hidden_size, plain=True)


def _attention(model: Model) -> Iterator[Tensor]:
    hidden, heads, keys = model.hidden_size, model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    yield Tensor("attention", heads, hidden, "rows")
    yield Tensor("attention", keys, hidden, "kv")
    yield Tensor("attention", keys, hidden, "kv")
    yield Tensor("attention", hidden, heads, "columns")
    if model.qkv_bias:
        yield Tensor("attention", heads, split="rows", plain=True)
        yield Tensor("attention", keys, split="kv", plain=True)
        yield Tensor("attention", keys, split="kv", plain=True)
    if model.output_bias:
        yield Tensor("attention", hidden, plain=True)
    if model.qk_norm:
        yield Tensor("norms", 2 * model.head_dim, plain=True)


def _latent_attention(model: Model) -> Iterator[Tensor]:
    """What makes the latent vectors is on every rank whole, the heads are split."""
    latent, hidden = model.latent, model.hidden_size
    assert latent is not None
    queries = model.num_heads * (latent.nope_dim + latent.rope_dim)
    if latent.q_rank:
        yield Tensor("attention", latent.q_rank, hidden)
        yield Tensor("norms", latent.q_rank, plain=True)
        yield Tensor("attention", queries, latent.q_rank, "rows")
    else:
        yield Tensor("attention", queries, hidden, "rows")
    yield Tensor("attention", latent.kv_rank + latent.rope_dim, hidden)
    yield Tensor("norms", latent.kv_rank, plain=True)
    yield Tensor("attention", model.num_heads * (latent.nope_dim + latent.v_dim), latent.kv_rank, "rows")
    yield Tensor("attention", hidden, model.num_heads * latent.v_dim, "columns")


def _mlp(model: Model, inner: int, part: str, copies: int = 1, used: int = 1) -> Iterator[Tensor]:
    hidden = model.hidden_size
    for _ in range(2):  # gate, up
        yield Tensor(part, inner, hidden, "rows", copies, used)
    yield Tensor(part, hidden, inner, "columns", copies, used)
    if model.mlp_bias and part == "mlp":
        yield Tensor(part, 2 * inner, split="rows", plain=True)
        yield Tensor(part, hidden, plain=True)


def _experts(model: Model) -> Iterator[Tensor]:
    experts = model.experts
    assert experts is not None
    yield Tensor("experts", experts.count, model.hidden_size, plain=True)  # the router
    if experts.router_bias:
        yield Tensor("experts", experts.count, plain=True, item_bytes=4)
    yield from _mlp(model, experts.inner, "experts", experts.count, experts.per_token)
    if experts.shared_inner:
        yield from _mlp(model, experts.shared_inner, "experts")


def _draft_module(model: Model) -> Iterator[Tensor]:
    """DeepSeek-V3, section 2.2: a layer behind a projection of two states, with embedding and output once more."""
    hidden = model.hidden_size
    yield _embedding(model)
    yield from layer_tensors(model, model.num_layers)
    for _ in range(3):  # of the embedding, of the hidden state, before the output
        yield Tensor("norms", hidden, plain=True)
    yield Tensor("mlp", hidden, 2 * hidden, plain=True)
    yield _output(model)


def _num_bytes(tensor: Tensor, rows: int, columns: int, precision: Precision) -> float:
    quantization = precision.quantization
    quantized = quantization is not None and tensor.columns > 1 and not tensor.plain
    if quantized and tensor.part in ("embedding", "logits"):
        assert quantization is not None
        quantized = quantization.everywhere
    if quantized:
        assert quantization is not None
        return quantization.num_bytes(rows, columns)
    return rows * columns * (tensor.item_bytes or precision.item_bytes)


def bytes_by_dtype(found: Iterable[Tensor], quantization: Quantization | None) -> dict[str, int]:
    """Numbers of a checkpoint in its matrices' format, in 16 bits and in float32, as model hubs count them."""
    counts = {"quantized": 0, "16 bits": 0, "float32": 0}
    for tensor in found:
        numbers = tensor.copies * tensor.rows * tensor.columns
        whole = tensor.part in ("embedding", "logits")
        if quantization is not None and tensor.columns > 1 and not tensor.plain and not whole:
            counts["quantized"] += numbers
            scales = quantization.num_bytes(tensor.rows, tensor.columns) - tensor.rows * tensor.columns
            counts["float32"] += tensor.copies * int(scales) // 4
        else:
            counts["float32" if tensor.item_bytes == 4 else "16 bits"] += numbers
    return counts
