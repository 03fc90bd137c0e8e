"""What an engine shows Prometheus: the scheduler's view at the moment of the scrape, and histograms of its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.core.plan import ClassView, View
from shoal.engine.loop import Step, Turn
from shoal.engine.parallel.layout import Layout
from shoal.engine.server import Server
from shoal.engine.transfer.peers import Peers
from shoal.telemetry.metrics import counters

AXES = ("tp", "cp", "pp")
KINDS = ("decode", "mixed", "prefill")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_WAITS = (*_SECONDS, 300.0, 900.0, 3600.0)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class StepMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._tokens = Histogram(
            "shoal:iteration_tokens_total", "tokens computed in a step", buckets=_TOKENS, registry=registry
        )
        times = Histogram(
            "shoal:step_time_seconds", "device time of a step", ["kind"], buckets=_SECONDS, registry=registry
        )
        errors = Histogram(
            "shoal:step_prediction_error_ratio",
            "|predicted - measured| / measured time of a step",
            ["kind"],
            buckets=(0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0),
            registry=registry,
        )
        self._waits = Histogram(
            "shoal:engine_queue_time_seconds",
            "how long a request had no slice, when it got one: its first, or the first after a preemption",
            ["class"],
            buckets=_WAITS,
            registry=registry,
        )
        self._times = {kind: times.labels(kind) for kind in KINDS}
        self._errors = {kind: errors.labels(kind) for kind in KINDS}

    def observe(self, turn: Turn) -> None:
        if turn.step is not None:
            self._observe_step(turn.step)
        for wait in turn.waits:
            self._waits.labels(wait.service_class).observe(wait.waited_ns / 1e9)

    def _observe_step(self, step: Step) -> None:
        self._tokens.observe(step.num_tokens)
        self._times[step.kind].observe(step.busy_ns / 1e9)
        self._errors[step.kind].observe(abs(step.predicted_ns - step.busy_ns) / max(step.busy_ns, 1))


class DiskTier(Protocol):
    """transfer.storage.Storage"""

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def off(self) -> bool: ...

    @property
    def errors(self) -> Mapping[str, int]: ...


class Ranks(Protocol):
    """parallel.group.Group"""

    layout: Layout
    moved_bytes: Callable[[], int]
    stage_ns: Callable[[], Sequence[int]]


class EngineCollector(Collector):
    """Reads the last published view; nothing is counted twice, and a scrape costs the step thread nothing."""

    def __init__(
        self, server: Server, disk: DiskTier | None = None, peers: Peers | None = None, ranks: Ranks | None = None
    ) -> None:
        self._server = server
        self._disk = disk
        self._peers = peers
        self._ranks = ranks

    def collect(self) -> Iterator[Metric]:
        view = self._server.view
        yield from _gauges(view)
        yield from _by_class(view)
        yield from _counters(view)
        if self._peers is not None:
            yield from _of_peers(self._peers)
        yield GaugeMetricFamily("shoal:ready", "1: the step loop takes work", float(self._server.ready))
        yield GaugeMetricFamily("shoal:num_sessions", "connected gateways", self._server.num_sessions)
        yield counters("wire_disconnects", "ended connections by cause", "cause", self._server.ended.items())
        if self._disk is not None:
            yield from _disk(self._disk)
        yield from _of_ranks(self._ranks)


def _disk(disk: DiskTier) -> Iterator[Metric]:
    yield GaugeMetricFamily("shoal:disk_cache_blocks", "prefix blocks in the disk tier", disk.num_blocks)
    yield GaugeMetricFamily("shoal:disk_cache_bytes", "their bytes in the file", disk.num_bytes)
    yield GaugeMetricFamily("shoal:disk_cache_off", "1: left alone for a while after errors", float(disk.off))
    yield counters("kv_tier_errors", "errors of the disk tier by reason; each is a miss", "reason", disk.errors.items())


def _of_ranks(ranks: Ranks | None) -> Iterator[Metric]:
    layout = Layout() if ranks is None else ranks.layout
    info = GaugeMetricFamily(
        "shoal:layout_info", "1: processes that share layers (tp), contexts (cp), and the layers (pp)", labels=AXES
    )
    info.add_metric([str(getattr(layout, axis)) for axis in AXES], 1.0)
    yield info
    if ranks is not None:
        text = "bytes that the first process of the engine gave to its others in steps"
        yield CounterMetricFamily("shoal:rank_sent_bytes", text, ranks.moved_bytes())
        text = "seconds that each stage of the pipeline computed for; of the time that passes, the rest is bubble"
        busy = CounterMetricFamily("shoal:stage_busy_seconds", text, labels=["stage"])
        for stage, ns in enumerate(ranks.stage_ns()):
            busy.add_metric([str(stage)], ns / 1e9)
        yield busy


def _gauges(view: View) -> Iterator[Metric]:
    used = view.total_blocks - view.free_blocks - view.cached_blocks
    used_on_host = view.total_host_blocks - view.free_host_blocks - view.cached_host_blocks
    for name, text, value in (
        ("num_requests_running", "requests that take part in steps", view.num_running),
        ("num_requests_waiting", "requests that wait in the engine", view.num_waiting),
        ("kv_cache_usage_perc", "share of KV blocks that live requests hold, 0 to 1", used / max(view.total_blocks, 1)),
        ("kv_cache_cached_blocks", "blocks that nobody holds and a prefix hit would find", view.cached_blocks),
        (
            "host_cache_usage_perc",
            "share of the host tier's blocks that hold parked requests, 0 to 1",
            used_on_host / max(view.total_host_blocks, 1),
        ),
        ("host_cache_cached_blocks", "prefix blocks in the host tier", view.cached_host_blocks),
        ("kv_lent_blocks", "blocks that are kept since other engines read them", view.lent_blocks),
        ("waiting_tokens", "tokens to compute before the waiting requests sample", view.waiting_tokens),
    ):
        yield GaugeMetricFamily(f"shoal:{name}", text, value)


_OF_CLASS: tuple[tuple[str, str, Callable[[ClassView], float]], ...] = (
    ("class_requests_running", "requests of a class that take part in steps", lambda view: view.num_running),
    (
        "class_requests_waiting",
        "requests of a class without a slice, parked ones included",
        lambda view: view.num_waiting,
    ),
    ("class_requests_parked", "requests of a class whose KV is in the host tier", lambda view: view.num_parked),
    (
        "class_longest_wait_seconds",
        "how long the one that waits longest has had no slice",
        lambda view: view.longest_wait_ns / 1e9,
    ),
)


def _by_class(view: View) -> Iterator[Metric]:
    for name, text, value in _OF_CLASS:
        family = GaugeMetricFamily(f"shoal:{name}", text, labels=["class"])
        for service_class, numbers in view.classes.items():
            family.add_metric([service_class], value(numbers))
        yield family


def _counters(view: View) -> Iterator[Metric]:
    for name, text, value in (
        ("steps", "steps planned", view.step),
        ("prompt_tokens", "prompt tokens accepted", view.prompt_tokens),
        ("generation_tokens", "tokens sampled", view.generation_tokens),
        ("num_preemptions", "requests sent back to the waiting line", view.preemptions),
        ("num_parks", "preempted requests whose KV went to the host tier", view.parks),
        ("kv_swapped_out_bytes", "KV copied to the host tier", view.swapped_out_bytes),
        ("kv_swapped_in_bytes", "KV copied back from the host tier", view.swapped_in_bytes),
        ("kv_bad_blocks", "KV blocks that came back with another content, and were computed again", view.bad_blocks),
        ("prefix_cache_host_hits", "prompt tokens found in the host tier, beyond those on the device", view.host_hits),
        ("prefix_cache_disk_hits", "prompt tokens read from the disk into the host tier", view.disk_hits),
        ("prefix_cache_peer_hits", "prompt tokens brought from other engines", view.peer_hits),
        ("recomputed_tokens", "tokens computed again after a preemption", view.recomputed_tokens),
        ("prefix_cache_queries", "prompt tokens looked up in the prefix cache", view.prefix_queries),
        ("prefix_cache_hits", "prompt tokens found in the prefix cache", view.prefix_hits),
        ("prefix_cache_collisions", "look-ups whose key named other content: misses", view.hash_collisions),
        ("composer_worth", "worth of the prompt chunks that steps took", view.chosen_worth),
        ("composer_in_turn_worth", "the same, had they been taken first come first served", view.in_turn_worth),
    ):
        yield CounterMetricFamily(f"shoal:{name}", text, value)


def _of_peers(peers: Peers) -> Iterator[Metric]:
    for name, text, value in (
        ("kv_fetched_blocks", "KV blocks that came from other engines", peers.fetched_blocks),
        ("kv_fetched_bytes", "KV that came from other engines", peers.fetched_bytes),
        ("kv_lent_bytes", "KV that was read for other engines", peers.lent_bytes),
    ):
        yield CounterMetricFamily(f"shoal:{name}", text, value)
    yield counters("kv_failed_fetches", "fetches that did not bring all, by reason", "reason", peers.failed.items())
