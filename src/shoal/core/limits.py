"""What one replica's scheduler must keep to. Sizes that the runner measured at start-up are arguments here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from shoal.core.classes import DEFAULT_CLASSES, STANDARD, ServiceClass

MIN_WAIT_TURNS = 8  # a waiting bound shorter than so many turns cannot be promised (bound.py)

Composer = Literal["value", "fcfs", "static"]
Preemption = Literal["auto", "swap", "recompute"]
Eviction = Literal["lookahead", "lru", "s3fifo"]  # kv/evict.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    num_blocks: int  # KV blocks in the pool
    max_model_len: int  # tokens; prompt + max_tokens of a request
    vocab_size: int
    block_tokens: int = 16
    max_num_seqs: int = 64  # most requests in a step
    max_num_batched_tokens: int = 2048  # most tokens in a step
    max_prefill_chunk: int = 1536  # most tokens of one request in a step; 0: no cap
    max_step_ns: int = 500_000_000  # no step is planned longer, unless one token alone takes that long
    prefix_caching: bool = True
    eviction: Eviction = "lookahead"  # which cached block goes first
    max_steps_in_flight: int = 1  # plans made before the first result returns
    num_stages: int = 1  # of the pipeline of ranks that computes a step (stages.py)
    composer: Composer = "value"  # the others are baselines to compare with
    classes: dict[str, ServiceClass] = field(default_factory=lambda: dict(DEFAULT_CLASSES))
    preemption: Preemption = "auto"  # swap, where the host tier has room, or recompute; auto: what is sooner back
    num_host_blocks: int = 0  # of the host tier, where requests are parked; 0: there is none
    block_bytes: int = 0  # of one KV block over all layers
    copy_bytes_per_s: float = 2e9  # between device and host, before anything was measured
    disk_bytes_per_s: float = 0.0  # read from the disk tier, before anything was measured; 0: there is none
    fetch_bytes_per_s: float = 0.0  # from another engine, before anything was measured; 0: nothing is fetched
    admission_share: float = 1.0  # of what waiting bounds allow; the rest is for requests of replicas that are lost

    def __post_init__(self) -> None:
        for name in ("num_blocks", "max_model_len", "vocab_size", "block_tokens", "max_num_seqs"):
            self._at_least(name, 1)
        for name in ("max_num_batched_tokens", "max_step_ns"):
            self._at_least(name, 1)
        for name in ("max_prefill_chunk", "num_host_blocks", "block_bytes"):
            self._at_least(name, 0)
        self._at_least("num_stages", 1)
        self._at_least("max_steps_in_flight", self.num_stages)
        if self.disk_bytes_per_s and not self.num_host_blocks:
            raise ValueError(f"disk_bytes_per_s is {self.disk_bytes_per_s:g}; it needs a host tier to read into")
        self._check_classes()
        for name, kind in (("composer", Composer), ("preemption", Preemption), ("eviction", Eviction)):
            allowed = get_args(kind)
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(allowed)}")

    @property
    def max_running(self) -> int:
        """Requests in the batch: each of them gets its token in every step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def turn_ns(self) -> int:
        """Longest time from the moment a request must be served to the plan that can do it: steps in flight return."""
        return (self.max_steps_in_flight + 1) * self.max_step_ns

    def _check_classes(self) -> None:
        if STANDARD not in self.classes:
            raise ValueError(f"classes are {', '.join(self.classes) or 'none'}; {STANDARD!r} must be among them")
        least_s = MIN_WAIT_TURNS * self.turn_ns / 1e9
        for name, service in self.classes.items():
            if self.composer == "value" and service.max_wait_s < least_s:
                raise ValueError(
                    f"classes.{name}.max_wait_s is {service.max_wait_s:g}; with steps of up to "
                    f"{self.max_step_ns / 1e6:g} ms it must be at least {least_s:g}"
                )

    def _at_least(self, name: str, bound: int) -> None:
        value = getattr(self, name)
        if value < bound:
            raise ValueError(f"{name} is {value}; it must be at least {bound}")
