"""Which layout is recommended, and the words for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from shoal.planner import catalogue, choose, explain
from shoal.planner.choose import Plan, Wanted
from shoal.planner.layouts import Cluster, Layout
from shoal.planner.model import FORMATS
from shoal.planner.predict import Load
from shoal.planner.weights import Precision

WANTED = Wanted(context=8192, load=Load(1024, 256), concurrency=64)


def plan(name: str, gpu: str, gpus: int, nodes: int = 1, between: str = "100gbe", **more: Any) -> Plan:
    model = catalogue.model(name)
    precision = more.pop("precision", Precision(model.dtype, model.quantization))
    only = more.pop("only", None)
    return choose.plan(
        model,
        catalogue.gpu(gpu),
        Cluster(gpus, nodes),
        dataclasses.replace(WANTED, **more),
        precision=precision,
        kv_dtype="bfloat16",
        between=catalogue.link(between),
        only=only,
    )


def chosen(made: Plan) -> Layout:
    assert made.chosen is not None
    return made.chosen.layout


def test_tensor_parallelism_within_a_node_and_replicas_across() -> None:
    made = plan("deepseek-v3", "h200-141gb", 8, 2)
    assert chosen(made) == Layout(tp=8, dp=2)
    first, *rest = explain.reasons(made)
    assert first.startswith("TP=8 inside each node, 2 replicas.")
    (across,) = (line for line in rest if line.startswith("TP=16"))
    assert "would send 2 x 61 all-reduces a token over 100 GbE" in across
    assert "−" in across.partition("tokens/s")[0]


def test_a_70b_model_on_one_80_gb_gpu_is_refused_and_told_what_fits() -> None:
    made = plan("llama-3.1-70b", "h100-80gb", 1, precision=Precision("float16"))
    assert made.chosen is None
    why, fits = explain.reasons(made)
    assert "llama-3.1-70b needs 141 GB (131.4 GiB) for its weights alone in float16" in why
    assert "one NVIDIA H100 SXM5 80 GB with 85.5 GB (79.6 GiB) does not serve it" in why
    assert fits.startswith("Fits: 2 x h100-80gb; 1 x h100-80gb with --quantization int4; 1 x h100-80gb with")


def test_what_is_said_to_fit_does() -> None:
    made = plan("llama-3.1-70b", "a100-40gb", 1)
    for text in explain.what_fits(made):
        number, _, gpu = text.partition(" x ")
        gpu, _, quantization = gpu.partition(" with --quantization ")
        per_node = min(int(number), catalogue.gpu(gpu).per_node)
        precision = Precision("bfloat16", FORMATS.get(quantization))
        assert plan("llama-3.1-70b", gpu, per_node, int(number) // per_node, precision=precision).chosen is not None


def test_pipeline_stages_of_a_node_each_where_a_node_is_too_small() -> None:
    made = plan("llama-3.1-405b", "h100-80gb", 8, 2, between="ib-ndr")
    assert chosen(made) == Layout(tp=8, pp=2, dp=1)
    assert "No layout within a node holds llama-3.1-405b" in explain.reasons(made)[0]


def test_a_small_model_has_a_replica_per_gpu() -> None:
    made = plan("smollm2-135m", "t4-16gb", 4, precision=Precision("float16"))
    assert chosen(made) == Layout(dp=4)


def test_targets_change_the_choice() -> None:
    """Throughput prefers small replicas where memory allows; a short time per token wants large ones."""
    plain = plan("llama-3.1-8b", "h100-80gb", 8, concurrency=2000)
    hurried = plan("llama-3.1-8b", "h100-80gb", 8, concurrency=200, tpot_s=0.008)
    assert chosen(plain).tp < chosen(hurried).tp
    assert hurried.chosen is not None and hurried.chosen.forecast is not None
    assert hurried.chosen.forecast.tpot_s <= 0.008


def test_what_cannot_be_kept_is_said() -> None:
    made = plan("llama-3.1-70b", "h100-80gb", 8, tpot_s=0.001)
    assert made.chosen is not None and made.chosen.misses
    assert "Nothing on these GPUs serves all that is asked: TPOT" in explain.reasons(made)[-1]


def test_a_layout_that_cannot_hold_all_requests_comes_after_one_that_can() -> None:
    made = plan("llama-3.1-70b", "h100-80gb", 8, concurrency=500)
    holds = [option.holds >= 500 for option in made.options if option.fits]
    assert holds == sorted(holds, reverse=True)
    assert made.options[-1].holds < 500


def test_the_usual_is_kept_where_the_unusual_is_hardly_faster() -> None:
    made = plan("llama-3.1-8b", "l4-24gb", 8)
    assert made.chosen is not None
    fast = max(option.tokens_per_s for option in made.options)
    assert made.chosen.usual or fast > (1 + choose.MARGIN) * max(o.tokens_per_s for o in made.options if o.usual)
    best = max((option for option in made.options if not option.usual), key=lambda option: option.tokens_per_s)
    slower = dataclasses.replace(made.chosen, tokens_per_s=best.tokens_per_s / 1.05, need=0)
    assert choose.choose([best, slower]) is slower
    assert choose.choose([best, dataclasses.replace(slower, tokens_per_s=best.tokens_per_s / 1.2)]) is best


def test_only_what_was_asked_for() -> None:
    made = plan("llama-3.1-70b", "h100-80gb", 8, only=Layout(4, 0, 1, 0))
    assert {(option.layout.tp, option.layout.cp) for option in made.options} == {(4, 1)}
    assert {option.layout.pp for option in made.options} == {1, 2}


def test_a_longer_context_than_a_gpu_holds_needs_ranks_that_share_it() -> None:
    made = plan("llama-3.1-8b", "a10-24gb", 1, context=100_000)
    assert made.chosen is None
    assert "GB are left for KV" in explain.reasons(made)[0]
    assert chosen(plan("llama-3.1-8b", "a10-24gb", 4, context=100_000)).ranks > 1


@pytest.mark.parametrize("concurrency", [1, 3, 64])
def test_replicas_without_work_give_no_tokens(concurrency: int) -> None:
    made = plan("llama-3.1-8b", "h100-80gb", 8, concurrency=concurrency, only=Layout(1, 1, 1, 0))
    (option,) = made.options
    assert option.forecast is not None
    busy = min(8, concurrency)
    assert option.tokens_per_s == pytest.approx(busy * option.forecast.tokens_per_s(WANTED.load))


def test_replicas_are_as_equally_full_as_can_be() -> None:
    eight, nine, sixteen = (
        plan("llama-3.1-8b", "h100-80gb", 8, concurrency=count, only=Layout(1, 1, 1, 0)).options[0].tokens_per_s
        for count in (8, 9, 16)
    )
    assert nine == pytest.approx(eight * 7 / 8 + sixteen / 8)
