"""The smallest fleet for a rate."""

from __future__ import annotations

import dataclasses

import pytest

from shoal.planner import catalogue, fleet
from shoal.planner.choose import Wanted
from shoal.planner.fleet import HEADROOM, Fleet
from shoal.planner.memory import pinned_bytes
from shoal.planner.predict import Load
from shoal.planner.weights import Precision

WANTED = Wanted(context=8192, load=Load(1024, 256), concurrency=1, ttft_s=1.0, tpot_s=0.05)
KINDS = ("h100-80gb", "a100-80gb", "l4-24gb", "t4-16gb")


def smallest(rate: float, wanted: Wanted = WANTED, kinds: tuple[str, ...] = KINDS) -> list[Fleet]:
    return fleet.smallest_fleets(
        catalogue.model("llama-3.1-8b"),
        [catalogue.gpu(name) for name in kinds],
        rate,
        wanted,
        precision=Precision("bfloat16"),
        kv_dtype="bfloat16",
        between=catalogue.link("100gbe"),
    )


def test_a_fleet_per_kind_smallest_first_and_each_keeps_the_targets() -> None:
    found = smallest(20.0)
    assert {each.gpu.name for each in found} == set(KINDS)
    assert [each.gpus for each in found] == sorted(each.gpus for each in found)
    for each in found:
        assert each.forecast.ttft_s <= WANTED.ttft_s and each.forecast.tpot_s <= WANTED.tpot_s
        assert 20.0 / each.layout.dp <= HEADROOM * each.rate_per_replica
        assert each.memory.sequence_bytes(1280) * each.forecast.running <= each.memory.pool


def test_one_replica_less_would_be_too_few() -> None:
    for each in smallest(20.0):
        if each.layout.dp > 1:
            assert 20.0 / (each.layout.dp - 1) > HEADROOM * each.rate_per_replica


def test_more_requests_and_tighter_targets_take_more() -> None:
    few, many = (smallest(rate, kinds=("l4-24gb",))[0] for rate in (5.0, 40.0))
    assert few.gpus < many.gpus
    assert many.gpus <= 8 * few.gpus
    tight = smallest(5.0, dataclasses.replace(WANTED, tpot_s=0.02), ("l4-24gb",))[0]
    assert tight.gpus > few.gpus


def test_targets_that_no_number_of_gpus_keeps() -> None:
    assert smallest(1.0, dataclasses.replace(WANTED, tpot_s=1e-4)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_host_memory_parks_all_that_runs_on_a_node(kind: str) -> None:
    (found,) = smallest(20.0, kinds=(kind,))
    whole = found.forecast.running * 1280 * 131_072
    ranks = found.layout.ranks * min(found.layout.dp, found.gpu.per_node // found.layout.ranks)
    assert found.host_bytes_per_node == ranks * pinned_bytes(whole // found.layout.ranks)
    assert found.nodes * found.gpu.per_node >= found.gpus
