"""Which layouts there are, and how a pipeline is cut."""

from __future__ import annotations

from itertools import combinations, pairwise
from random import Random

import pytest

from shoal.planner import catalogue, layouts
from shoal.planner.layouts import Cluster, Layout
from shoal.planner.model import read


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.1-70b", "qwen2.5-7b", "deepseek-v3"])
@pytest.mark.parametrize("cluster", [Cluster(1), Cluster(3), Cluster(8), Cluster(4, 3), Cluster(8, 2)])
def test_layouts_fit_the_cluster_and_the_model(name: str, cluster: Cluster) -> None:
    model = catalogue.model(name)
    found = list(layouts.every(model, cluster))
    assert len(set(found)) == len(found)
    assert Layout(1, 1, 1, cluster.gpus) in found
    for layout in found:
        assert layout.tp in layouts.allowed_tp(model)
        assert layout.gpus <= cluster.gpus < layout.gpus + layout.ranks * cluster.nodes
        if layout.ranks > cluster.gpus_per_node:
            assert layout.ranks % cluster.gpus_per_node == 0, "it fills whole nodes"
        else:
            assert layout.dp % cluster.nodes == 0, "no replica lies in two nodes"


def test_what_needs_a_reason() -> None:
    cluster = Cluster(8, 2)
    assert [layouts.need(layout, cluster) for layout in (Layout(1), Layout(8), Layout(4, dp=4))] == [0, 0, 0]
    assert layouts.need(Layout(8, pp=2), cluster) == 1
    assert [layouts.need(layout, cluster) for layout in (Layout(16), Layout(4, cp=2), Layout(4, pp=2))] == [2, 2, 2]


def test_ranks_that_talk_most_are_neighbours() -> None:
    cluster = Cluster(8, 4)
    assert [cluster.spans(tp) for tp in (1, 8, 16, 32)] == [1, 1, 2, 4]
    assert cluster.spans(2, stride=8) == 2, "context-parallel ranks of TP=8 are a node apart"
    assert cluster.spans(2, stride=4) == 1


def test_stages_are_as_equal_as_can_be() -> None:
    """Against every way to cut it."""
    chance = Random(1)
    for _ in range(200):
        costs = [chance.randrange(1, 20) for _ in range(chance.randrange(1, 9))]
        pp = chance.randrange(1, len(costs) + 1)
        found = layouts._balanced(costs, pp)
        assert [part.start for part in found] == [0, *(part.stop for part in found[:-1])]
        assert found[-1].stop == len(costs) and len(found) == pp and all(found)
        slowest = max(sum(costs[layer] for layer in part) for part in found)
        for cuts in combinations(range(1, len(costs)), pp - 1):
            ends = (0, *cuts, len(costs))
            assert slowest <= max(sum(costs[a:b]) for a, b in pairwise(ends))


def test_the_last_stage_has_fewer_layers_for_it_has_the_output_matrix() -> None:
    stages = layouts.stages(catalogue.model("smollm2-135m"), 3)
    assert [len(stage) for stage in stages][-1] < len(stages[0])
    config = {**catalogue.models()["llama-3.1-8b"]["config"], "vocab_size": 100}
    assert [len(stage) for stage in layouts.stages(read(config, "few words"), 4)] == [8, 8, 8, 8]


@pytest.mark.parametrize("name", ["smollm2-135m", "llama-3.2-1b", "llama-3.1-70b"])
def test_stages_are_those_that_the_engine_makes(name: str) -> None:
    from shoal.engine.model.registry import ARCHITECTURES
    from shoal.engine.parallel.layout import stage_of

    config = catalogue.models()[name]["config"]
    model = ARCHITECTURES[config["architectures"][0]]({"rms_norm_eps": 1e-5, **config})
    for pp in range(1, 9):
        found = [stage_of(model, index, pp) for index in range(pp)]
        assert [range(each.first, each.end) for each in found] == list(layouts.stages(catalogue.model(name), pp))
