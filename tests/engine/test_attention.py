"""Attention over paged keys and values against plain float64 arithmetic, and against itself to the bit."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.engine.config import EngineConfig
from shoal.engine.device import Device, choose
from shoal.engine.kvstore import KVStore
from shoal.engine.model.attention import ATTENTION, make_attention
from shoal.engine.model.config import ModelConfig, Rope
from shoal.engine.model.paged import PagedAttention
from shoal.engine.model.rope import frequencies
from shoal.engine.model.spans import WHOLE, Shard, Spans

pytestmark = pytest.mark.torch

MAX_ERROR = {"float32": 3e-5, "bfloat16": 0.06}  # of results whose values are about 1
LAYERS = 2

Piece = tuple[int, int, int]  # new tokens of a step: sequence, start, end


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def device_for(dtype: str, backend: str, threads: int = 2) -> Device:
    device = choose(EngineConfig(dtype=dtype, threads=threads))
    if device.kernels is None and backend.startswith("paged"):
        pytest.skip("no kernels on this machine")
    if backend == "paged, matrix unit" and not (device.kernels and device.kernels.has_attention_unit):
        pytest.skip("no matrix unit on this machine")
    if backend == "paged, vectors" and device.kernels:
        device.kernels.has_attention_unit = False
    return dataclasses.replace(device, attention=backend.split(",")[0])


class Scene:
    """Sequences of random queries, keys and values, and one backend whose store holds them in shuffled blocks."""

    def __init__(
        self,
        device: Device,
        lengths: list[int],
        *,
        group: int = 3,
        num_kv_heads: int = 2,
        head_dim: int = 64,
        block_tokens: int = 16,
        norms: bool = True,
        seed: int = 0,
        blocks_seed: int = 0,
        shard: Shard = WHOLE,
    ) -> None:
        self.config = ModelConfig(
            architecture="",
            vocab_size=1,
            hidden_size=1,
            intermediate_size=1,
            num_layers=LAYERS,
            num_heads=group * num_kv_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_eps=1e-5,
            rope=Rope(theta=5000.0),
            max_context=4096,
            tied=True,
        )
        width = (group + 2) * num_kv_heads * head_dim
        random = torch.Generator().manual_seed(seed)
        self.qkv = [torch.randn((length, width), generator=random).to(device.dtype) for length in lengths]
        weights = [torch.rand(head_dim, generator=random).add(0.5).to(device.dtype) for _ in range(2 * LAYERS)]
        self.norms = list(zip(*[iter(weights)] * 2, strict=True)) if norms else [(None, None)] * LAYERS
        sizes = [-(-length // (block_tokens * shard.count)) for length in lengths]
        ids = Random(blocks_seed).sample(range(sum(sizes) + 5), sum(sizes))
        self.tables = [[ids.pop() for _ in range(size)] for size in sizes]
        self.store = KVStore(self.config, device, sum(sizes) + 5, block_tokens)
        self.backend: Any = make_attention(self.config, device, self.store, self.norms, shard)
        left_behind = 0.0 if self.backend.reads_stale_values else math.nan
        self.store._kv_NB2tKD.fill_(left_behind)  # what must not be read would be seen

    def step(self, pieces: list[Piece], layer: int = 1, times: int = 1) -> list[Tensor]:
        """Each piece's results. `times`: what was prepared serves several calls, as it does for several layers."""
        prepared = self.backend.prepare(self.spans(pieces))
        qkv_TP = self.rows(pieces)
        for _ in range(times - 1):
            self.backend.attend(layer, qkv_TP, prepared).fill_(math.nan)  # memory that the next call is given
        return list(
            self.backend.attend(layer, qkv_TP, prepared).clone().split([end - start for _, start, end in pieces])
        )

    def spans(self, pieces: list[Piece]) -> Spans:
        counts = [end - start for _, start, end in pieces]
        width = max(len(self.tables[index]) for index, _, _ in pieces)
        return Spans(
            np.cumsum([0, *counts[:-1]]).astype(np.int32),
            np.array([start for _, start, _ in pieces], np.int32),
            np.array(counts, np.int32),
            np.array([self.tables[i] + [0] * (width - len(self.tables[i])) for i, _, _ in pieces], np.int32),
        )

    def rows(self, pieces: list[Piece]) -> Tensor:
        return torch.cat([self.qkv[index][start:end] for index, start, end in pieces])

    def expected(self, index: int, first: int = 0, layer: int = 1) -> Tensor:
        """[length - first, H · D] in float64: a sequence's last positions. Turned queries and keys are rounded once."""
        K, D, dtype = self.config.num_kv_heads, self.config.head_dim, self.qkv[index].dtype
        H = self.config.num_heads
        x = self.qkv[index].double().view(len(self.qkv[index]), -1, D)
        angle = torch.arange(len(x)).double().unsqueeze(1) * frequencies(self.config.rope, D).double()
        turn = torch.polar(torch.ones_like(angle), angle).unsqueeze(1)

        def rotated(heads: Tensor, norm: Tensor | None) -> Tensor:
            if norm is not None:
                heads = heads / (heads.square().mean(-1, keepdim=True) + self.config.norm_eps).sqrt() * norm.double()
            pairs = torch.complex(*heads.chunk(2, -1)) * turn
            return torch.cat((pairs.real, pairs.imag), -1).to(dtype).double()

        q = rotated(x[:, :H], self.norms[layer][0])[first:]
        k = rotated(x[:, H : H + K], self.norms[layer][1])
        k, v = (part.repeat_interleave(H // K, dim=1) for part in (k, x[:, H + K :]))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(D)
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + first)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -math.inf).softmax(-1), v).flatten(1)


