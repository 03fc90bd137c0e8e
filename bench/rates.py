"""What this machine can do, measured with the default model's own shapes: matrix products and memory.

A pass multiplies by the four matrices of each layer, layer after layer, so a weight is as cold as in a real step: all
the others came between. Three ways to do it are timed, where they are there: torch's linear, oneDNN's packed weights,
and the engine's own layers (which also do the norm, the activation and the residual in the same call).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from shoal.engine.config import EngineConfig
from shoal.engine.model.config import ModelConfig

PACKED_FOR_ROWS = 16  # oneDNN asks how many rows there will be when it lays weights out

Call = Callable[[Any], object]  # takes the activations


class Pass(NamedTuple):
    """A timed pass through all layers, and one through the output matrix."""

    way: str
    dtype: str
    rows: int
    layers_s: float
    head_s: float
    layer_weights: int  # numbers, in all layers
    head_weights: int
    item_bytes: int

    @property
    def flops_per_s(self) -> float:
        return 2 * self.rows * self.layer_weights / self.layers_s

    @property
    def bytes_per_s(self) -> float:
        """Of the layers' weights alone."""
        return self.layer_weights * self.item_bytes / self.layers_s


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of a layer's four matrices, as the engine stacks them."""
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    qkv = heads + 2 * config.num_kv_heads * config.head_dim
    return {"qkv": (qkv, hidden), "output": (hidden, heads), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}


def layer_weights(config: ModelConfig) -> int:
    """Numbers in the matrices of all layers."""
    return config.num_layers * sum(outputs * inputs for outputs, inputs in layer_shapes(config).values())


class Products:
    """Random weights of the model's shapes in one number format, laid out in every way that is there."""

    def __init__(self, config: ModelConfig, dtype: str) -> None:
        import torch

        from shoal.engine.device import choose

        self._torch = torch
        self._config = config
        self._dtype = dtype
        self._kind = getattr(torch, dtype)
        self._device = choose(EngineConfig(dtype=dtype, device="cpu"))
        makers = {"torch": _plain}
        if torch.backends.mkldnn.is_available():
            makers["onednn packed"] = _packed
        if self._device.kernels is not None and self._device.kernels.has_linear and dtype == "bfloat16":
            makers["shoal"] = self._own
        layers = [self._random(layer_shapes(config)) for _ in range(config.num_layers)]
        head = self._random({"head": (config.vocab_size, config.hidden_size)})
        self._calls = {
            way: ([call for layer in layers for call in make(layer)], list(make(head))) for way, make in makers.items()
        }

    @property
    def ways(self) -> list[str]:
        return list(self._calls)

    def measure(self, way: str, rows: int, count: int) -> Pass:
        """Medians of `count` passes, after one that is not counted."""
        layers, head = self._calls[way]
        head_weights = self._config.vocab_size * self._config.hidden_size
        seconds = [self._seconds(calls, rows, count) for calls in (layers, head)]
        return Pass(way, self._dtype, rows, *seconds, layer_weights(self._config), head_weights, self._kind.itemsize)

    def _seconds(self, calls: list[tuple[Call, int]], rows: int, count: int) -> float:
        x = {width: self._torch.randn((rows, width)).to(self._kind) for width in {width for _, width in calls}}

        def once() -> None:
            for call, width in calls:
                call(x[width])

        with self._torch.inference_mode():
            return median_seconds(once, count)

    def _random(self, shapes: dict[str, tuple[int, int]]) -> dict[str, Any]:
        return {name: self._torch.randn(shape).mul_(0.02).to(self._kind) for name, shape in shapes.items()}

    def _own(self, weights: dict[str, Any]) -> list[tuple[Call, int]]:
        return [(self._own_call(name, weight), weight.shape[1]) for name, weight in weights.items()]

    def _own_call(self, name: str, weight: Any) -> Call:
        from shoal.engine.model.linear import make_linear

        linear = make_linear(weight, None, self._device, epsilon=1e-5, gated=name == "gate_up")
        if name in ("output", "down"):
            return lambda x: linear.add(x, self._device.buffer(len(x), weight.shape[0], x.dtype))
        norm = self._torch.ones(weight.shape[1], dtype=weight.dtype)
        method = {"qkv": linear.normed, "gate_up": linear.normed_silu, "head": linear.scores}[name]
        return lambda x: method(x, norm)


def _plain(weights: dict[str, Any]) -> list[tuple[Call, int]]:
    from torch.nn.functional import linear

    return [(lambda x, weight=weight: linear(x, weight), weight.shape[1]) for weight in weights.values()]


def _packed(weights: dict[str, Any]) -> list[tuple[Call, int]]:
    import torch

    ops: Any = torch.ops.mkldnn
    packed = [(ops._reorder_linear_weight(weight, PACKED_FOR_ROWS), weight.shape[1]) for weight in weights.values()]
    return [(lambda x, w=weight: ops._linear_pointwise(x, w, None, "none", [], ""), width) for weight, width in packed]


def memory(num_bytes: int, count: int) -> dict[str, float]:
    """Bytes per second with all of torch's threads, over as many bytes as the model's weights take.

    read: a sum. copy: bytes read and bytes written, counted together.
    """
    import torch

    values = torch.ones(num_bytes // 4)
    target = torch.empty_like(values[: len(values) // 2])
    jobs = {"read": values.sum, "copy": lambda: target.copy_(values[: len(target)])}
    return {name: num_bytes / median_seconds(job, count) for name, job in jobs.items()}


def median_seconds(job: Callable[[], object], count: int) -> float:
    """Of `count` calls, after one that is not counted."""
    seconds = []
    for _ in range(count + 1):
        began = time.perf_counter()
        job()
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])
