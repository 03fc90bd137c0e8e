"""What a load run found: outcomes of all requests, the figures over them, and whether they may be used."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from client import Outcome
from shoal.workload.latency import Slo, attainment, percentile, spread

MAX_LAG_MS = 25.0  # p99 of how late requests left, and of how late timers fired: more makes a run invalid


@dataclass(frozen=True, slots=True)
class Result:
    outcomes: tuple[Outcome, ...]  # one per request of the schedule, in its order
    timer_lag_ns: tuple[int, ...]  # how late the driver's own timers fired
    open_loop: bool

    def answered(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.error]

    def errors(self) -> dict[str, int]:
        return dict(sorted(Counter(outcome.error for outcome in self.outcomes if outcome.error).items()))

    def wrong_lengths(self) -> int:
        """Answers to more or fewer tokens than were sent, or of more or fewer than were asked for."""
        return sum(
            (outcome.prompt_tokens, outcome.output_tokens) != (outcome.asked_prompt, outcome.asked_output)
            for outcome in self.answered()
        )

    def lag_p99_ms(self) -> float:
        """How late the driver itself was. A closed loop has no send times to miss, so there only timers tell."""
        lags = [percentile(self.timer_lag_ns, 99)] if self.timer_lag_ns else []
        if self.open_loop:
            lags.append(percentile([outcome.sent_ns - outcome.due_ns for outcome in self.outcomes], 99))
        return max(lags) / 1e6 if lags else 0.0

    def invalid(self) -> list[str]:
        """Why these figures must not be used; empty: they may."""
        reasons = []
        if self.lag_p99_ms() > MAX_LAG_MS:
            reasons.append(f"the driver was late: p99 {self.lag_p99_ms():.1f} ms, limit {MAX_LAG_MS:g} ms")
        if wrong := self.wrong_lengths():
            reasons.append(f"{wrong} answers with another number of tokens than asked for")
        if not self.answered():
            reasons.append("no request was answered")
        return reasons

    def figures(self, slo: Slo | None = None) -> dict[str, Any]:
        """Milliseconds, tokens, seconds. Latencies are of answered requests only; attainment is of all requests."""
        answered = self.answered()
        latencies = [outcome.latency for outcome in answered]
        duration_s = max(outcome.end_ns for outcome in self.outcomes) / 1e9
        prompt_tokens = sum(outcome.prompt_tokens for outcome in answered)
        output_tokens = sum(outcome.output_tokens for outcome in answered)
        gaps = [b - a for outcome in answered for a, b in zip(outcome.chunk_ns, outcome.chunk_ns[1:], strict=False)]
        return {
            "requests": len(self.outcomes),
            "answered": len(answered),
            "errors": self.errors(),
            "duration_s": duration_s,
            "requests_per_s": len(answered) / duration_s,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
            "output_tokens_per_s": output_tokens / duration_s,
            "total_tokens_per_s": (prompt_tokens + output_tokens) / duration_s,
            "ttft_ms": _spread_ms([latency.ttft_ns for latency in latencies]),
            "tpot_ms": _spread_ms([latency.tpot_ns for latency in latencies if latency.tpot_ns is not None]),
            "gap_ms": _spread_ms(gaps),  # between two events of one stream
            "e2e_ms": _spread_ms([latency.e2e_ns for latency in latencies]),
            "slo_attainment": None if slo is None else attainment(latencies, len(self.outcomes), slo),
            "lag_p99_ms": self.lag_p99_ms(),
            "invalid": self.invalid(),
        }


def _spread_ms(values_ns: list[Any]) -> dict[str, float] | None:
    found = spread([value / 1e6 for value in values_ns])
    return asdict(found) if found else None
