"""The terms on which a request is served: for whom, in which class, with which targets.

Classes are granted to keys. A request chooses among those of its key, by name (`x-shoal-class`) or by urgency (vLLM's
`priority`), and may ask for less than its class promises, never for more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.core.classes import STANDARD, ServiceClass
from shoal.core.request import Refusal
from shoal.gateway.auth import Grant, Headers, single
from shoal.gateway.errors import ApiError, Reason, invalid

CLASS_HEADER, TTFT_HEADER, TPOT_HEADER = "x-shoal-class", "x-slo-ttft-ms", "x-slo-tpot-ms"
_MILLISECONDS = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,6})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    tenant: str = ""  # also the salt of its prefix keys
    service_class: str = STANDARD
    ttft_ms: float = 0.0  # target: the class's, or a looser one; 0: none
    tpot_ms: float = 0.0

    def order(self, priority: int) -> int:
        """The place among the tenant's own requests of the class: lower comes first. A tenant from the key file may
        put its requests behind what is usual, not before it."""
        return max(priority, 0) if self.tenant else priority


def terms_of(headers: Headers, priority: int, grant: Grant, classes: Mapping[str, ServiceClass]) -> Terms:
    """Raises ApiError: 400 for what is unknown or no number, 403 for a class that the key was not granted."""
    named = single(headers, CLASS_HEADER.encode())
    if named is None:
        service_class = _by_urgency(priority, granted(grant, classes), classes)
    else:
        service_class = named.decode("latin-1")
        check_granted(service_class, grant, classes)
    promised = classes[service_class]
    return Terms(
        tenant=grant.tenant,
        service_class=service_class,
        ttft_ms=_loosened(promised.ttft_ms, headers, TTFT_HEADER),
        tpot_ms=_loosened(promised.tpot_ms, headers, TPOT_HEADER),
    )


def granted(grant: Grant, classes: Mapping[str, ServiceClass]) -> tuple[str, ...]:
    """The classes that a key may use; the first is its default."""
    return grant.classes or (STANDARD, *(name for name in classes if name != STANDARD))


def check_granted(name: str, grant: Grant, classes: Mapping[str, ServiceClass]) -> None:
    allowed = granted(grant, classes)
    if name not in classes:
        message = f"there is no class {name[:64]!r}; yours are {', '.join(allowed)}"
        raise ApiError(Refusal.UNKNOWN_CLASS, message, param=CLASS_HEADER)
    if name not in allowed:
        message = f"your key does not have the class {name!r}; it has {', '.join(allowed)}"
        raise ApiError(Reason.CLASS_NOT_GRANTED, message, param=CLASS_HEADER)


def _by_urgency(priority: int, allowed: tuple[str, ...], classes: Mapping[str, ServiceClass]) -> str:
    """vLLM's number: below 0 the most urgent class, above 0 the least urgent one. Of equals the one granted first."""
    if priority < 0:
        return min(allowed, key=lambda name: classes[name].rank)
    if priority > 0:
        return max(allowed, key=lambda name: classes[name].rank)
    return allowed[0]


def _loosened(promised_ms: float, headers: Headers, name: str) -> float:
    """What is asked for where that is more than promised. Where nothing is promised there is nothing to loosen."""
    asked = single(headers, name.encode())
    if asked is None:
        return promised_ms
    if not _MILLISECONDS.fullmatch(asked):
        raise invalid(f"{name} is {asked[:32].decode('latin-1')!r}; allowed: milliseconds, such as 250 or 62.5", name)
    return max(promised_ms, float(asked)) if promised_ms else 0.0
