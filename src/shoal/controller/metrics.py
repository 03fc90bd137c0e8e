"""What the controller shows Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.controller.hub import Hub


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
        restarts = CounterMetricFamily("shoal:process_restarts", "restarts by the supervisor", labels=["process"])
        for entry in self._hub.registry.entries():
            for process in entry.registered.processes:
                restarts.add_metric([process.name], process.restarts)
        yield restarts
        ended = CounterMetricFamily("shoal:wire_disconnects", "ended connections by cause", labels=["cause"])
        for cause, count in sorted(self._hub.listener.ended.items()):
            ended.add_metric([cause], count)
        yield ended
