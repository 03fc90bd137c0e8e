from __future__ import annotations


def serve() -> None:
    """Not here yet."""
    raise NotImplementedError("serve")
