"""What speaks against sending a request to a replica: one function each, low is good.

To add one, write it here, put it into `route.SCORES`, and give it a row in the table test.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.stepcost import attended_tokens
from shoal.fleet.view import ReplicaView

CHUNK_TOKENS = 512  # of prompts in one step, about
FIRST_TOKENS = 32  # of the answer, whose time counts: a replica full of decodes begins at once and goes on slowly


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """What the router knows of the request that it places."""

    avoid: frozenset[str] = frozenset()  # replicas that failed this request before: the last resort
    keys: tuple[bytes, ...] = ()  # of the prompt's full blocks; none: what is cached is of no use to it
    block_tokens: int = 1
    prompt_tokens: int = 0

    def tokens_of(self, num_blocks: int) -> int:
        """Tokens that need not be computed where so many leading blocks are held. One always is: it tells the next."""
        most = max(self.prompt_tokens - 1, 0) // self.block_tokens
        return min(num_blocks, most) * self.block_tokens


def failed_before(errand: Errand, replica: ReplicaView, cached_tokens: int) -> int:
    return int(replica.name in errand.avoid)


def suspect(errand: Errand, replica: ReplicaView, cached_tokens: int) -> int:
    """Not a filter: where all are suspect, the fault is more likely ours, and refusing everything helps nobody."""
    return int(replica.suspect)


def expected_ns(errand: Errand, replica: ReplicaView, cached_tokens: int) -> int:
    """Predicted time until the answer's first tokens are there.

        what is computed first    tokens of those that wait, and of the prompt what is not cached
        what each step takes      for those that are there, in each of the steps that this needs
        and then                  FIRST_TOKENS steps more, with this request among them

    By the replica's own coefficients (core.stepcost), with a prompt's chunk in each step.
    """
    per_step, per_new, per_attended, per_sequence, per_context = replica.costs
    new = errand.prompt_tokens - cached_tokens
    ahead = replica.waiting_tokens + replica.unreported_new_tokens
    others = per_sequence * load(errand, replica, cached_tokens)
    others += per_context * (replica.context_tokens + replica.waiting_tokens + replica.unreported_tokens)
    num_steps = -(-(ahead + new) // CHUNK_TOKENS)
    prompts = per_new * (ahead + new) + per_attended * attended_tokens(cached_tokens, new)
    own = per_sequence + per_context * errand.prompt_tokens
    return int(prompts + num_steps * (per_step + others) + FIRST_TOKENS * (per_step + others + own))


def recompute_ns(costs: tuple[float, ...], start: int, count: int) -> int:
    """Predicted time to compute so many tokens of a prompt from position `start` on, in chunks of steps that do nothing
    else."""
    per_step, per_new, per_attended, _, _ = costs
    return int(per_new * count + per_attended * attended_tokens(start, count) + per_step * -(-count // CHUNK_TOKENS))


def load(errand: Errand, replica: ReplicaView, cached_tokens: int) -> int:
    return replica.num_running + replica.num_waiting + replica.num_unreported
