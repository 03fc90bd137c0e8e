"""Main memory in huge pages, for what every step reads: weights, keys and values, results that are used again.

With pages of 4 KB in a virtual machine, finding the pages takes longer than reading them: 270 MB were read at 10 GB/s,
and at 30 GB/s from pages of 2 MB. Where the system has none to give, its usual pages are used.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

PAGE_BYTES = 2 << 20
_CHUNK_BYTES = 64 << 20
_LINE_BYTES = 64


def zeros(num_bytes: int) -> Tensor:
    """uint8, on a page's border. A page is taken when it is first touched."""
    mapped = mmap.mmap(-1, num_bytes + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    return whole[-whole.data_ptr() % PAGE_BYTES :][:num_bytes]


class Arena:
    """Places for tensors that stay, side by side in large pieces, since most are smaller than a huge page."""

    def __init__(self) -> None:
        self._left = zeros(0)

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy, contiguous."""
        num_bytes = tensor.numel() * tensor.element_size()
        room = -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        if room > len(self._left):
            self._left = zeros(max(room, _CHUNK_BYTES))
        place, self._left = self._left[:num_bytes], self._left[room:]
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
