"""Where keys and values of all blocks live: one tensor, addressed by layer and block.

The order within a layer's block is that of the attention that reads it (Attention.kv_format). `where`, `write`,
`halves` and `read` are for the order [2, t, K, D].

Shape letters: N layers, B blocks, t tokens of a block, K key/value heads, D head size, T tokens of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.engine.device import Device
from shoal.engine.model.config import ModelConfig
from shoal.planner import kv as planner_kv


class KVStore:
    """Tensor [N, B, 2, t, K, D], keys at 0 and values at 1, so that a block of a layer is one piece of memory."""

    def __init__(self, config: ModelConfig, device: Device, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        shape = (config.num_layers, num_blocks, 2, block_tokens, config.num_kv_heads, config.head_dim)
        self._kv_NB2tKD = device.pool(shape)
        rows = (num_blocks * 2, block_tokens, config.num_kv_heads, config.head_dim)
        self._halves = [layer.view(rows) for layer in self._kv_NB2tKD]  # [2 B, t, K, D]: half a block is a row
        self._tokens = [layer.flatten(0, 2) for layer in self._kv_NB2tKD]  # [2 B t, K, D]

    def clear(self, blocks_B: Tensor) -> None:
        """Zero these blocks in all layers.

        For attention that reads stale values: when a block has entered a request's table, an infinity that its last
        owner left cannot turn a masked position (weight 0) into NaN.
        """
        self._kv_NB2tKD.index_fill_(1, blocks_B, 0)

    def layer(self, layer: int) -> Tensor:
        """[B, 2, t, K, D], contiguous."""
        return self._kv_NB2tKD[layer]

    @property
    def bytes_NBX(self) -> Tensor:
        """The same memory as uint8 [N, B, X], X bytes of a block in one layer, whatever their inner order."""
        return self._kv_NB2tKD.flatten(2).view(torch.uint8)

    def where(self, blocks_T: Tensor, offsets_T: Tensor) -> Tensor:
        """[2 T]: places of T keys, then of T values, for `write`."""
        keys_T = blocks_T * (2 * self.block_tokens) + offsets_T
        return torch.cat((keys_T, keys_T + self.block_tokens))

    def write(self, layer: int, where_2T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        self._tokens[layer].index_copy_(0, where_2T, torch.cat((k_TKD, v_TKD)))

    @staticmethod
    def halves(tables_Sb: Tensor) -> Tensor:
        """[2 S b]: rows of all keys, then of all values, of S block tables, for `read`."""
        keys = tables_Sb.flatten() * 2
        return torch.cat((keys, keys + 1))

    def read(self, layer: int, halves: Tensor, num_tables: int) -> tuple[Tensor, Tensor]:
        """Keys and values of S block tables of equal length, each [S, K, L, D] (strided), L = blocks · t."""
        half = self._halves[layer]
        kv = half.index_select(0, halves).view(2, num_tables, -1, *half.shape[2:])
        return kv[0].transpose(1, 2), kv[1].transpose(1, 2)


def block_bytes(config: ModelConfig, dtype: torch.dtype, block_tokens: int) -> int:
    """Bytes of one block over all layers."""
    sizes = config.num_layers, config.num_kv_heads, config.head_dim
    return planner_kv.block_bytes(*sizes, dtype.itemsize, block_tokens)
