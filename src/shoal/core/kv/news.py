"""What became of prefix blocks, for those outside who want to know who holds what."""

from __future__ import annotations

from typing import NamedTuple

# Where a block lies, as bits: one block may lie in several tiers. The fastest is the lowest.
DEVICE, HOST, DISK = 1, 2, 4
TIERS = (DEVICE, HOST, DISK)


class KvEvent(NamedTuple):
    """The KV of one prefix block can be found in a tier from now on, or not any more.

    A block is told of after the one before it, and is gone from all tiers before that one is.
    """

    key: bytes
    parent: bytes  # key of the block before; empty: it is a prompt's first
    tier: int
    stored: bool