def random_steps(random: Random, lengths: list[int]) -> Iterator[list[Piece]]:
    """Every sequence from its start to its end, in chunks of any size beside others."""
    done = [0] * len(lengths)
    while unfinished := [i for i, length in enumerate(lengths) if done[i] < length]:
        step = []
        for index in random.sample(unfinished, random.randint(1, len(unfinished))):
            count = random.choice((1, 1, 2, 7, 16, 40, 130, 300))
            end = min(lengths[index], done[index] + count)
            step.append((index, done[index], end))
            done[index] = end
        yield step


def run(scene: Scene, steps: list[list[Piece]]) -> list[Tensor]:
    """Results of all positions of all sequences."""
    results: dict[int, list[Tensor]] = {}
    for step in steps:
        for (index, _, _), result in zip(step, scene.step(step), strict=True):
            results.setdefault(index, []).append(result)
    return [torch.cat(results[index]) for index in range(len(scene.qkv))]


SHAPES = list(itertools.product((1, 3, 4, 20), (16, 48, 64, 128, 256), (8, 16, 32, 64, 128)))
KINDS = [
    ("paged, matrix unit", "bfloat16"),
    ("paged, vectors", "bfloat16"),
    ("paged", "float32"),
    ("sdpa", "bfloat16"),
    ("sdpa", "float32"),
    ("fixed", "float32"),
]


@pytest.mark.parametrize(("backend", "dtype"), KINDS)
def test_results_are_those_of_plain_arithmetic(backend: str, dtype: str) -> None:
    device, random = device_for(dtype, backend), Random(backend + dtype)
    for seed, (group, head_dim, block_tokens) in enumerate(random.sample(SHAPES, 12 if "paged" in backend else 4)):
        lengths = [random.choice((1, 5, 16, 33, 127, 128, 129, 260)) for _ in range(random.randint(1, 3))]
        scene = Scene(
            device,
            lengths,
            group=group,
            num_kv_heads=random.choice((1, 2, 3) if group * head_dim < 500 else (1,)),
            head_dim=head_dim,
            block_tokens=block_tokens,
            norms=seed % 2 == 0,
            seed=seed,
        )
        results = run(scene, list(random_steps(random, lengths)))
        for index, result in enumerate(results):
            error = (result.double() - scene.expected(index)).abs().max()
            assert error < MAX_ERROR[dtype], f"{group=} {head_dim=} {block_tokens=} {lengths=} {index=} {error=}"


@pytest.mark.parametrize(("backend", "dtype"), KINDS[:4])
def test_a_long_context(backend: str, dtype: str) -> None:
    scene = Scene(device_for(dtype, backend), [3000, 40])
    scene.step([(0, 0, 2900)])
    together = scene.step([(0, 2900, 2999), (1, 0, 40)])
    last = scene.step([(0, 2999, 3000)])
    result = torch.cat((together[0], last[0])).double()
    assert (result - scene.expected(0, 2900)).abs().max() < MAX_ERROR[dtype]


# -- the same to the bit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "dtype"), KINDS[:3])
def test_a_row_does_not_depend_on_company_cut_or_place(backend: str, dtype: str) -> None:
    device, random = device_for(dtype, backend), Random(dtype)
    for group, head_dim, block_tokens in ((3, 64, 16), (1, 128, 32), (7, 48, 8), (20, 16, 128)):
        lengths = [random.randint(1, 400) for _ in range(4)]
        results = []
        for attempt in range(3):
            scene = Scene(
                device, lengths, group=group, head_dim=head_dim, block_tokens=block_tokens, blocks_seed=attempt
            )
            whole = [[(index, 0, length)] for index, length in enumerate(lengths)]
            results.append(run(scene, list(random_steps(random, lengths)) if attempt else whole))
        for others in results[1:]:
            assert all(map(torch.equal, results[0], others)), f"{group=} {head_dim=} {block_tokens=}"


@pytest.mark.parametrize(("backend", "dtype"), KINDS[:3])
def test_threads_that_share_a_context_change_nothing(backend: str, dtype: str) -> None:
    scene = Scene(device_for(dtype, backend), [2000, 300])
    assert isinstance(scene.backend, PagedAttention)
    scene.step([(0, 0, 2000), (1, 0, 300)])
    first: dict[str, Tensor] = {}
    for num_threads in (1, 2, 16, 100):
        scene.backend.shape.num_threads = num_threads
        for pieces in ([(0, 1999, 2000)], [(0, 1990, 2000)], [(0, 1990, 2000), (1, 260, 300)]):
            result = torch.cat(scene.step(pieces, times=3))
            assert torch.equal(first.setdefault(str(pieces), result), result)


# -- who is chosen -----------------------------------------------------------------------------------------------------


def test_models_that_the_kernel_cannot_serve_get_torch(caplog: pytest.LogCaptureFixture) -> None:
    device = device_for("float32", "paged")
    assert type(Scene(device, [4], head_dim=64).backend) is ATTENTION["paged"]
    assert not caplog.records
    assert type(Scene(device, [4], head_dim=24).backend) is ATTENTION["sdpa"]
    assert "attention.unsupported" in caplog.text
    invariant = dataclasses.replace(device, batch_invariant=True)
    assert type(Scene(invariant, [4], head_dim=24).backend) is ATTENTION["fixed"]


def test_a_machine_without_kernels_gets_torch() -> None:
    assert choose(EngineConfig(kernels="off")).attention == "sdpa"
    assert choose(EngineConfig(kernels="off", batch_invariant=True)).attention == "fixed"
