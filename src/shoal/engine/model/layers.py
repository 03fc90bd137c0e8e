"""The layers of a step, one after the other: by one call of our kernels where all parts are kernels, else part by part.

Shape letters: T tokens of a step, E hidden size.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

from torch import Tensor

from shoal.engine.device import Device
from shoal.engine.kernels.library import Activations, Block
from shoal.engine.kernels.library import Linear as Struct
from shoal.engine.model.attention import Attention
from shoal.engine.model.linear import Adding, KernelLinear, Linear
from shoal.engine.model.llama import Layer
from shoal.engine.model.paged import PagedAttention, Prepared


class Layers(Protocol):
    def __call__(self, x_TE: Tensor, prepared: Any) -> Tensor:
        """[T, E]: hidden states, which may be x overwritten. `prepared` is what the attention's `prepare` returned."""
        ...


def make_layers(layers: list[Layer], attention: Attention, device: Device) -> Layers:
    if isinstance(attention, PagedAttention) and all(isinstance(each, KernelLinear) for each in _linears(layers)):
        return LayersInOneCall(layers, attention, device)
    return LayersPartByPart(layers, attention)


class LayersPartByPart:
    def __init__(self, layers: list[Layer], attention: Attention) -> None:
        self._layers = layers
        self._attention = attention

    def __call__(self, x_TE: Tensor, prepared: Any) -> Tensor:
        for index, layer in enumerate(self._layers):
            qkv_TP = layer.qkv.normed(x_TE, layer.attention_norm_E)
            x_TE = layer.output.add(self._attention.attend(index, qkv_TP, prepared), x_TE)
            x_TE = layer.down.add(layer.gate_up.normed_silu(x_TE, layer.mlp_norm_E), x_TE)
        return x_TE


class LayersInOneCall:
    """150 calls of a step that each come back for Python's lock would wait for it behind the I/O thread."""

    def __init__(self, layers: list[Layer], attention: PagedAttention, device: Device) -> None:
        assert device.kernels is not None
        self._compute = device.kernels.layers
        self._buffer = device.buffer
        self._layers = layers  # kept alive: the blocks point to their weights
        self._attention = attention
        self._blocks = (Block * len(layers))(*(_block(layer, attention, i) for i, layer in enumerate(layers)))
        self._widths = (layers[0].qkv.num_rows, attention.width, layers[0].gate_up.num_rows // 2)

    def __call__(self, x_TE: Tensor, prepared: Prepared) -> Tensor:
        assert x_TE.is_contiguous()
        rows = len(x_TE)
        buffers = (self._buffer(rows, width, x_TE.dtype).data_ptr() for width in self._widths)
        activations = Activations(x_TE.data_ptr(), *buffers, rows)
        self._compute(self._blocks, len(self._blocks), self._attention.shape, prepared.step, activations)
        return x_TE


def _linears(layers: list[Layer]) -> list[Linear | Adding]:
    return [each for layer in layers for each in (layer.qkv, layer.output, layer.gate_up, layer.down)]


def _block(layer: Layer, attention: PagedAttention, index: int) -> Block:
    structs = [ctypes.pointer(_struct(each)) for each in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    norms = layer.attention_norm_E.data_ptr(), layer.mlp_norm_E.data_ptr()
    return Block(*norms, *structs, attention.layers[index])


def _struct(linear: Linear | Adding) -> Struct:
    assert isinstance(linear, KernelLinear)
    return linear.struct
