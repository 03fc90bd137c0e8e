"""The arithmetic of the scheduling bench by hand, and all of it on a small simulated load."""

from __future__ import annotations

from argparse import Namespace

import pytest

import scheduling
from common import Report
from engine import equal_classes
from scheduling import Shape, Simulated, Yardstick, loads_in_bursts, measure, share_done
from shoal.core.limits import Limits
from shoal.sim.outcomes import Outcome
from shoal.workload.arrivals import Bursts
from shoal.workload.latency import Slo
from shoal.workload.trace import Row, Trace

COST = (11e6, 1.6e5, 60.0, 1e5, 600.0)
LIMITS = Limits(
    num_blocks=320,
    max_model_len=2048,
    vocab_size=1000,
    max_num_seqs=16,
    max_step_ns=100_000_000,
    num_host_blocks=1000,
    block_bytes=360 << 10,
)


@pytest.mark.parametrize(("now_ns", "share"), [(99, 0.0), (100, 0.2), (150, 0.4), (300, 1.0), (400, 1.0)])
def test_an_answer_under_way_counts_by_its_share(now_ns: int, share: float) -> None:
    """Five tokens, from 100 to 300."""
    outcome = Outcome(Row(0, 10, 5), 0, 0, tokens=[7] * 5, first_ns=100, last_ns=300)
    assert share_done(outcome, now_ns) == pytest.approx(share)


def test_a_refused_request_is_no_share_of_the_capacity() -> None:
    assert share_done(Outcome(Row(0, 10, 5), 0, 0), 100) == 0.0


def test_load_in_bursts_by_hand() -> None:
    """Bursts from 1 s to 3 s and from 4 s to 6 s; eight requests in 2 s are 4 per second, twice the capacity."""
    rows = [Row(500_000_000, 1, 1, "interactive")]
    rows += [Row(1_500_000_000, 1, 1, "interactive")] * 6 + [Row(2_900_000_000, 1, 1, "batch")] * 2
    rows += [Row(4_500_000_000, 1, 1, "standard")]
    yard = Yardstick(capacity_per_s=2.0, interactive_per_s=10.0, slos={})
    found = loads_in_bursts(Trace(tuple(rows)), Bursts(1.0, 1.0, 4.0, 2.0), yard)
    assert found == [(pytest.approx(2.0), pytest.approx(0.3)), (pytest.approx(0.25), 0.0)]


def test_targets_go_to_the_classes_that_have_some() -> None:
    slos = {name: Slo(30_000_000, 20_000_000) for name in ("interactive", "standard", "batch")}
    classes = Yardstick(1.0, 1.0, slos).classes()
    assert [(each.ttft_ms, each.tpot_ms) for each in classes.values()] == [(30.0, 20.0), (30.0, 20.0), (0.0, 0.0)]
    assert len({each.rank for each in equal_classes().values()}) == 1


def test_three_composers_on_a_small_simulated_load(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("scheduling", Namespace(quick=True, json=None))
    shape = Shape(num_alone=2, num_saturated=48, num_calm=10, num_burst=30, num_cycles=1, num_rounds=1)
    rows = measure(report, Simulated(LIMITS, COST), shape)
    report.finish()
    assert [row[1] for row in rows] == ["static"] * 3 + ["fcfs"] * 3 + ["value"] * 3
    assert all(len(row) == len(scheduling.COLUMNS) for row in rows)
    by_cell = {(row[1], row[3]): dict(zip(scheduling.COLUMNS, row, strict=True)) for row in rows}
    for service_class in ("interactive", "standard", "batch"):
        sent = {by_cell[composer, service_class]["sent"] for composer in scheduling.COMPOSERS}
        assert len(sent) == 1, "each composer gets the same trace"
    fast, slow = by_cell["value", "interactive"], by_cell["static", "interactive"]
    assert fast["tokens/s"] > 1.5 * slow["tokens/s"] and fast["attained"] > slow["attained"]
    assert "interactive load in the worst burst" in capsys.readouterr().out
