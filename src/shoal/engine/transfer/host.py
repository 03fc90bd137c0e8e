"""The host tier's memory: blocks of the KV store copied whole, each in one piece.

Shape letters: N layers, B blocks of the store, H blocks of the host tier, X bytes of a block in one layer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.engine.device import Device
from shoal.engine.kvstore import KVStore
from shoal.engine.transfer.digest import digest


class HostBlocks:
    """Bytes [H, N, X], beside the store's [N, B, X]."""

    def __init__(self, store: KVStore, device: Device, num_blocks: int) -> None:
        self._device_NBX = store.bytes_NBX
        num_layers, self.num_device_blocks, num_bytes = self._device_NBX.shape
        self.num_blocks = num_blocks
        self.block_bytes = num_layers * num_bytes
        self._host_HNX = device.host_pool(num_blocks * self.block_bytes).view(num_blocks, num_layers, num_bytes)
        self._digests: list[bytes] = [b""] * num_blocks  # of what was copied out
        self._copy = device.copies()

    def copy(self, *, out: bool, device_block: int, host_block: int, count: int) -> list[int]:
        """`count` blocks that lie side by side here and there; `out`: from the device. Returns when they are
        there: which of them, counted from 0, are not what was copied out.

        From any thread, as long as nobody else touches these blocks.
        """
        assert 0 <= device_block <= self.num_device_blocks - count, f"{count} blocks of the device from {device_block}"
        assert 0 <= host_block <= self.num_blocks - count, f"{count} blocks of the host from {host_block}"
        device_NcX = self._device_NBX[:, device_block : device_block + count]
        host_NcX = self._host_HNX[host_block : host_block + count].transpose(0, 1)
        if out:
            self._copy(host_NcX, device_NcX)
        digests = [digest(self._host_HNX[block].numpy()) for block in range(host_block, host_block + count)]
        if out:
            self._digests[host_block : host_block + count] = digests
            return []
        self._copy(device_NcX, host_NcX)
        kept = self._digests[host_block : host_block + count]
        return [place for place, pair in enumerate(zip(digests, kept, strict=True)) if pair[0] != pair[1]]

    # -- blocks whose other end is not the device ----------------------------------------------------------------------

    def block(self, host_block: int) -> NDArray[np.uint8]:
        """Its bytes [N·X], the wire form: to read from, or to write to and call `filled`."""
        return self._host_HNX[host_block].numpy().reshape(-1)

    def is_sound(self, host_block: int) -> bool:
        """Its bytes are those that were copied to it."""
        return digest(self.block(host_block)) == self._digests[host_block]

    def filled(self, host_block: int, digest: bytes) -> None:
        """With bytes of this digest, as was checked where they came from."""
        self._digests[host_block] = digest
