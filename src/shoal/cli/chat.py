from __future__ import annotations


def chat() -> None:
    """Not here yet."""
    raise NotImplementedError("chat")
