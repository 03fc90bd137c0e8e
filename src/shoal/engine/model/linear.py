"""Linear layers with what surrounds them in a transformer: y = x · W^T + bias after an RMS norm, before a residual.

Which kind a weight becomes is decided once, here, from the device. Weights are laid out for the processor when they are
loaded; nobody else sees how.

Shape letters: M rows, N rows of W (outputs), K columns of W (inputs), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, pad, rms_norm, silu

from shoal.engine.device import Device
from shoal.engine.kernels.library import Kernels
from shoal.engine.kernels.library import Linear as Struct
from shoal.engine.model.quantize import multiply, quantize

_TILE = 16  # rows of W in a tile, as linear.h lays them out
_BLOCK = 2 * _TILE
_DEPTH = 32  # values of k in a tile


class Adding(Protocol):
    def add(self, x_MK: Tensor, residual_MN: Tensor) -> Tensor:
        """[M, N]: residual + result. The residual is overwritten."""
        ...


class Vocabulary(Protocol):
    num_rows: int  # N

    def scores(self, x_MK: Tensor, norm_K: Tensor) -> Tensor:
        """[M, N] in float32: of rms_norm(x)."""
        ...

    def rows(self, ids_M: Tensor) -> Tensor:
        """[M, K]: these rows of W, newly made."""
        ...


class Linear(Adding, Vocabulary, Protocol):
    """What is returned may be memory that the next call with a result of the same width writes again."""

    def normed(self, x_MK: Tensor, norm_K: Tensor) -> Tensor:
        """[M, N]: of rms_norm(x)."""
        ...

    def normed_silu(self, x_MK: Tensor, norm_K: Tensor) -> Tensor:
        """[M, N / 2]: silu(gate) · up of rms_norm(x), where the rows of W are all gates, then all ups."""
        ...


def make_linear(
    weight_NK: Tensor,
    bias_N: Tensor | None,
    device: Device,
    *,
    epsilon: float,
    gated: bool = False,
    largest_N: Tensor | None = None,
) -> Linear:
    """`epsilon` is the norm's. `gated`: for `normed_silu`. `largest_N` is quantize's. The weight is not kept where
    another layout is."""
    weight, scale_N = quantize(weight_NK, largest_N) if device.quantization == "int8" else (weight_NK, None)
    if device.kernels is not None and device.kernels.has_linear and weight_NK.dtype == torch.bfloat16:
        return KernelLinear(weight, scale_N, bias_N, device, epsilon, gated)
    if scale_N is None:
        layer = TorchLinear(weight, bias_N, epsilon)
    else:
        layer = Int8TorchLinear(weight, scale_N.to(weight_NK.dtype), bias_N, epsilon)
    return FixedRows(layer) if device.batch_invariant else layer


class TorchLinear:
    """Any device, any number format."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, epsilon: float) -> None:
        self.num_rows = len(weight_NK)
        self._weight_NK = weight_NK
        self._bias_N = bias_N
        self._epsilon = epsilon

    def normed(self, x_MK: Tensor, norm_K: Tensor) -> Tensor:
        return self._multiply(rms_norm(x_MK, norm_K.shape, norm_K, self._epsilon))

    def normed_silu(self, x_MK: Tensor, norm_K: Tensor) -> Tensor:
        gate_MF, up_MF = self.normed(x_MK, norm_K).chunk(2, dim=-1)
        return silu(gate_MF) * up_MF

    def add(self, x_MK: Tensor, residual_MN: Tensor) -> Tensor:
        return residual_MN.add_(self._multiply(x_MK))

    def scores(self, x_MK: Tensor, norm_K: Tensor) -> Tensor:
        return self.normed(x_MK, norm_K).float()

    def rows(self, ids_M: Tensor) -> Tensor:
        return embedding(ids_M, self._weight_NK)

    def _multiply(self, x_MK: Tensor) -> Tensor:
        return linear(x_MK, self._weight_NK, self._bias_N)


class Int8TorchLinear(TorchLinear):
    """int8 weights with a scale per row, for processors that the kernels do not know; bfloat16 or float32 otherwise."""

    def __init__(self, ints_NK: Tensor, scale_N: Tensor, bias_N: Tensor | None, epsilon: float) -> None:
        super().__init__(ints_NK, bias_N, epsilon)
        self._scale_N = scale_N

    def rows(self, ids_M: Tensor) -> Tensor:
        return super().rows(ids_M) * self._scale_N[ids_M].unsqueeze(1)

    def _multiply(self, x_MK: Tensor) -> Tensor:
        y_MN = multiply(x_MK, self._weight_NK, self._scale_N)
        return y_MN if self._bias_N is None else y_MN.add_(self._bias_N)


