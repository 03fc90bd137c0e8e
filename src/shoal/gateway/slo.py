"""Whether a request got what its terms promise.

Counted is every request that was ours to serve: one that is turned away for load, fails or times out has missed. One
that was wrong in itself (4xx), or whose client left before anything was late, is not counted.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.gateway.terms import Terms

TOO_MANY = 429


class Verdict(NamedTuple):
    met: bool  # answered, and within every target
    ttft: bool | None  # the target of the first token was met; None: there is none
    tpot: bool | None  # that of the time between tokens; None: there is none, or there were no two tokens


def verdict(
    terms: Terms, outcome: str, *, status: int, took_s: float, ttft_s: float | None, tpot_s: float | None
) -> Verdict | None:
    """None: not counted. `outcome`: "ok", "failed", "refused" or "aborted", and `status` the error's; `took_s`: from
    arrival to end; `ttft_s`: to the first token, where one came; `tpot_s`: mean between tokens, where there were two.
    """
    if outcome == "refused" and status < 500 and status != TOO_MANY:
        return None
    target_s = terms.ttft_ms / 1000
    if outcome == "aborted" and ttft_s is None and not 0 < target_s < took_s:
        return None
    ttft = (ttft_s is not None and ttft_s <= target_s) if target_s else None
    tpot = tpot_s * 1000 <= terms.tpot_ms if terms.tpot_ms and tpot_s is not None else None
    return Verdict(outcome in ("ok", "aborted") and ttft is not False and tpot is not False, ttft, tpot)
