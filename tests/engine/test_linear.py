"""Linear layers of both kinds against float64, at sizes that end within tiles; rows that do not see each other."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import rms_norm, silu

from shoal.engine.config import EngineConfig
from shoal.engine.device import Device, choose
from shoal.engine.model.linear import KernelLinear, Linear, TorchLinear, make_linear

pytestmark = pytest.mark.torch

EPSILON = 1e-5
SHAPES = [(96, 64), (50, 40), (30, 96), (320, 576), (576, 1536)]
ROWS = [1, 5, 16, 17, 33, 300, 450]  # so many for each of the threads that it keeps its own


@pytest.fixture(scope="module")
def device() -> Device:
    return choose(EngineConfig(dtype="bfloat16", device="cpu", threads=3))


@pytest.fixture(params=["torch", "kernel", "int8"])
def kind(request: pytest.FixtureRequest, device: Device) -> str:
    if request.param != "torch" and (device.kernels is None or not device.kernels.has_linear):
        pytest.skip("this processor has no AVX-512 BF16, or there is no C++ compiler")
    return request.param


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def make(kind: str, device: Device, n: int, k: int, gated: bool = False, biased: bool = True):
    """A layer, and its weight and bias in float64."""
    weight, bias = random(n, k, seed=1) / k**0.5, random(n, seed=2) if biased else None
    if kind == "int8":
        ints, scale = torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n) / 1000
        layer: Linear = KernelLinear(ints, scale, bias, device, EPSILON, gated)
        return layer, ints.double() * scale.double().unsqueeze(1), bias
    if kind == "torch":
        return TorchLinear(weight, bias, EPSILON), weight.double(), bias
    return KernelLinear(weight, None, bias, device, EPSILON, gated), weight.double(), bias


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = x.double() @ weight.T
    return y if bias is None else y + bias.double()


def normed(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    return rms_norm(x.double(), norm.shape, norm.double(), EPSILON).bfloat16()


def close(found: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), exact, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_layers_compute_what_they_say(kind: str, device: Device, n: int, k: int, num_rows: int) -> None:
    layer, weight, bias = make(kind, device, n, k)
    x, norm, residual = random(num_rows, k, seed=3), random(k, seed=4), random(num_rows, n, seed=5)
    close(layer.normed(x, norm), exact(normed(x, norm), weight, bias))
    close(layer.scores(x, norm), exact(normed(x, norm), weight, bias))
    wanted = residual.double() + exact(x, weight, bias)
    close(layer.add(x, residual), wanted)
    close(residual, wanted)
    gated, weight, bias = make(kind, device, n, k, gated=True)
    gate, up = exact(normed(x, norm), weight, bias).chunk(2, dim=-1)
    close(gated.normed_silu(x, norm), silu(gate) * up)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_rows_are_those_of_the_weight(kind: str, device: Device, n: int, k: int) -> None:
    layer, weight, _ = make(kind, device, n, k)
    ids = torch.randperm(n)
    assert torch.equal(layer.rows(ids), weight[ids].bfloat16() if kind != "int8" else rounded(weight[ids]))


def rounded(rows: torch.Tensor) -> torch.Tensor:
    return rows.float().bfloat16()


def test_a_row_is_the_same_to_the_bit_in_any_company(device: Device, kind: str) -> None:
    if kind == "torch":
        pytest.skip("torch promises no such thing")
    layer, _, _ = make(kind, device, 320, 576)
    x, norm = random(500, 576, seed=6), random(576, seed=7)
    alone = torch.cat([layer.scores(x[i : i + 1], norm).clone() for i in range(len(x))])
    for size in (2, 15, 16, 31, 64, 200, 401, 500):
        together = torch.cat([part.clone() for part in (layer.scores(p, norm) for p in x.split(size))])
        assert torch.equal(alone, together), f"batches of {size}"


def test_large_values_do_not_overflow_the_gate(device: Device, kind: str) -> None:
    layer, _, _ = make(kind, device, 64, 32, gated=True, biased=False)
    out = layer.normed_silu(random(4, 32, seed=8), torch.full((32,), 30000.0).bfloat16())
    assert not out.isnan().any()


def test_formats_without_a_kernel_go_to_torch(device: Device) -> None:
    assert isinstance(make_linear(torch.ones(8, 8), None, device, epsilon=EPSILON), TorchLinear)
