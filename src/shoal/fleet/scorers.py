"""What speaks against sending a request to a replica: one function each, low is good.

To add one, write it here, put it into `route.SCORES`, and give it a row in the table test.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.stepcost import attended_tokens
from shoal.fleet.view import ReplicaRole, ReplicaView

CHUNK_TOKENS = 512  # of prompts in one step, about
FIRST_TOKENS = 32  # of the answer, whose time counts: a replica full of decodes begins at once and goes on slowly


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """What the router knows of the request that it places."""

    avoid: frozenset[str] = frozenset()  # replicas that failed this request before: the last resort
    keys: tuple[bytes, ...] = ()  # of the prompt's full blocks; none: what is cached is of no use to it
    block_tokens: int = 1
    prompt_tokens: int = 0
    max_tokens: int = FIRST_TOKENS  # of the answer

    def tokens_of(self, num_blocks: int) -> int:
        """Tokens that need not be computed where so many leading blocks are held. One always is: it tells the next."""
        most = max(self.prompt_tokens - 1, 0) // self.block_tokens
        return min(num_blocks, most) * self.block_tokens


def failed_before(errand: Errand, replica: ReplicaView, cached_tokens: int) -> int:
    return int(replica.name in errand.avoid)


def suspect(errand: Errand, replica: ReplicaView, cached_tokens: int) -> int:
    """Not a filter: where all are suspect, the fault is more likely ours, and refusing everything helps nobody."""
    return int(replica.suspect)


def only_decodes(errand: Errand, replica: ReplicaView, cached_tokens: int) -> int:
    return int(replica.role is ReplicaRole.DECODE)


def expected_ns(errand: Errand, replica: ReplicaView, cached_tokens: int) -> int:
    """Predicted time until the answer's first tokens are there: FIRST_TOKENS steps after the first one."""
    prompt = prompt_ns(errand, replica, cached_tokens)
    return int(prompt + FIRST_TOKENS * (step_ns(replica) + own_ns(errand, replica)))


def prompt_ns(errand: Errand, replica: ReplicaView, cached_tokens: int) -> float:
    """Predicted time until the prompt is computed.

        what is computed first    tokens of those that wait, and of the prompt what is not cached
        what each step takes      for those that are there, in each of the steps that this needs

    By the replica's own coefficients (core.stepcost), with a prompt's chunk in each step.
    """
    ahead = replica.waiting_tokens + replica.unreported_new_tokens
    num_steps = -(-(ahead + errand.prompt_tokens - cached_tokens) // CHUNK_TOKENS)
    _, per_new, _, _, _ = replica.costs
    return per_new * ahead + chunks_ns(errand, replica, cached_tokens) + num_steps * step_ns(replica)


def chunks_ns(errand: Errand, replica: ReplicaView, cached_tokens: int) -> float:
    """What the prompt's own tokens add to the steps that compute them."""
    _, per_new, per_attended, _, _ = replica.costs
    new = errand.prompt_tokens - cached_tokens
    return per_new * new + per_attended * attended_tokens(cached_tokens, new)


def step_ns(replica: ReplicaView) -> float:
    """A step with a token for each of those that are there."""
    per_step, _, _, per_sequence, per_context = replica.costs
    others = per_sequence * (replica.num_running + replica.num_waiting + replica.num_unreported)
    return (
        per_step + others + per_context * (replica.context_tokens + replica.waiting_tokens + replica.unreported_tokens)
    )


def own_ns(errand: Errand, replica: ReplicaView) -> float:
    """What a token of the answer adds to a step."""
    _, _, _, per_sequence, per_context = replica.costs
    return per_sequence + per_context * errand.prompt_tokens


def recompute_ns(costs: tuple[float, ...], start: int, count: int) -> int:
    """Predicted time to compute so many tokens of a prompt from position `start` on, in chunks of steps that do nothing
    else."""
    per_step, per_new, per_attended, _, _ = costs
    return int(per_new * count + per_attended * attended_tokens(start, count) + per_step * -(-count // CHUNK_TOKENS))


def load(errand: Errand, replica: ReplicaView, cached_tokens: int) -> int:
    return replica.num_running + replica.num_waiting + replica.num_unreported
