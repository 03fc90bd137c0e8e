from __future__ import annotations


def generate() -> None:
    """Not here yet."""
    raise NotImplementedError("generate")
