"""The digest that goes with a block wherever it is moved: XXH3 of 128 bits over its wire form.

Wire form: the bytes of all layers in order, uint8 [N, X] in one piece. The same bytes lie in the host tier, on disk and
on the network, so a digest made once is good everywhere. It finds bytes that changed by accident; who may write to our
memory, disk or sockets could forge it.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

DIGEST_BYTES = 16

Block = NDArray[np.uint8] | memoryview | bytearray | bytes  # of a torch tensor: its `.numpy()`, which copies nothing


def digest(block: Block) -> bytes:
    """From any thread: `update` gives Python's lock back while it computes, as of 100 KB.

    BufferError where the bytes are not in one piece.
    """
    hasher = xxhash.xxh3_128()
    hasher.update(block.data if isinstance(block, np.ndarray) else block)
    return hasher.digest()
