"""What is known of one replica at the moment of a routing decision."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """Numbers are counts of choices (core requests), not of client requests."""

    name: str
    ready: bool  # connected, and says that it can take work
    suspect: bool = False  # not heard from, or makes no steps, for longer than it announced
    num_running: int = 0
    num_waiting: int = 0
    num_unreported: int = 0  # sent by this gateway too recently to be in the two numbers above
