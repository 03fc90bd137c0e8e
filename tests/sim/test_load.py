"""Figures of a simulated replica, worked out by hand where a machine's costs make that possible."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from shoal.core.classes import DEFAULT_CLASSES
from shoal.core.limits import Limits
from shoal.core.plan import Slice, StepPlan
from shoal.core.request import Finish, Refusal
from shoal.core.scheduler import Scheduler
from shoal.core.stepcost import StepCost
from shoal.sim.agenda import Agenda
from shoal.sim.load import simulate
from shoal.sim.outcomes import Ledger
from shoal.workload import trace
from shoal.workload.arrivals import ClosedLoop, OpenLoop
from shoal.workload.latency import Slo
from shoal.workload.lengths import MIXES
from shoal.workload.trace import Row, Trace

MS = 1_000_000
PATIENT = {name: replace(service, max_wait_s=1e6) for name, service in DEFAULT_CLASSES.items()}
LIMITS = Limits(num_blocks=4096, max_model_len=4096, vocab_size=1000, max_num_seqs=8, classes=PATIENT)
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


def test_the_stages_of_a_pipeline_are_busy_while_enough_requests_decode() -> None:
    """Steps of 10 ms in each of two stages, of 8 tokens each: a token is there 20 ms after its plan, and the next plan
    of the same requests 0.3 ms later. In 10.15 ms each stage computes 8 of 16 requests."""
    load = Trace(tuple(Row(0, 16, 40) for _ in range(16)))
    limits = replace(LIMITS, max_num_seqs=16, num_stages=2, max_steps_in_flight=2)
    report = simulate(load, limits, StepCost((9.2 * MS, 0.1 * MS, 0.0, 0.0, 0.0)))
    tpots = sorted(latency.tpot_ns for latency in report.latencies)
    assert tpots[8] == pytest.approx(2 * 10.15 * MS, rel=0.05)
    assert report.output_tokens_per_s > 0.9 * 8 / 0.01015


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


def test_figures_by_class_are_of_that_class_alone() -> None:
    """One slot. Three tokens of the first: steps planned at 0.3, 10.6 and 20.9 ms, done at 30.9; the second at 31.2."""
    rows = (Row(0, 20, 3, "interactive"), Row(0, 20, 1, "batch"), Row(0, 5000, 1, "batch"))
    limits = replace(LIMITS, max_num_seqs=1, composer="fcfs")
    report = simulate(Trace(rows), limits, StepCost(TEN_MS_A_STEP))
    first, second = report.by_class()["interactive"], report.by_class()["batch"]
    assert (first.num_requests, second.num_requests, first.num_refused) == (1, 2, 0)
    assert second.refusals == {Refusal.CONTEXT_LENGTH: 1}
    assert [latency.ttft_ns for latency in first.latencies] == [TURN_NS + 10 * MS]
    assert [latency.ttft_ns for latency in second.latencies] == [4 * (TURN_NS + 10 * MS)]
    assert (first.worst_wait_ns, second.worst_wait_ns) == (TURN_NS, 31_200_000)
    slo = Slo(ttft_ns=42 * MS)
    assert (first.attainment(slo), second.attainment(slo), report.attainment(slo)) == (1.0, 0.5, 2 / 3)


def test_class_and_tenant_of_a_row_reach_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    submit = Scheduler.submit
    monkeypatch.setattr(Scheduler, "submit", lambda self, spec, now: (seen.append(spec), submit(self, spec, now))[1])
    simulate(Trace((Row(0, 20, 1, "batch", "someone"), Row(0, 20, 1))), LIMITS, StepCost(TEN_MS_A_STEP))
    assert [(spec.service_class, spec.tenant) for spec in seen] == [("batch", "someone"), ("standard", "")]


def test_a_wait_is_the_longest_time_without_a_slice_and_lasts_for_who_is_left_over() -> None:
    ledger = Ledger()
    ledger.sent("a", Row(10, 1, 2), 10)
    ledger.sent("b", Row(10, 1, 2), 10)
    for step, planned_ns, done_ns in ((1, 15, 20), (2, 50, 60)):
        ledger.step(StepPlan(step, [], [], [Slice("a", step, 1, (), -1, True)], 1, 0), planned_ns, done_ns)
        ledger.tokens("a", [7], done_ns)
    ledger.ended("a", Finish.LENGTH)
    assert ledger.num_open == 1
    report = ledger.report(Scheduler(LIMITS, hash_root=b"").view(), 200)
    assert [outcome.wait_ns for outcome in report.outcomes] == [30, 190]
    assert [outcome.answered for outcome in report.outcomes] == [True, False]
    assert (report.worst_wait_ns, report.duration_ns) == (190, 60)


def test_the_step_that_an_arrival_meets_is_a_long_one_more_often() -> None:
    """Steps of 10 and 30: of four moments, three are in the long one. (10 + 3 · 30) / 4."""
    ledger = Ledger()
    ledger.sent("a", Row(0, 1, 2), 0)
    for planned_ns, done_ns in ((0, 10), (10, 40)):
        ledger.step(StepPlan(1, [], [], [Slice("a", 0, 1, (), -1, True)], 1, 0), planned_ns, done_ns)
    ledger.step(StepPlan(3, [], [], [], 0, 0), 40, 40)  # copies alone are no step
    report = ledger.report(Scheduler(LIMITS, hash_root=b"").view(), 40)
    assert report.steps_ns == (10, 30) and report.step_met_ns() == 25
