"""Blocks of the KV store as they cross a network: one piece, layer behind layer.

Shape letters: N layers, B blocks of the store, X bytes of a block in one layer, n layers that are moved.
"""

from __future__ import annotations

import torch

from shoal.engine.device import Device
from shoal.engine.kvstore import KVStore


class WireForm:
    """Copies layers of one block between the store's [N, B, X] and n·X bytes elsewhere, from any thread, as long as
    nobody else touches the block. It returns when they are there, and holds no lock of Python's meanwhile."""

    def __init__(self, store: KVStore, device: Device) -> None:
        self._device_NBX = store.bytes_NBX
        self.num_layers, self._num_blocks, self._layer_bytes = self._device_NBX.shape
        self.block_bytes = self.num_layers * self._layer_bytes
        self._copy = device.copies()

    def take(self, block: int, first_layer: int, target: memoryview) -> None:
        """As many layers as the target has room for."""
        outside_nX = self._outside(target)
        self._copy(outside_nX, self._inside(block, first_layer, len(outside_nX)))

    def put(self, block: int, first_layer: int, source: memoryview) -> None:
        outside_nX = self._outside(source)
        self._copy(self._inside(block, first_layer, len(outside_nX)), outside_nX)

    def _outside(self, piece: memoryview) -> torch.Tensor:
        return torch.frombuffer(piece, dtype=torch.uint8).view(-1, self._layer_bytes)

    def _inside(self, block: int, first_layer: int, count: int) -> torch.Tensor:
        assert 0 <= block < self._num_blocks, f"block {block}"
        assert 0 <= first_layer <= self.num_layers - count, f"{count} layers from {first_layer}"
        return self._device_NBX[first_layer : first_layer + count, block]
