"""What a scrape of an engine shows of classes, parking and waiting."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from shoal.core.plan import ClassView, View
from shoal.engine.loop import Step, Turn, Wait
from shoal.engine.metrics import EngineCollector, StepMetrics
from shoal.engine.parallel.layout import Layout

VIEW = View(
    step=7,
    num_running=3,
    num_waiting=5,
    waiting_tokens=0,
    free_blocks=1,
    cached_blocks=2,
    total_blocks=8,
    preemptions=4,
    parks=3,
    free_host_blocks=6,
    total_host_blocks=8,
    swapped_out_bytes=3000,
    swapped_in_bytes=2000,
    classes={"interactive": ClassView(2, 1, 0, 500_000_000), "batch": ClassView(1, 4, 3, 90_000_000_000)},
)


def test_the_view_is_shown_by_class_and_with_the_host_tier() -> None:
    registry = CollectorRegistry()
    server = SimpleNamespace(view=VIEW, ready=True, num_sessions=0, ended={})
    registry.register(EngineCollector(server))  # type: ignore[arg-type]
    value = registry.get_sample_value
    assert value("shoal:num_preemptions_total") == 4 and value("shoal:num_parks_total") == 3
    assert value("shoal:kv_swapped_out_bytes_total") == 3000 and value("shoal:kv_swapped_in_bytes_total") == 2000
    assert value("shoal:host_cache_usage_perc") == 0.25
    names = ("class_requests_running", "class_requests_waiting", "class_requests_parked", "class_longest_wait_seconds")
    for service_class, expected in (("interactive", [2, 1, 0, 0.5]), ("batch", [1, 4, 3, 90])):
        assert [value(f"shoal:{name}", {"class": service_class}) for name in names] == expected
    server.view = replace(VIEW, total_host_blocks=0, free_host_blocks=0, classes={})
    assert value("shoal:host_cache_usage_perc") == 0


def test_waits_are_observed_by_class_and_a_turn_without_a_step_is_no_step() -> None:
    registry = CollectorRegistry()
    metrics = StepMetrics(registry)
    waits = [Wait("batch", 120_000_000_000), Wait("batch", 1_000_000), Wait("interactive", 0)]
    metrics.observe(Turn(VIEW, waits=waits))
    metrics.observe(Turn(VIEW, step=Step("decode", 3, 10_000_000, 20_000_000, 30_000_000)))
    value = registry.get_sample_value
    assert value("shoal:engine_queue_time_seconds_count", {"class": "batch"}) == 2
    assert value("shoal:engine_queue_time_seconds_sum", {"class": "batch"}) == 120.001
    assert value("shoal:engine_queue_time_seconds_bucket", {"class": "batch", "le": "300.0"}) == 2
    assert value("shoal:engine_queue_time_seconds_bucket", {"class": "batch", "le": "60.0"}) == 1
    assert value("shoal:engine_queue_time_seconds_count", {"class": "interactive"}) == 1
    assert value("shoal:step_time_seconds_count", {"kind": "decode"}) == 1
    assert value("shoal:step_prediction_error_ratio_sum", {"kind": "decode"}) == 0.5


def test_the_layout_is_shown_and_what_ranks_send() -> None:
    server: Any = SimpleNamespace(view=VIEW, ready=True, num_sessions=0, ended={})
    registry = CollectorRegistry()
    registry.register(EngineCollector(server))
    assert registry.get_sample_value("shoal:layout_info", {"tp": "1", "cp": "1", "pp": "1"}) == 1
    assert registry.get_sample_value("shoal:rank_sent_bytes_total") is None
    registry = CollectorRegistry()
    ranks: Any = SimpleNamespace(layout=Layout(tp=2, pp=3), moved_bytes=lambda: 4096, stage_ns=lambda: [10**9, 0, 7])
    registry.register(EngineCollector(server, ranks=ranks))
    assert registry.get_sample_value("shoal:layout_info", {"tp": "2", "cp": "1", "pp": "3"}) == 1
    assert registry.get_sample_value("shoal:rank_sent_bytes_total") == 4096
    assert registry.get_sample_value("shoal:stage_busy_seconds_total", {"stage": "0"}) == 1
    assert registry.get_sample_value("shoal:stage_busy_seconds_total", {"stage": "2"}) == 7e-9
