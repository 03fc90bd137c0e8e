"""The waiting bound: no admitted request waits longer for its next slice than its class says.

A request whose wait has lasted half of its bound W *presses*: from then on it goes before all that do not press,
earliest end of its bound first, and whoever is in its way is preempted. What must be shown is that all that press can
be served within the other half, and that is what admission sees to.

    turn D    = (steps in flight + 1) · max_step: within D of pressing, a plan can serve the request
    size s    = 1 / slots + its blocks / pool + its time in a step / max_step, at its longest
    condition   sum over admitted requests of 4 · s · D / W  +  4 · D / (least W)  <=  1

Requests that press are packed into plans in order until one does not fit: two plans in a row then hold more than a size
of 1, so each needs 2 · s · D of a processor's time at most. A request presses again W / 2 after it was served at the
earliest: a sporadic task with period and deadline W / 2 under non-preemptive earliest-deadline-first, which meets its
deadlines while the sum of time by period, and one turn that blocks, stay within 1 (Jeffay et al., RTSS 1991). The
assumptions and the proof at length: docs/decisions/0010.
"""

from __future__ import annotations

from shoal.core.limits import Limits
from shoal.core.progress import Request
from shoal.core.stepcost import StepCost

WHOLE = 10**9  # shares are counted in parts of this, so that what is given back is what was taken


class Promises:
    """How much of what the bounds allow is given away."""

    def __init__(self, limits: Limits, cost: StepCost) -> None:
        self._limits = limits
        self._cost = cost
        least_ns = min(service.max_wait_s for service in limits.classes.values()) * 1e9
        self._blocking = int(4 * WHOLE * limits.turn_ns / least_ns)
        self.given = 0

    def demand(self, request: Request) -> int:
        """The share that its bound takes, at its longest."""
        limits, final = self._limits, request.final
        in_a_step = self._cost.predict((0, 1, final, 1, final)) / limits.max_step_ns
        blocks = -(-final // limits.block_tokens) / limits.num_blocks
        size = min(1.0, 1 / limits.max_running + blocks + in_a_step)
        return int(4 * WHOLE * size * limits.turn_ns / request.max_wait_ns) + 1

    def allow(self, request: Request) -> bool:
        """Whether the request can be promised its bound. One that was admitted elsewhere may take what is kept back."""
        moved = bool(request.spec.output or request.spec.waited_ns)
        share = WHOLE if moved else int(WHOLE * self._limits.admission_share)
        return self._blocking + self.given + request.demand <= share

    def give(self, request: Request) -> None:
        self.given += request.demand

    def take_back(self, request: Request) -> None:
        self.given -= request.demand
