"""What is asked of a replica, why it is refused, and how it can end: the data that others see."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from shoal.core.classes import STANDARD


class Finish(StrEnum):
    """How a request ended. Every accepted request ends with exactly one."""

    STOP = "stop"  # a stop token was sampled
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"  # the caller took it back
    ERROR = "error"  # the replica could not go on


class Refusal(StrEnum):
    """Why a request was not accepted."""

    EMPTY_PROMPT = "empty_prompt"
    TOKEN_OUT_OF_RANGE = "token_out_of_range"
    CONTEXT_LENGTH = "context_length_exceeded"  # prompt + max_tokens > max_model_len
    KV_POOL = "kv_pool_exceeded"  # would never fit, even alone
    UNKNOWN_CLASS = "unknown_class"
    QUEUE_FULL = "queue_full"
    WAITING_BOUND = "waiting_bound"  # a promise made to someone could not be kept any more
    DUPLICATE_ID = "duplicate_id"
    UNKNOWN_LEADER = "unknown_leader"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What the sampler needs to pick a token. Neutral values switch a filter off."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    seed: int = 0  # 64 bits; given by the client or drawn once at the gateway
    logprobs: int | None = None  # alternatives beside each sampled token; None: no logprobs at all
    prompt_logprobs: int | None = None  # the same for prompt tokens 1..; such a request takes no prefix hit


class Peer(NamedTuple):
    """Another engine that is believed to hold the beginning of a prompt."""

    address: str  # where it lends blocks
    incarnation: str
    num_blocks: int  # leading ones


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One choice of one client request: everything a replica needs, nothing it must ask back for.

    A replay is the same spec with `output` filled: tokens the client already has.
    """

    id: str  # unique in the fleet; the choices of one client request have different ids
    prompt: tuple[int, ...]
    max_tokens: int  # counts `output`; 0: only compute the prompt
    output: tuple[int, ...] = ()
    min_tokens: int = 0  # stop tokens cannot be sampled before
    stop_token_ids: tuple[int, ...] = ()  # end of sequence included, unless the caller ignores it
    sampling: Sampling = Sampling()
    choice: int = 0
    leader: str | None = None  # id of the choice whose prompt blocks this one waits for and shares
    service_class: str = STANDARD
    priority: int = 0  # within its class: lower is more urgent
    ttft_ms: float = 0.0  # looser target than the class's; 0: the class's
    tpot_ms: float = 0.0
    waited_ns: int = 0  # without a slice since it was admitted or last served, before it came here
    tenant: str = ""
    salt: str = ""  # separates prefix caches; from the authenticated tenant, never from a body; "" is no salt
    prefix_keys: tuple[bytes, ...] = ()  # chained keys of the prompt's full blocks, where the gateway made them
    peer: Peer | None = None  # holds more of the prompt than the replica that is asked, as far as the gateway knows
    prefetch: bool = False  # only bring what the peer holds of the prompt: nothing is computed, nothing waits for it
