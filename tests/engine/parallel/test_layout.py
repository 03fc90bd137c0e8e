"""Ranks and their groups, and which sizes a model allows."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from shoal.engine.model.config import ModelConfig, Rope
from shoal.engine.parallel.layout import AXES, Layout, Part, Share, Split, Stage, stage_of

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    norm_eps=1e-5,
    rope=Rope(),
    max_context=8192,
    tied=True,
)


def test_neighbours_are_those_that_share_a_layer() -> None:
    layout = Layout(tp=2, cp=3, pp=2)
    assert layout.size == 12
    assert layout.group(0, "layer") == (0, 1, 2, 3, 4, 5)
    assert layout.group(9, "layer") == (6, 7, 8, 9, 10, 11)
    assert layout.group(0, "cp") == (0, 2, 4)
    assert layout.group(5, "pp") == (5, 11)
    assert [layout.rank(layout.place(rank)) for rank in range(12)] == list(range(12))


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=4), Layout(tp=3, pp=2), Layout(tp=2, cp=2, pp=3)], ids=str)
def test_groups_of_an_axis_hold_every_rank_once(layout: Layout) -> None:
    for axis in AXES:
        groups = layout.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.size))
        assert all(group == layout.group(rank, axis) for group in groups for rank in group)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "fits"),
    [
        (9, 3, "1, 3, 9"),
        (8, 4, "1, 2, 4, 8"),
        (12, 12, "1, 2, 3, 4, 6, 12"),
        (8, 1, "1, 2, 4, 8"),
        (28, 4, "1, 2, 4, 28"),
    ],
)
def test_a_size_that_does_not_divide_the_heads_is_refused_with_those_that_do(
    heads: int, kv_heads: int, fits: str
) -> None:
    model = replace(SMOLLM2, num_heads=heads, num_kv_heads=kv_heads)
    for tp in map(int, fits.split(", ")):
        Layout(tp=tp).check(model)
    with pytest.raises(
        ValueError,
        match=rf"tensor_parallel_size is 5; .* {heads} query .* {kv_heads} key/value heads: allowed: {fits}$",
    ):
        Layout(tp=5).check(model)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_parts_of_a_dimension_are_all_of_it(size: int) -> None:
    parts = [Split(rank, size).part(288) for rank in range(size)]
    assert parts[0].first == 0 and parts[-1].end == 288
    assert all(before.end == after.first for before, after in itertools.pairwise(parts))
    assert max(part.size for part in parts) - min(part.size for part in parts) <= 1


def test_key_value_heads_are_shared_where_there_are_fewer_than_ranks() -> None:
    """Those that a rank's query heads belong to."""
    assert [Split(rank, 9).kv_heads(SMOLLM2) for rank in range(9)] == [Part(n // 3, n // 3 + 1, 3) for n in range(9)]
    assert [Split(rank, 3).kv_heads(SMOLLM2) for rank in range(3)] == [Part(n, n + 1, 3) for n in range(3)]
    for size in (3, 9):
        for rank in range(size):
            split = Split(rank, size)
            heads, kv_heads = split.part(9), split.kv_heads(SMOLLM2)
            assert {head // 3 for head in range(heads.first, heads.end)} == set(range(kv_heads.first, kv_heads.end))
            assert Share(split).config(SMOLLM2).num_heads == heads.size


def test_stages_take_alike_long() -> None:
    """SmolLM2's output matrix is as large as eight layers; a large model's is not worth one."""
    layers = [[tuple(stage_of(SMOLLM2, index, of)[2:]) for index in range(of)] for of in (1, 2, 3)]
    assert layers == [[(0, 30)], [(0, 19), (19, 30)], [(0, 12), (12, 25), (25, 30)]]
    large = replace(SMOLLM2, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64, head_dim=128)
    assert [stage_of(large, index, 4)[2:] for index in range(4)] == [(0, 20), (20, 40), (40, 60), (60, 80)]
    tiny = replace(SMOLLM2, num_layers=2)
    assert [stage_of(tiny, index, 2) for index in range(2)] == [Stage(0, 2, 0, 1), Stage(1, 2, 1, 2)]


def test_ranks_of_a_stage_share_what_contexts_do_not_split() -> None:
    """Heads by tp; the inner size, and of the attention's result what each goes on with, by tp x cp."""
    shares = [Share(Split(tp, 3), Split(cp, 2)) for cp in range(2) for tp in range(3)]
    assert [share.width for share in shares] == [Split(rank, 6) for rank in range(6)]
    assert all(share.config(SMOLLM2).num_heads == 3 for share in shares)
    assert sum(share.config(SMOLLM2).intermediate_size for share in shares) == 1536
    values = [
        value
        for share in shares
        for first in (share.heads.part(9).first * 64 + share.attended(SMOLLM2).first,)
        for value in range(first, first + share.attended(SMOLLM2).size)
    ]
    assert sorted(values) == list(range(576))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"pipeline_parallel_size is 3; the model has 2 layers: allowed: as many$"):
        Layout(pp=3).check(replace(SMOLLM2, num_layers=2))
