"""int8 weights: how near they are, that all backends compute with the same ones, that nobody takes them for others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.core.request import RequestSpec, Sampling
from shoal.engine.config import EngineConfig
from shoal.engine.device import Device, choose
from shoal.engine.model.linear import Int8TorchLinear, KernelLinear, make_linear
from shoal.engine.model.load import model_digest
from shoal.engine.model.quantize import multiply, quantize
from tests.support.drive import make_scheduler, run_requests
from tests.support.reference import all_logits, load_reference
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.torch

SHAPES = [(96, 64), (50, 40), (7, 33), (3000, 576)]
PROMPT = tuple((31 * place + 5) % 269 for place in range(100))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_weight_is_off_by_at_most_half_a_step(n: int, k: int, dtype: torch.dtype) -> None:
    weight = (random(n, k) * random(n, 1, seed=1).exp()).to(dtype)
    ints, scale = quantize(weight)
    assert ints.dtype == torch.int8 and int(ints.abs().max()) == 127, "the whole range, and never -128"
    off = (ints.double() * scale.double().unsqueeze(1) - weight.double()).abs() / scale.double().unsqueeze(1)
    assert float(off.max()) <= 0.5001
    assert torch.equal(scale, scale.bfloat16().float())


def test_rows_of_zeros_stay_zeros() -> None:
    weight = random(4, 32)
    weight[2] = 0
    ints, scale = quantize(weight)
    assert not ints[2].any() and scale.isfinite().all()
    assert not multiply(random(3, 32), ints, scale)[:, 2].any()


@pytest.mark.parametrize("num_rows", [1, 8, 9, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_the_product_is_that_of_the_quantised_weight(n: int, k: int, dtype: torch.dtype, num_rows: int) -> None:
    ints, scale = quantize(random(n, k))
    x = random(num_rows, k, seed=2).to(dtype)
    exact = x.double() @ (ints.double() * scale.double().unsqueeze(1)).T
    off = (multiply(x, ints, scale.to(dtype)).double() - exact).norm() / exact.norm()
    assert off < (0.004 if dtype == torch.bfloat16 else 1e-6)


@pytest.fixture(scope="module")
def device() -> Device:
    return choose(EngineConfig(dtype="bfloat16", device="cpu", threads=1, quantization="int8"))


@pytest.mark.parametrize("gated", [False, True])
def test_kernel_and_torch_hold_the_same_weights(device: Device, gated: bool) -> None:
    if device.kernels is None or not device.kernels.has_linear:
        pytest.skip("this processor has no AVX-512 BF16, or there is no C++ compiler")
    weight, bias, norm = random(96, 64).bfloat16() / 8, random(96, seed=1).bfloat16(), torch.ones(64).bfloat16()
    kernel = make_linear(weight, bias, device, epsilon=1e-5, gated=gated)
    ints, scale = quantize(weight)
    theirs = Int8TorchLinear(ints, scale.bfloat16(), bias, 1e-5)
    assert isinstance(kernel, KernelLinear)
    if not gated:
        assert torch.equal(kernel.rows(torch.arange(96)), theirs.rows(torch.arange(96)))
    x = random(20, 64, seed=2).bfloat16()
    found, wanted = ((each.normed_silu if gated else each.normed)(x, norm) for each in (kernel, theirs))
    torch.testing.assert_close(found, wanted, rtol=2**-5, atol=2**-5)


@pytest.mark.parametrize(("dtype", "kernels"), [("bfloat16", "auto"), ("bfloat16", "off"), ("float32", "auto")])
@pytest.mark.parametrize("tied", [True, False])
def test_a_whole_model_is_near_the_float32_one(
    tmp_path: Path, new_runner: Callable[..., Any], dtype: str, kernels: str, tied: bool
) -> None:
    """By the log-probabilities of a prompt. Random weights are the hardest: no number can be left out."""
    folder = make_tiny_model(tmp_path / "model", "qwen2", tied=tied)
    exact = all_logits(load_reference(folder), list(PROMPT)).log_softmax(-1)
    wanted = torch.stack([exact[place - 1, PROMPT[place]] for place in range(1, len(PROMPT))])
    off = {}
    for quantization in ("none", "int8"):
        runner = new_runner(folder, dtype=dtype, kernels=kernels, quantization=quantization)
        sampling = Sampling(temperature=0, prompt_logprobs=0)
        spec = RequestSpec(id="a", prompt=PROMPT, max_tokens=0, sampling=sampling)
        scored = run_requests(runner, make_scheduler(runner), [spec])["a"].prompt_logprobs
        off[quantization] = float((torch.tensor([entry.logprob for entry in scored]) - wanted).abs().mean())
    assert off["none"] < off["int8"] < 0.3, off  # a guess is off by several


def test_no_replica_takes_int8_for_other_weights(tiny: Path, new_runner: Callable[..., Any]) -> None:
    plain, int8 = new_runner(tiny), new_runner(tiny, quantization="int8")
    assert plain.model_digest == model_digest(tiny) != int8.model_digest
    assert plain.hash_root != int8.hash_root
    assert int8.model_digest == new_runner(tiny, quantization="int8").model_digest


def test_loaded_weights_take_a_byte_each(tiny: Path, device: Device) -> None:
    weight = random(64, 96).bfloat16()
    layer: Any = make_linear(weight, None, device, epsilon=1e-5)
    tensors = [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= weight.numel() + 4 * 64


def test_formats_without_int8_are_refused(tiny: Path, new_runner: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"engine\.quantization is int8; it needs a CPU, and bfloat16 or float32"):
        new_runner(tiny, quantization="int8", dtype="float16")
