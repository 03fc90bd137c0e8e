"""Keys and values: how many bytes a context takes on one rank, and the largest context that a memory holds.

Layers that store alike form a group. A group's cell is what one layer keeps of one token:

    plain    2 · KV heads of the rank · head size · bytes of a number    (a head that several ranks have counts on each)
    latent   (latent size + rotary size) · bytes of a number             (one vector for all heads, on each rank whole)

Engines allocate whole blocks. In a pool of pages every layer keeps every block, as shoal's engine does; where windows
have pools of their own, as vLLM has them, a layer with a window keeps no more than the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.planner.model import KV_BYTES, Model
from shoal.planner.weights import kv_heads

ALLOCATORS = ("pages", "windows")


class Group(NamedTuple):
    num_layers: int
    block_bytes: int  # of a block in one layer of one rank
    window: int = 0  # tokens; 0: all are kept


def layer_block_bytes(
    num_kv_heads: int, head_dim: int, item_bytes: int, block_tokens: int, scale_bytes: int = 0
) -> int:
    """A block in one layer. `scale_bytes`: of a head's keys in a block, and of its values, where they are quantized."""
    return 2 * num_kv_heads * (block_tokens * head_dim * item_bytes + scale_bytes)


def block_bytes(num_layers: int, num_kv_heads: int, head_dim: int, item_bytes: int, block_tokens: int) -> int:
    """A block over all layers of a rank: what the engine's pool is divided by."""
    return num_layers * layer_block_bytes(num_kv_heads, head_dim, item_bytes, block_tokens)


def groups(
    model: Model,
    kv_dtype: str,
    *,
    tp: int = 1,
    layers: range | None = None,
    block_tokens: int = 1,
    scale_bytes: int = 0,
) -> tuple[Group, ...]:
    """Of the layers that a rank has."""
    item_bytes = KV_BYTES[kv_dtype]
    if model.latent is not None:
        one = (model.latent.kv_rank + model.latent.rope_dim) * item_bytes * block_tokens
    else:
        one = layer_block_bytes(kv_heads(model, tp), model.head_dim, item_bytes, block_tokens, scale_bytes)
    windows = [model.windows[layer] for layer in (range(model.num_layers) if layers is None else layers)]
    return tuple(Group(windows.count(window), one, window) for window in sorted(set(windows)))


def token_bytes(found: Sequence[Group], block_tokens: int = 1) -> float:
    """Of one token in all layers, within every window."""
    return sum(group.num_layers * group.block_bytes for group in found) / block_tokens


def num_bytes(found: Sequence[Group], num_tokens: int, *, block_tokens: int = 1, allocator: str = "pages") -> int:
    """What a context of so many tokens takes. `found` must be of blocks of `block_tokens`."""
    total = 0
    for group in found:
        kept = min(num_tokens, group.window) if group.window and allocator == "windows" else num_tokens
        total += group.num_layers * group.block_bytes * -(-kept // block_tokens)
    return total


def capacity(
    found: Sequence[Group], room_bytes: int, *, block_tokens: int = 1, allocator: str = "pages", most: int = 1 << 40
) -> int:
    """The largest context, of at most `most` tokens, that fits: `num_bytes` inverted, nothing extrapolated."""

    def fits(num_tokens: int) -> bool:
        return num_bytes(found, num_tokens, block_tokens=block_tokens, allocator=allocator) <= room_bytes

    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def read_tokens(model: Model, layer: int, context: int) -> int:
    """Tokens whose keys and values a new token of that layer reads."""
    return min(context, model.windows[layer] or context)
