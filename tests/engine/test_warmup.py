"""The steps that start-up times: they keep to the pool and to the model's length, and name only what is there."""

from __future__ import annotations

import pytest

from shoal.engine.warmup import sweep

BLOCK = 16


@pytest.mark.parametrize("num_blocks", [1, 2, 12, 300, 100_000])
@pytest.mark.parametrize("max_model_len", [16, 64, 600, 8192])
def test_the_sweep_keeps_to_the_pool_and_the_model(num_blocks: int, max_model_len: int) -> None:
    tables: dict[str, tuple[int, ...]] = {}
    computed: dict[str, int] = {}
    for number, plan in enumerate(sweep(num_blocks, BLOCK, 100, max_model_len), start=1):
        assert plan.step == number and plan.num_tokens == sum(part.count for part in plan.slices) <= 512
        for request in plan.leaves:
            del tables[request], computed[request]
        for admit in plan.admits:
            assert len(admit.tokens) <= max_model_len and max(admit.tokens) < 100
            tables[admit.id], computed[admit.id] = admit.blocks, admit.computed
        used = [block for table in tables.values() for block in table]
        assert len(set(used)) == len(used) and max(used) < num_blocks, "each request has blocks of its own"
        assert {part.id for part in plan.slices} == set(tables)
        for part in plan.slices:
            assert part.start == computed[part.id]
            computed[part.id] += part.count
            assert computed[part.id] <= min(max_model_len, BLOCK * len(tables[part.id]))
            assert part.from_step == (-1 if plan.admits else number - 1)


def test_it_has_few_and_many_rows_short_and_long_contexts_and_prompts() -> None:
    plans = list(sweep(10_000, BLOCK, 100, 8192))
    shapes = {(len(plan.slices), plan.slices[0].count, plan.slices[0].start >= 200) for plan in plans}
    assert {(1, 1, False), (1, 1, True), (16, 1, False), (16, 1, True), (64, 1, False)} <= shapes
    assert {(1, 512, False), (1, 512, True), (64, 8, False)} <= shapes
    assert not list(sweep(1, BLOCK, 100, 8)), "nothing fits"
