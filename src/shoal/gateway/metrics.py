"""The gateway's numbers, under vLLM's names where vLLM has the same thing.

Tokens, queues and blocks are the engines' numbers. Accounting: `requests_received_total` = successes + failures +
refusals + aborts, once all have ended.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from shoal.telemetry.metrics import new_registry

_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = new_registry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"shoal:{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"shoal:{name}", text, buckets=buckets, registry=registry)

        self.received = counter("requests_received", "Requests for text, well-formed or not")
        self.outcomes = {
            "ok": counter("request_success", "Requests answered in full", "finished_reason"),
            "failed": counter("request_failure", "Accepted requests that ended in an error", "reason"),
            "refused": counter("request_refused", "Requests that were not accepted", "reason"),
            "aborted": counter("request_aborted", "Requests that nobody waits for any more", "reason"),
        }
        self.retries = counter("request_retries", "Attempts after the first, before any token came")
        self.ttft = histogram("time_to_first_token_seconds", "From the request's arrival", _LATENCY_S)
        self.inter_token = histogram("inter_token_latency_seconds", "Between tokens of one choice", _TOKEN_S)
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "Mean over a request after its first token", _TOKEN_S
        )
        self.e2e = histogram("e2e_request_latency_seconds", "From arrival to the last byte", _LATENCY_S)
        self.in_flight = Gauge("shoal:requests_in_flight", "Requests for text under way", registry=registry)
        self.replicas_ready = Gauge("shoal:num_replicas_ready", "Replicas that can take work", registry=registry)
