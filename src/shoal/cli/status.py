from __future__ import annotations


def status() -> None:
    """Not here yet."""
    raise NotImplementedError("status")
