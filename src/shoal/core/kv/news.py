"""What became of prefix blocks, for those outside who want to know who holds what."""

from __future__ import annotations

# Where a block lies, as bits: one block may lie in several tiers. The fastest is the lowest.
DEVICE, HOST, DISK = 1, 2, 4
TIERS = (DEVICE, HOST, DISK)

# The KV of one prefix block can be found in a tier from now on, or not any more:
#     key · key of the block before, empty for a prompt's first · tier · True: stored, False: dropped
# A block is told of after the one before it, and is gone from all tiers before that one is.
# A plain tuple: a step may bring hundreds, on the step thread.
KvEvent = tuple[bytes, bytes, int, bool]
