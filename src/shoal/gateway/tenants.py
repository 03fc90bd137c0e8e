"""What each tenant uses of this gateway, within its limits: requests at once, requests that wait, tokens a minute.

Time is an argument, in monotonic seconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shoal.gateway.errors import ApiError, Reason

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")
MINUTE_S = 60.0
_ROUNDING_S = 1e-6  # who comes back when told must not fail by the last bit
_SWEEP = 1024  # tenants with books, at least, before those that use nothing are looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """None: no limit."""

    max_in_flight: int | None = None  # requests at once
    max_queued: int | None = None  # those of them that no replica has begun
    tokens_per_minute: int | None = None  # prompts and most output tokens of what is admitted


@dataclass(slots=True)
class _Usage:
    in_flight: int = 0
    queued: int = 0
    paid_s: float = 0.0  # when the tokens that were admitted are paid for, at the rate of the limit

    def idle(self, now_s: float) -> bool:
        return not self.in_flight and self.paid_s <= now_s


class Hold:
    """What one request holds of its tenant's limits. `release` must follow, whatever becomes of the request."""

    def __init__(self, usage: _Usage, limits: TenantLimits) -> None:
        self._usage = usage
        self._limits = limits
        self._queued = self._open = True
        self._cost_s = 0.0
        usage.in_flight += 1
        usage.queued += 1

    def charge(self, num_tokens: int, now_s: float) -> None:
        """Raises ApiError where the tenant has had its tokens.

        A bucket that holds a minute's tokens and fills evenly. A request larger than the whole bucket needs a full one
        and leaves it in debt: it comes through, and what is admitted in the long run is the same.
        """
        rate = self._limits.tokens_per_minute
        if rate is None:
            return
        cost_s = num_tokens * MINUTE_S / rate
        missing_s = min(cost_s, MINUTE_S) - (MINUTE_S - max(0.0, self._usage.paid_s - now_s))
        if missing_s > _ROUNDING_S:
            raise ApiError(
                Reason.TENANT_TOKENS,
                f"the request may take {num_tokens} tokens (prompt and max_tokens); the limit is {rate} a minute",
                retry_after_s=missing_s,
            )
        self._cost_s += cost_s
        self._usage.paid_s = max(self._usage.paid_s, now_s) + cost_s

    def started(self) -> None:
        """A replica has begun: the request waits no more."""
        if self._queued:
            self._queued = False
            self._usage.queued -= 1

    def release(self, *, turned_away: bool) -> None:
        """Once only counts. `turned_away`: nothing was done for the request, so its tokens go back."""
        if not self._open:
            return
        self._open = False
        self.started()
        self._usage.in_flight -= 1
        if turned_away:
            self._usage.paid_s -= self._cost_s


class Tenants:
    """The books of all tenants. Those that use nothing are forgotten now and then."""

    def __init__(self) -> None:
        self._usage: dict[str, _Usage] = {}
        self._sweep_at = _SWEEP

    def enter(self, tenant: str, limits: TenantLimits, now_s: float) -> Hold:
        """One more request of the tenant. Raises ApiError where it has as many as it may have."""
        usage = self._usage.get(tenant)
        if usage is None:
            self._sweep(now_s)
            usage = self._usage[tenant] = _Usage()
        if limits.max_in_flight is not None and usage.in_flight >= limits.max_in_flight:
            raise ApiError(
                Reason.TENANT_REQUESTS,
                f"{usage.in_flight} of your requests are under way; the limit is {limits.max_in_flight}",
            )
        if limits.max_queued is not None and usage.queued >= limits.max_queued:
            raise ApiError(
                Reason.TENANT_QUEUE, f"{usage.queued} of your requests wait; the limit is {limits.max_queued}"
            )
        return Hold(usage, limits)

    def in_flight(self) -> dict[str, int]:
        """Requests at present, by tenant."""
        return {tenant: usage.in_flight for tenant, usage in self._usage.items() if usage.in_flight}

    def _sweep(self, now_s: float) -> None:
        if len(self._usage) < self._sweep_at:
            return
        self._usage = {tenant: usage for tenant, usage in self._usage.items() if not usage.idle(now_s)}
        self._sweep_at = max(_SWEEP, 2 * len(self._usage))
