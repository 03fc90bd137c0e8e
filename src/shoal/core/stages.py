"""Steps of a pipeline: while one rank computes the layers of one step, the next rank computes the layers behind them of
the step before. So several steps are in flight, and each leaves work to the others.

A request whose token is not there yet is in one step only: the first rank would have to wait for the last one's token.
So those that decode are spread over the steps in flight, and prompts are cut into more pieces than there are stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.core.compose import Candidate
from shoal.core.limits import Limits
from shoal.core.progress import Request
from shoal.core.stepcost import StepCost

PIECES = 2  # of what prompts lack, for each stage: as one is left, the others are full
LEAST_SHARE = 2.0  # a piece's tokens take at least so many times as long as a step without any ...
LEAST_TOKENS = 16  # ... and are so many


def resolved(running: Iterable[Request]) -> list[Request]:
    """Those that wait for no token of a step in flight."""
    return [request for request in running if not request.placeholders]


def share(decodes: list[Request], running: Iterable[Request], limits: Limits) -> tuple[list[Request], list[Request]]:
    """Of those that could get a token now, as many as leave the other steps in flight as many, and the others, who get
    theirs in the next steps: who was served first comes first."""
    num_unresolved = sum([1 for request in running if request.placeholders])
    most = -(-(len(decodes) + num_unresolved) // limits.max_steps_in_flight)
    if len(decodes) <= most:
        return decodes, []
    decodes = sorted(decodes, key=lambda each: each.served_ns)  # stable: equal ones in the order of `running`
    return decodes[:most], decodes[most:]


def piece_tokens(candidates: Sequence[Candidate], limits: Limits, cost: StepCost) -> int:
    """Most tokens of chunks in a step."""
    base_ns, token_ns = cost.predict((1, 0, 0, 0, 0)), cost.predict((0, 1, 0, 0, 0))
    least = int(LEAST_SHARE * base_ns / token_ns) if token_ns else 0
    lacking = sum([each.need for each in candidates])
    return max(LEAST_TOKENS, least, -(-lacking // (PIECES * limits.num_stages)))
