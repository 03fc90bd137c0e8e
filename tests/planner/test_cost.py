"""The roofline of a step, against arithmetic by hand, and what a load makes of it."""

from __future__ import annotations

import dataclasses
import math

import pytest

from shoal.core.plan import Slice
from shoal.core.stepcost import StepCost
from shoal.planner import catalogue, weights
from shoal.planner.catalogue import Link
from shoal.planner.cost import Machine, Net, Rates, gpu_rates
from shoal.planner.layouts import Cluster, Layout
from shoal.planner.predict import Curve, Limits, Load, forecast
from shoal.planner.weights import Precision

BF16 = Precision("bfloat16")
LLAMA = catalogue.model("llama-3.1-8b")
RATES = Rates(1e12, ((1, 1e14),), 1e14, 1e12, step_s=1e-3)
LINK = Link(name="link", title="link", bytes_per_s=1e11, efficiency=1.0, latency_s=1e-5)
SLOW = dataclasses.replace(LINK, name="slow", bytes_per_s=1e10, latency_s=1e-4, per_node=True)
WEIGHTS = 2 * (8_030_261_248 - 128_256 * 4096)  # all but the embedding
FLOPS = 2 * (8_030_261_248 - 2 * 128_256 * 4096 - 65 * 4096)  # of the layers' matrices
KV = 131_072


def machine(layout: Layout = Layout(), cluster: Cluster = Cluster(8), **changes: object) -> Machine:
    base = Machine(LLAMA, BF16, "bfloat16", RATES, Net(LINK, SLOW), cluster, layout)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def slices(*parts: tuple[int, int]) -> tuple[int, ...]:
    """(start, count) each."""
    return StepCost.features([Slice(str(n), start, count, (), -1, True) for n, (start, count) in enumerate(parts)])


def test_a_decode_waits_for_weights_and_keys() -> None:
    seconds = machine().predict(slices(*[(999, 1)] * 4), 4)
    assert seconds == pytest.approx(1e-3 + WEIGHTS / 1e12 + 4 * 1000 * KV / 1e12)


def test_a_prompt_waits_for_arithmetic() -> None:
    pairs = 2000 * 2001 // 2
    attention = 32 * 4 * 32 * 128 * pairs
    logits = 2 * 128_256 * 4096
    seconds = machine().predict(slices((0, 2000)), 1)
    assert seconds == pytest.approx(1e-3 + (FLOPS * 2000 + logits) / 1e14 + attention / 1e14)


def test_tensor_parallel_ranks_share_the_work_and_meet_twice_a_layer() -> None:
    norms = 2 * 65 * 4096
    seconds = machine(Layout(4)).predict(slices((999, 1)), 1)
    share = ((WEIGHTS - norms) / 4 + norms + 1000 * KV / 4) / 1e12
    meeting = 2 * math.log2(4) * 1e-5 + 2 * 3 / 4 * 4096 * 2 / 1e11
    assert seconds == pytest.approx(1e-3 + share + 64 * meeting)


def test_across_nodes_they_also_meet_over_the_slower_link() -> None:
    one = machine(Layout(8), Cluster(8, 2)).all_reduce_s(100)
    two = machine(Layout(16), Cluster(8, 2)).all_reduce_s(100)
    bytes_each = 100 * 4096 * 2 / 8  # that a rank of a node sends to its like in the other, 8 at once over one link
    assert two - one == pytest.approx(2 * 1e-4 + bytes_each / (1e10 / 8))


def test_ranks_that_share_contexts_share_the_keys_and_what_is_behind_the_attention() -> None:
    shared = machine(Layout(cp=2))
    read = weights.Read(LLAMA, BF16, cp=2).num_bytes(1)
    meeting = 32 * (2 * shared.all_reduce_s(1) + shared.merge_s(1))
    seconds = shared.predict(slices((99_999, 1)), 1)
    assert seconds == pytest.approx(1e-3 + (read + 100_000 * KV / 2) / 1e12 + meeting)
    assert WEIGHTS / 2 < read < WEIGHTS
    assert shared.merge_s(1) == pytest.approx(1e-5 + 4 * 32 * 129 / 1e11 / 2)


def test_matrix_rates_are_interpolated_in_time() -> None:
    rates = dataclasses.replace(RATES, matrix=((1, 1e9), (16, 8e9), (64, 1e10)))
    assert rates.matrix_s(1e9, 1) == 1
    assert rates.matrix_s(1e9, 16) == 2
    assert rates.matrix_s(1e9, 64) == pytest.approx(6.4)
    assert rates.matrix_s(1e9, 40) == pytest.approx((2 + 6.4) / 2)
    assert rates.matrix_s(1e9, 128) == pytest.approx(12.8)


def test_one_sequence_in_a_pipeline_leaves_the_other_stages_idle() -> None:
    layout = Layout(pp=4)
    found = forecast(machine(layout), Load(1000, 100), 1)
    assert found.bubble == pytest.approx(0.75, abs=0.02)
    assert forecast(machine(layout), Load(1000, 100), 32).bubble < 0.3
    assert forecast(machine(), Load(1000, 100), 1).bubble == 0


def test_tokens_a_second_follow_from_the_times() -> None:
    found = forecast(machine(), Load(1000, 100), 8)
    assert found.tokens_per_s(Load(1000, 100)) == pytest.approx(800 / (found.ttft_s + 99 * found.tpot_s))


def test_a_long_prompt_takes_several_steps() -> None:
    whole = forecast(machine(), Load(4000, 100), 4, Limits(max_tokens=8192))
    cut = forecast(machine(), Load(4000, 100), 4, Limits(max_tokens=512))
    assert cut.ttft_s > whole.ttft_s
    assert cut.prompt_s == pytest.approx(whole.prompt_s, rel=0.2)


def test_more_at_once_take_longer_and_give_more() -> None:
    found = [forecast(machine(), Load(500, 200), running) for running in (1, 2, 4, 8, 16, 32, 64)]
    assert [each.tpot_s for each in found] == sorted(each.tpot_s for each in found)
    rates = [each.tokens_per_s(Load(500, 200)) for each in found]
    assert rates == sorted(rates)


def test_at_a_rate_as_many_run_as_littles_law_says() -> None:
    load = Load(500, 200)
    curve = Curve(machine(), load, 64)
    for rate in (0.5, 2.0, 5.0):
        found = curve.at(rate)
        assert found is not None
        assert found.running == pytest.approx(rate * (found.ttft_s + 199 * found.tpot_s), rel=0.1, abs=1)
    assert curve.at(1000.0) is None
    slow, busy = curve.at(0.01), curve.at(5.0)
    assert slow is not None and busy is not None and busy.ttft_s > slow.ttft_s


def test_only_formats_that_the_gpu_has_a_rate_for() -> None:
    t4 = catalogue.gpu("t4-16gb")
    with pytest.raises(ValueError, match="no matrix rate of t4-16gb for it: allowed: float16"):
        gpu_rates(t4, BF16)
    assert gpu_rates(t4, Precision("float16")).matrix == ((1, 6.5e13 * t4.flops_share),)


def test_the_experts_of_a_batch_are_read_once_each() -> None:
    model = catalogue.model("qwen3-30b-a3b")
    mine = dataclasses.replace(machine(), model=model)
    one, many = (mine.predict(slices(*[(10, 1)] * count), count) for count in (1, 64))
    read = weights.Read(model, BF16)
    kv = 2 * 48 * 4 * 128 * 2 * 11
    assert many - one == pytest.approx((read.num_bytes(64) - read.num_bytes(1) + 63 * kv) / 1e12)
