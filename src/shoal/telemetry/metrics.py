"""How every process shows its Prometheus metrics: one registry, one small listener on loopback.

Names are `shoal:*` with vLLM's spelling of the noun wherever vLLM has the same thing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.metrics_core import CounterMetricFamily


def new_registry() -> CollectorRegistry:
    """With what every process shows: memory, processor time, open files."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


def counters(name: str, text: str, label: str, counts: Iterable[tuple[str, int]]) -> CounterMetricFamily:
    """One counter per value of a label, for a collector that reads its numbers when asked."""
    family = CounterMetricFamily(f"shoal:{name}", text, labels=[label])
    for value, count in sorted(counts):
        family.add_metric([value], count)
    return family


class _Handler(WSGIRequestHandler):
    timeout = 1.0  # for a caller that sends or reads nothing; others of this machine wait so long at most for each

    def log_message(self, *_: object) -> None:
        pass


class Exporter:
    """Serves a registry at `url`, from a thread of its own, until closed. One caller after the other: what anybody on
    this machine can open must not take a thread and a file of this process each."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._server = make_server("127.0.0.1", 0, make_wsgi_app(registry), handler_class=_Handler)
        self._server.socket.listen(64)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/metrics"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=2.0)
