"""The request table: what the model and its kernels are handed for a plan."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.core.plan import Admit, Slice, StepPlan
from shoal.core.request import Sampling
from shoal.engine.batch import Batch, RequestTable
from shoal.engine.config import EngineConfig
from shoal.engine.device import choose

pytestmark = pytest.mark.torch

BLOCK = 16


@pytest.fixture
def table() -> RequestTable:
    return RequestTable(choose(EngineConfig(dtype="float32", threads=1)), BLOCK, vocab_size=100)


def admit(name: str, num_tokens: int, blocks: tuple[int, ...]) -> Admit:
    tokens = tuple(range(num_tokens))
    return Admit(name, tokens, num_tokens, 0, blocks, Sampling(temperature=0), 0, 0, ())


def build(table: RequestTable, slices: list[Slice], admits: list[Admit], leaves: list[str]) -> Batch:
    plan = StepPlan(1, leaves, admits, slices, sum(piece.count for piece in slices), 0)
    table.take_in(plan)
    return table.build(plan)


def test_spans_are_what_kernels_in_c_take(table: RequestTable) -> None:
    """40 tokens need 3 blocks and 5 need 1: the table is as wide as the longest slice needs, no wider."""
    slices = [Slice("long", 0, 40, (), -1, True), Slice("short", 0, 5, (), -1, True)]
    batch = build(table, slices, [admit("long", 40, (7, 8, 9, 10)), admit("short", 5, (3,))], [])
    assert [column.tolist() for column in batch.spans] == [[0, 40], [0, 0], [40, 5], [[7, 8, 9], [3, 0, 0]]]
    assert all(column.dtype == np.int32 and column.flags.c_contiguous for column in batch.spans)


def test_a_table_row_holds_nothing_of_its_last_owner(table: RequestTable) -> None:
    table.take_in(StepPlan(1, [], [admit("gone", 40, (7, 8, 9))], [], 0, 0))
    slices = [Slice("other", 0, 48, (), -1, True), Slice("next", 0, 5, (), -1, True)]
    batch = build(table, slices, [admit("next", 5, (3,)), admit("other", 48, (4, 5, 6))], ["gone"])
    assert batch.spans.table_SB.tolist() == [[4, 5, 6], [3, 0, 0]]


def test_a_slice_takes_its_tokens_from_the_table(table: RequestTable) -> None:
    batch = build(table, [Slice("a", 14, 4, (), -1, True)], [admit("a", 20, (7, 5))], [])
    assert batch.tokens_T.tolist() == [14, 15, 16, 17]
    assert batch.last_rows_R == [3]


def test_a_token_that_comes_late_is_dropped_where_its_row_has_another_owner(table: RequestTable) -> None:
    """Both for an id that left, and for one that left and came back with what it has by then."""
    build(table, [], [admit("a", 20, (7, 5)), admit("b", 20, (1, 2)), admit("c", 20, (3, 4))], [])
    places = [(table.rows[name], 20) for name in "abc"]
    build(table, [], [admit("other", 30, (7, 5)), admit("b", 21, (1, 2))], ["a", "b"])
    table.store_late(9, places, [71, 72, 73])
    batch = build(table, [Slice(id, 20, 1, (), -1, True) for id in ("other", "b", "c")], [], [])
    assert batch.tokens_T.tolist() == [20, 20, 73]
    assert [table.rows[id].sampled_step for id in ("other", "b", "c")] == [-1, -1, 9]


def test_blocks_are_fresh_but_for_those_that_hold_computed_tokens(table: RequestTable) -> None:
    """20 tokens that were found or copied back lie in two blocks, and nobody else's are in the second."""
    hit = admit("back", 40, (7, 8, 9))._replace(computed=20)
    plan = StepPlan(1, [], [hit, admit("new", 5, (3,))], [Slice("back", 20, 20, (4,), -1, False)], 20, 0)
    assert table.take_in(plan) == [9, 3, 4]


def test_settings_follow_who_samples(table: RequestTable) -> None:
    """They are kept from step to step as long as the same requests sample, in the same order."""
    temperatures = {"a": 0.0, "b": 0.5, "c": 1.0}
    admits = [
        Admit(name, (1, 2), 2, 0, (block,), Sampling(temperature=temperature, seed=block), block, 0, ())
        for block, (name, temperature) in enumerate(temperatures.items())
    ]

    def settings(names: str, start: int, admits: list[Admit], leaves: list[str]) -> list[list[float]]:
        sampling = build(table, [Slice(name, start, 1, (), -1, True) for name in names], admits, leaves).sampling
        assert sampling is not None
        columns = (sampling.temperature_R, sampling.seed_R, sampling.choice_R, sampling.position_R)
        return [column.tolist() for column in columns]

    assert settings("abc", 2, admits, []) == [[0, 0.5, 1], [0, 1, 2], [0, 1, 2], [3, 3, 3]]
    assert settings("abc", 3, [], []) == [[0, 0.5, 1], [0, 1, 2], [0, 1, 2], [4, 4, 4]]
    assert settings("cb", 4, [], []) == [[1, 0.5], [2, 1], [2, 1], [5, 5]]
    again = admits[2]._replace(sampling=Sampling(temperature=2, seed=7))
    assert settings("cb", 5, [again], ["c"]) == [[2, 0.5], [7, 1], [2, 1], [6, 6]]


def test_bans_and_histories_move_on_with_each_step(table: RequestTable) -> None:
    """Stop tokens are banned until two outputs are there; what a penalty looks at grows by a token a step."""
    sampling = Sampling(temperature=0, presence_penalty=1.0)
    admits = [Admit("a", (1, 2), 2, 0, (0,), sampling, 0, 2, (9,))]
    seen = []
    for start in (1, 2, 3):
        batch = build(table, [Slice("a", start, 1, (), -1, True)], admits if start == 1 else [], [])
        assert batch.sampling is not None and batch.sampling.history is not None
        seen.append((batch.sampling.banned[1].tolist(), batch.sampling.history.lengths_P.tolist()))
    assert seen == [([9], [2]), ([9], [3]), ([], [4])]
