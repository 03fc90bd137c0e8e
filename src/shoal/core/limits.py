"""What one replica's scheduler must keep to. Sizes that the runner measured at start-up are arguments here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Policy = Literal["continuous", "static"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    num_blocks: int  # KV blocks in the pool
    max_model_len: int  # tokens; prompt + max_tokens of a request
    vocab_size: int
    block_tokens: int = 16
    max_num_seqs: int = 64  # most requests in a step
    max_num_batched_tokens: int = 2048  # most tokens in a step
    max_prefill_chunk: int = 1536  # most tokens of one request in a step; 0: no cap
    max_queue: int = 1024  # most requests that wait
    max_step_ns: int = 500_000_000  # no step is planned longer, unless one token alone takes that long
    prefix_caching: bool = True
    max_steps_in_flight: int = 1  # plans made before the first result returns
    batching: Policy = "continuous"  # static: a baseline to compare with

    def __post_init__(self) -> None:
        for name in ("num_blocks", "max_model_len", "vocab_size", "block_tokens", "max_num_seqs"):
            self._at_least(name, 1)
        for name in ("max_num_batched_tokens", "max_queue", "max_step_ns", "max_steps_in_flight"):
            self._at_least(name, 1)
        self._at_least("max_prefill_chunk", 0)
        if self.batching not in get_args(Policy):
            raise ValueError(f"batching is {self.batching!r}; allowed: {', '.join(get_args(Policy))}")

    def _at_least(self, name: str, bound: int) -> None:
        value = getattr(self, name)
        if value < bound:
            raise ValueError(f"{name} is {value}; it must be at least {bound}")
