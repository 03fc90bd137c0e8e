"""Attention over shards of a context, in one process: the parts together are what attention over all of it gives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

import pytest
import torch
from torch import Tensor

from shoal.engine.model.spans import Shard
from shoal.engine.parallel.context import merge
from tests.engine.test_attention import MAX_ERROR, SHAPES, Piece, Scene, device_for, random_steps, run

pytestmark = pytest.mark.torch

KINDS = [
    ("paged, matrix unit", "bfloat16"),
    ("paged, vectors", "bfloat16"),
    ("paged", "float32"),
    ("sdpa", "bfloat16"),
    ("sdpa", "float32"),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Shards:
    """The ranks' scenes side by side: the same rows, tables and norms, each with a store of its own."""

    def __init__(
        self, backend: str, dtype: str, lengths: list[int], count: int, threads: int = 2, **shape: object
    ) -> None:
        device = device_for(dtype, backend, threads)
        self.scenes = [Scene(device, lengths, shard=Shard(count, index), **shape) for index in range(count)]  # type: ignore[arg-type]
        self.qkv = self.scenes[0].qkv
        self.expected = self.scenes[0].expected

    def parts(self, pieces: list[Piece], layer: int = 1) -> Tensor:
        config, rows = self.scenes[0].config, self.scenes[0].rows(pieces)
        parts = torch.full((len(self.scenes), len(rows), config.num_heads * (config.head_dim + 1)), math.nan)
        for scene, part in zip(self.scenes, parts, strict=True):
            scene.backend.attend_partly(layer, rows, scene.backend.prepare(scene.spans(pieces)), part)
        return parts.transpose(0, 1)

    def step(self, pieces: list[Piece], layer: int = 1) -> list[Tensor]:
        counts = [end - start for _, start, end in pieces]
        return list(merge(self.parts(pieces, layer), self.scenes[0].config.num_heads).split(counts))


@pytest.mark.parametrize(("backend", "dtype"), KINDS)
def test_parts_add_up_to_plain_arithmetic(backend: str, dtype: str) -> None:
    random = Random(backend + dtype)
    for seed, (group, head_dim, block_tokens) in enumerate(random.sample(SHAPES, 6 if "paged" in backend else 3)):
        count = random.choice((2, 3, 4))
        lengths = [random.choice((1, 5, 16, 33, 127, 257, 400)) for _ in range(random.randint(1, 3))]
        shape = {"group": group, "head_dim": head_dim, "block_tokens": block_tokens, "seed": seed}
        num_kv_heads = random.choice((1, 2, 3) if group * head_dim < 500 else (1,))
        shards = Shards(backend, dtype, lengths, count, num_kv_heads=num_kv_heads, norms=seed % 2 == 0, **shape)
        results = run(shards, list(random_steps(random, lengths)))  # type: ignore[arg-type]
        for index, result in enumerate(results):
            error = (result.double() - shards.expected(index)).abs().max()
            assert error < MAX_ERROR[dtype], f"{count=} {shape=} {lengths=} {index=} {error=}"


@pytest.mark.parametrize(("backend", "dtype"), KINDS)
def test_a_long_context_is_shared(backend: str, dtype: str) -> None:
    shards = Shards(backend, dtype, [3000, 40], 2)
    shards.step([(0, 0, 2900)])
    together = shards.step([(0, 2900, 2999), (1, 0, 40)])
    last = shards.step([(0, 2999, 3000)])
    result = torch.cat((together[0], last[0])).double()
    assert (result - shards.expected(0, 2900)).abs().max() < MAX_ERROR[dtype]
    for scene in shards.scenes:
        assert len(scene.tables[0]) == 3000 // 32 + 1, "each keeps half"


@pytest.mark.parametrize(("backend", "dtype"), KINDS)
def test_who_sees_nothing_weighs_nothing(backend: str, dtype: str) -> None:
    """The first tokens of a prompt: those behind them are on other ranks, and a rank may have none at all."""
    shards = Shards(backend, dtype, [2, 40], 4)
    parts = shards.parts([(0, 0, 2), (1, 0, 40)])
    heads = shards.scenes[0].config.num_heads
    out, lse = parts[..., :-heads], parts[..., -heads:]
    assert (lse[0].isneginf() == torch.tensor([[False], [True], [True], [True]])).all()
    assert (lse[4].isneginf() == torch.tensor([[False], [False], [False], [True]])).all()
    assert not out[0, 1:].any() and out[0, 0].any()
    assert out.isfinite().all() and not lse.isnan().any()


@pytest.mark.parametrize(("backend", "dtype"), KINDS[:3])
def test_a_part_does_not_depend_on_company_cut_or_threads(backend: str, dtype: str) -> None:
    whole = Shards(backend, dtype, [2100, 300], 2, threads=1)
    whole.step([(0, 0, 2099)])
    cut = Shards(backend, dtype, [2100, 300], 2, threads=2, blocks_seed=1)
    for start in range(0, 2099, 131):
        cut.step([(0, start, min(start + 131, 2099))])
    alone = whole.step([(0, 2099, 2100)])[0]
    cut.step([(1, 0, 200)])
    assert torch.equal(alone, cut.step([(1, 200, 300), (0, 2099, 2100)])[1])
