"""Accept or refuse: the reasons why a request can never run here, then the one why it cannot wait here now.

What is refused is refused at once, with a message that names the field, its value and the limit. "Never" and "not now"
are told apart: a request that could not run even alone must not wait at the head of the line.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.core.limits import Limits
from shoal.core.plan import Refused
from shoal.core.progress import positions
from shoal.core.request import Refusal, RequestSpec


def refuse(
    spec: RequestSpec, limits: Limits, *, known_id: bool, known_leader: bool, num_waiting: int
) -> Refused | None:
    """None: nothing speaks against it but, perhaps, the waiting bounds (bound.py). `known_leader` says whether
    `spec.leader`, where given, is here; `num_waiting` counts its class."""
    for reason, message in _objections(spec, limits, known_id, known_leader, num_waiting):
        return Refused(spec.id, reason, message)
    return None


def _objections(
    spec: RequestSpec, limits: Limits, known_id: bool, known_leader: bool, num_waiting: int
) -> Iterator[tuple[Refusal, str]]:
    if known_id:
        yield Refusal.DUPLICATE_ID, f"id {spec.id!r} is in use"
    if not spec.prompt:
        yield Refusal.EMPTY_PROMPT, "prompt has 0 tokens; it must have at least 1"
    for name, tokens in (
        ("prompt", spec.prompt),
        ("output", spec.output),
        ("stop_token_ids", spec.stop_token_ids),
        ("logit_bias", tuple([token for token, _ in spec.sampling.logit_bias])),
    ):
        if tokens and not (min(tokens) >= 0 and max(tokens) < limits.vocab_size):
            token, place = next((t, i) for i, t in enumerate(tokens) if not 0 <= t < limits.vocab_size)
            yield (
                Refusal.TOKEN_OUT_OF_RANGE,
                f"{name}[{place}] is {token}; token ids are 0 to {limits.vocab_size - 1}",
            )
    if spec.max_tokens < 0:
        yield Refusal.CONTEXT_LENGTH, f"max_tokens is {spec.max_tokens}; it must be at least 0"
    length = len(spec.prompt) + max(spec.max_tokens, len(spec.output))
    if length > limits.max_model_len:
        yield (
            Refusal.CONTEXT_LENGTH,
            f"prompt has {len(spec.prompt)} tokens and max_tokens is {spec.max_tokens}: together {length}, "
            f"the context length is {limits.max_model_len}",
        )
    num_blocks = -(-positions(spec) // limits.block_tokens)
    if num_blocks > limits.num_blocks:
        yield (
            Refusal.KV_POOL,
            f"prompt has {len(spec.prompt)} tokens and max_tokens is {spec.max_tokens}: they need {num_blocks} "
            f"KV blocks of {limits.block_tokens} tokens, the pool has {limits.num_blocks}",
        )
    if not known_leader:
        yield Refusal.UNKNOWN_LEADER, f"leader {spec.leader!r} is not here"
    name = spec.service_class
    if name not in limits.classes:
        yield Refusal.UNKNOWN_CLASS, f"service_class is {name!r}; there are {', '.join(sorted(limits.classes))}"
    elif num_waiting >= limits.classes[name].max_queue and not spec.output:  # else its client has half an answer
        yield (
            Refusal.QUEUE_FULL,
            f"{num_waiting} requests of class {name} wait; the limit is {limits.classes[name].max_queue}",
        )
