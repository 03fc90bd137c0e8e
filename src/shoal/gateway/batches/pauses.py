"""How long to wait before trying again."""

from __future__ import annotations

import random

FIRST_S, LONGEST_S = 0.25, 30.0


def pause_s(tries: int, at_least_s: float = 0.0) -> float:
    """Doubles from try to try, the first being 0, up to a bound; spread, so that many do not come back at once."""
    return max(at_least_s, min(LONGEST_S, FIRST_S * 2.0 ** min(tries, 16))) * random.uniform(1.0, 1.25)