class FixedRows:
    """A layer that computes so many rows at once, never more or fewer; missing ones are zeros.

    What torch calls chooses by a product's shape how it is cut and in what order its sums run, so with other row counts
    a row gets other numbers. Within one shape rows are treated alike; at a start, invariance.py looks whether it is so.
    """

    NUM_ROWS = 32  # 16 decodes cost 1.1 to 1.5 times as much as without padding, a prompt 3 times

    def __init__(self, layer: Linear) -> None:
        self.num_rows = layer.num_rows
        self._layer = layer

    def normed(self, x_MK: Tensor, norm_K: Tensor) -> Tensor:
        return self._in_tiles(lambda tile: self._layer.normed(tile, norm_K), x_MK)

    def normed_silu(self, x_MK: Tensor, norm_K: Tensor) -> Tensor:
        return self._in_tiles(lambda tile: self._layer.normed_silu(tile, norm_K), x_MK)

    def add(self, x_MK: Tensor, residual_MN: Tensor) -> Tensor:
        return residual_MN.copy_(self._in_tiles(self._layer.add, x_MK, residual_MN))

    def scores(self, x_MK: Tensor, norm_K: Tensor) -> Tensor:
        return self._in_tiles(lambda tile: self._layer.scores(tile, norm_K), x_MK)

    def rows(self, ids_M: Tensor) -> Tensor:
        return self._layer.rows(ids_M)

    def _in_tiles(self, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        num_rows = len(inputs[0])
        padded = (pad(rows, (0, 0, 0, -num_rows % self.NUM_ROWS)).split(self.NUM_ROWS) for rows in inputs)
        return torch.cat([compute(*tiles) for tiles in zip(*padded, strict=True)])[:num_rows]


class KernelLinear:
    """bfloat16 activations; weights in bfloat16, or int8 with a scale per row. See kernels/linear.h."""

    def __init__(
        self,
        weight_NK: Tensor,
        scale_N: Tensor | None,
        bias_N: Tensor | None,
        device: Device,
        epsilon: float,
        gated: bool,
    ) -> None:
        self.num_rows, self._k = weight_NK.shape
        assert device.kernels is not None
        self._kernels = device.kernels
        self._buffer = device.buffer
        self._gated = gated
        tiles = _tiles(weight_NK, gated)  # [N / 32, K / 32, 2, 16, 16, 2]
        self._packed = device.keep(tiles if scale_N is None else _magnitudes(tiles))
        self._scale = None if scale_N is None else _in_order(scale_N, gated)
        self._bias = None if bias_N is None else _in_order(bias_N.float(), gated)
        self.struct = Struct(
            _address(self._packed), _address(self._scale), _address(self._bias), self.num_rows, self._k, epsilon
        )

    def normed(self, x_MK: Tensor, norm_K: Tensor) -> Tensor:
        return self._call(x_MK, norm_K, Kernels.STORE, self._buffer(len(x_MK), self.num_rows, x_MK.dtype))

    def normed_silu(self, x_MK: Tensor, norm_K: Tensor) -> Tensor:
        assert self._gated
        return self._call(x_MK, norm_K, Kernels.SILU, self._buffer(len(x_MK), self.num_rows // 2, x_MK.dtype))

    def add(self, x_MK: Tensor, residual_MN: Tensor) -> Tensor:
        return self._call(x_MK, None, Kernels.ADD, residual_MN)

    def scores(self, x_MK: Tensor, norm_K: Tensor) -> Tensor:
        return self._call(x_MK, norm_K, Kernels.FLOAT, self._buffer(len(x_MK), self.num_rows, torch.float32))

    def rows(self, ids_M: Tensor) -> Tensor:
        assert not self._gated and ids_M.dtype == torch.int64 and ids_M.is_contiguous()
        out_MK = torch.empty((len(ids_M), self._k), dtype=torch.bfloat16)
        if not self._kernels.rows(self.struct, ids_M.data_ptr(), len(ids_M), out_MK.data_ptr()):
            raise IndexError(f"row ids from {int(ids_M.min())} to {int(ids_M.max())}; there are {self.num_rows} rows")
        return out_MK

    def _call(self, x_MK: Tensor, norm_K: Tensor | None, epilogue: int, out: Tensor) -> Tensor:
        assert x_MK.is_contiguous() and out.is_contiguous()
        self._kernels.linear(self.struct, x_MK.data_ptr(), _address(norm_K), len(x_MK), epilogue, out.data_ptr())
        return out


# -- layout ------------------------------------------------------------------------------------------------------------


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _tiles(weight_NK: Tensor, gated: bool) -> Tensor:
    """As linear.h says; zeros where N or K end within a tile."""
    weight_NK = _padded(weight_NK, gated)
    tiles = weight_NK.view(*_tile_shape(weight_NK.shape[0], gated), weight_NK.shape[1] // _DEPTH, _DEPTH // 2, 2)
    order = (1, 3, 0, 4, 2, 5) if gated else (0, 3, 1, 4, 2, 5)  # block, k, tile of the block, pair, row, of the pair
    return tiles.permute(order)


def _magnitudes(tiles: Tensor) -> Tensor:
    """int8 as a sign bit and a magnitude, and each 64 values in the order in which linear.h widens them."""
    signed = torch.where(tiles < 0, -128 - tiles, tiles)
    return signed.reshape(-1, 2, 4, 8).transpose(1, 2)


def _in_order(values_N: Tensor, gated: bool) -> Tensor:
    """One number per row of W, in the order of the packed rows."""
    padded = _padded(values_N.unsqueeze(1), gated, depth=1).flatten()
    tiles = padded.view(_tile_shape(len(padded), gated))
    return (tiles.transpose(0, 1) if gated else tiles).flatten().contiguous()


def _tile_shape(num_rows: int, gated: bool) -> tuple[int, int, int]:
    """Gated: first all tiles of gates, then all of ups; else two neighbours make a block."""
    return (2, num_rows // _BLOCK, _TILE) if gated else (num_rows // _BLOCK, 2, _TILE)


def _padded(weight_NK: Tensor, gated: bool, depth: int = _DEPTH) -> Tensor:
    parts = weight_NK.chunk(2) if gated else (weight_NK,)
    unit = _TILE if gated else _BLOCK
    rows, columns = -len(parts[0]) % unit, -weight_NK.shape[1] % depth
    if not rows and not columns:
        return weight_NK
    return torch.cat([pad(part, (0, columns, 0, rows)) for part in parts])
