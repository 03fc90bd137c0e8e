"""Numbers as people read them. GB is 10^9 bytes, GiB is 2^30: never one for the other."""

from __future__ import annotations


def gb(num_bytes: float) -> str:
    """In 10^9 bytes, with as many digits as say something."""
    value = num_bytes / 1e9
    if value < 0.005:
        return "0" if not value else "< 0.01"
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"


def size(num_bytes: float) -> str:
    """In the unit that fits, of powers of 1,000."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def count(number: float) -> str:
    """Parameters: 70.6 B, 135 M."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number:.0f}"


def ms(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.1f}"


def percent(share: float) -> str:
    """With its sign: what something is more or less."""
    return f"{'−' if share < 0 else '+'}{abs(share):.0%}".replace("%", " %")
