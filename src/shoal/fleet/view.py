"""What is known of one replica at the moment of a routing decision."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shoal.core.stepcost import DEFAULT_COEFFICIENTS


class ReplicaRole(StrEnum):
    """What a replica is meant for. A preference of the router's: each of them can do everything."""

    BOTH = "both"
    PREFILL = "prefill"  # computes prompts; others decode
    DECODE = "decode"  # goes on with what others have computed


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """Numbers of requests are counts of choices (core requests), not of client requests.

    "Unreported" is what this gateway has sent too recently to be in the replica's own numbers.
    """

    name: str
    ready: bool  # connected, and says that it can take work
    suspect: bool = False  # not heard from, or makes no steps, for longer than it announced
    num_running: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0  # still to compute before those that wait sample
    context_tokens: int = 0  # that those that run look at in a step
    num_unreported: int = 0
    unreported_tokens: int = 0  # of their prompts
    unreported_new_tokens: int = 0  # those of them that will have to be computed, as the directory says
    costs: tuple[float, ...] = DEFAULT_COEFFICIENTS  # core.stepcost: as it said last
    role: ReplicaRole = ReplicaRole.BOTH
    kv_root: bytes = b""  # of the keys of its blocks, where it lends them to others; empty: it does not
    fetch_token_ns: float = 0.0  # believed time to bring a token's KV from another replica; 0: it brings none
