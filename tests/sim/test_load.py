"""Figures of a simulated replica, worked out by hand where a machine's costs make that possible."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from shoal.core.limits import Limits
from shoal.core.stepcost import StepCost
from shoal.sim.agenda import Agenda
from shoal.sim.load import simulate
from shoal.workload import trace
from shoal.workload.arrivals import ClosedLoop, OpenLoop
from shoal.workload.latency import Slo
from shoal.workload.lengths import MIXES
from shoal.workload.trace import Row, Trace

MS = 1_000_000
LIMITS = Limits(num_blocks=4096, max_model_len=4096, vocab_size=1000, max_num_seqs=8)
TEN_MS_A_STEP = (10.0 * MS, 0.0, 0.0, 0.0, 0.0)
TURN_NS = 300_000  # Modelled's usual delay between two steps


def test_agenda_keeps_the_order_of_adding_among_equal_times() -> None:
    agenda, seen = Agenda(), list[str]()
    agenda.at(5, lambda: seen.append("b"))

    def first() -> None:
        seen.append("a")
        agenda.at(5, lambda: seen.append("d"))

    agenda.at(3, first)
    agenda.at(5, lambda: seen.append("c"))
    agenda.at(6, lambda: seen.append("e"))
    agenda.run(until_ns=5)
    assert seen == ["a", "b", "c", "d"] and agenda.now_ns == 5
    with pytest.raises(AssertionError, match="is over"):
        agenda.at(4, lambda: None)


def test_one_request_alone_takes_a_step_a_token() -> None:
    """Due at 7 ms; turn at 7.3; steps of 10 ms, 0.3 ms apart: tokens at 17.3, 27.6, 37.9 ms."""
    report = simulate(Trace((Row(7 * MS, 20, 3),)), LIMITS, StepCost(TEN_MS_A_STEP))
    (latency,) = report.latencies
    assert latency.ttft_ns == TURN_NS + 10 * MS
    assert latency.tpot_ns == TURN_NS + 10 * MS
    assert latency.e2e_ns == 3 * (TURN_NS + 10 * MS)
    assert (report.num_steps, report.num_preemptions, report.num_refused) == (3, 0, 0)
    assert report.output_tokens_per_s == pytest.approx(3 / 0.0379)


def test_an_arrival_during_a_step_waits_for_the_next_turn() -> None:
    """Turn at 0.3 ms, its step ends at 10.3; who comes at 0.4 ms is planned at 10.6 and answered at 20.6."""
    report = simulate(Trace((Row(0, 20, 1), Row(400_000, 20, 1))), LIMITS, StepCost(TEN_MS_A_STEP))
    assert [latency.first_ns for latency in report.latencies] == [10_300_000, 20_600_000]
    assert report.num_steps == 2


def test_two_plans_in_flight_hide_the_turns() -> None:
    """The machine is never idle: token n comes at 0.3 + 10 n ms."""
    report = simulate(Trace((Row(0, 20, 4),)), replace(LIMITS, max_steps_in_flight=2), StepCost(TEN_MS_A_STEP))
    (latency,) = report.latencies
    assert latency.first_ns == TURN_NS + 10 * MS
    assert latency.last_ns == TURN_NS + 40 * MS


def test_closed_loop_never_has_more_live_than_callers() -> None:
    load = trace.make(ClosedLoop(3), MIXES["bimodal"], 20, seed=1)
    report = simulate(load, LIMITS, StepCost())
    assert len(report.latencies) == 20
    changes = sorted([(latency.due_ns, 1) for latency in report.latencies])
    changes += [(latency.last_ns, -1) for latency in report.latencies]
    live = most = 0
    for _, change in sorted(changes):
        live += change
        most = max(most, live)
    assert most == 3


def test_requests_that_never_fit_are_refused_and_count_as_misses() -> None:
    report = simulate(Trace((Row(0, 5000, 5), Row(0, 10, 5))), LIMITS, StepCost())
    assert (report.num_requests, report.num_refused, len(report.latencies)) == (2, 1, 1)
    assert report.attainment(Slo()) == 0.5


def test_equal_inputs_give_equal_reports() -> None:
    load = trace.make(OpenLoop(20.0), MIXES["chat"], 60, seed=3)
    limits = replace(LIMITS, num_blocks=200, max_steps_in_flight=2)
    assert simulate(load, limits, StepCost()) == simulate(load, limits, StepCost())


def test_a_small_pool_preempts_and_every_request_still_ends() -> None:
    load = trace.make(OpenLoop(40.0), MIXES["bimodal"], 60, seed=2)
    roomy = simulate(load, LIMITS, StepCost())
    tight = simulate(load, replace(LIMITS, num_blocks=40), StepCost())
    assert roomy.num_preemptions == 0 < tight.num_preemptions
    assert len(tight.latencies) == len(roomy.latencies) == 60
    assert roomy.ttft_ns and tight.ttft_ns and tight.ttft_ns.p99 > roomy.ttft_ns.p99


def test_latency_grows_with_the_rate_and_throughput_stays_within_the_machine() -> None:
    """8 sequences a step of >= 10 ms: at most 800 tokens a second, however many arrive."""
    found = [
        simulate(trace.make(OpenLoop(rate, math.inf), MIXES["chat"], 80, seed=4), LIMITS, StepCost(TEN_MS_A_STEP))
        for rate in (1.0, 10.0, 100.0)
    ]
    p50 = [report.e2e_ns.p50 for report in found if report.e2e_ns]
    assert p50[0] < p50[1] < p50[2]
    assert all(report.output_tokens_per_s < 800 for report in found)
