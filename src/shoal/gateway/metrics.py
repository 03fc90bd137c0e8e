"""The gateway's numbers, under vLLM's names where vLLM has the same thing.

Tokens, queues and blocks are the engines' numbers. Accounting: `requests_received_total` = successes + failures +
refusals + aborts, once all have ended. Labels are few: reasons and configured classes, never a tenant or a key.
"""

from __future__ import annotations

from collections import Counter as Tally

from prometheus_client import Counter, Gauge, Histogram

from shoal.fleet.split import Reason
from shoal.gateway.slo import Verdict
from shoal.telemetry.metrics import new_registry

_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = new_registry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"shoal:{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"shoal:{name}", text, labels, buckets=buckets, registry=registry)

        self.received = counter("requests_received", "Requests for text, well-formed or not")
        self.outcomes = {  # class: "" where the request ended before it had one
            "ok": counter("request_success", "Requests answered in full", "finished_reason", "class"),
            "failed": counter("request_failure", "Accepted requests that ended in an error", "reason", "class"),
            "refused": counter("request_refused", "Requests that were not accepted", "reason", "class"),
            "aborted": counter("request_aborted", "Requests that nobody waits for any more", "reason", "class"),
        }
        self.retries = counter("request_retries", "Attempts after the first, before any token came")
        self.replays = counter("request_replays", "Streams that went on at another replica when theirs was lost")
        self.migrations = counter("request_migrations", "Streams that were to migrate to another replica", "outcome")
        self.migration_pause = histogram(
            "request_migration_pause_seconds",
            "Between the last token before a migration and the first after it",
            _TOKEN_S,
        )
        self._splits = counter("split_requests", "Prompts placed where replicas have roles", "decision", "reason")
        self.batch_lines = counter("batch_lines", "Lines of batches that have their result, in full or not", "ok")
        self.queue_time = histogram(
            "request_queue_time_seconds", "From the whole request's arrival to its first slice", _LATENCY_S, "class"
        )
        self.ttft = histogram("time_to_first_token_seconds", "From the request's arrival", _LATENCY_S)
        self.inter_token = histogram("inter_token_latency_seconds", "Between tokens of one choice", _TOKEN_S)
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "Mean over a request after its first token", _TOKEN_S
        )
        self.e2e = histogram("e2e_request_latency_seconds", "From arrival to the last byte", _LATENCY_S)
        self.in_flight = Gauge("shoal:requests_in_flight", "Requests for text under way", registry=registry)
        self.replicas_ready = Gauge("shoal:num_replicas_ready", "Replicas that can take work", registry=registry)
        self._prompt_tokens = counter("prefix_prompt_tokens", "Prompt tokens of answers that were completed")
        self._expected_tokens = counter("prefix_expected_tokens", "Those that the directory believed to be cached")
        self._cached_tokens = counter("prefix_cached_tokens", "Those that the replica did find in its cache")
        self.directory_blocks = Gauge(
            "shoal:directory_blocks", "Prefix blocks that some replica is known to hold", registry=registry
        )
        self.directory_bytes = Gauge("shoal:directory_bytes", "Memory of the directory", registry=registry)
        labels = ("class", "met")
        self._slo = counter("slo_attainment", "Requests that were ours to serve: whether all targets were met", *labels)
        self._slo_ttft = counter("slo_ttft_attainment", "Those with a target for the first token", *labels)
        self._slo_tpot = counter("slo_tpot_attainment", "Those with a target for the time between tokens", *labels)
        self._judged: Tally[str] = Tally()
        self._met: Tally[str] = Tally()

    def prefix(self, prompt_tokens: int, expected_tokens: int, cached_tokens: int) -> None:
        """Of one prompt: how right the directory was."""
        self._prompt_tokens.inc(prompt_tokens)
        self._expected_tokens.inc(expected_tokens)
        self._cached_tokens.inc(cached_tokens)

    def split(self, reason: Reason) -> None:
        """Of one prompt: whether its answer is to be decoded by another replica."""
        self._splits.labels("split" if reason is Reason.PAYS else "whole", reason).inc()

    def judge(self, service_class: str, verdict: Verdict) -> None:
        self._judged[service_class] += 1
        self._met[service_class] += verdict.met
        told = ((self._slo, verdict.met), (self._slo_ttft, verdict.ttft), (self._slo_tpot, verdict.tpot))
        for counter, met in told:
            if met is not None:
                counter.labels(service_class, str(met).lower()).inc()

    def attainment(self) -> dict[str, float]:
        """Share of the requests that met every target since the start, by class."""
        return {name: self._met[name] / count for name, count in self._judged.items()}
