"""What the controller shows Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.controller.hub import Hub
from shoal.telemetry.metrics import counters


class ControllerCollector(Collector):
    """Reads the registry when asked."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def collect(self) -> Iterator[Metric]:
        replicas = GaugeMetricFamily("shoal:num_replicas", "listed engines by state", labels=["state"])
        listed = [e.registered.replica for e in self._hub.registry.entries()]
        for state, count in sorted(Counter(r.state for r in listed if r is not None).items()):
            replicas.add_metric([state], count)
        yield replicas
        yield GaugeMetricFamily("shoal:membership_version", "version of the list", self._hub.registry.version)
        processes = [process for e in self._hub.registry.entries() for process in e.registered.processes]
        restarts = {process.name: process.restarts for process in processes}
        yield counters("process_restarts", "restarts by the supervisor", "process", restarts.items())
        yield counters("wire_disconnects", "ended connections by cause", "cause", self._hub.listener.ended.items())
