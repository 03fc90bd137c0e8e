"""Attainment is over all requests that were ours to serve."""

from __future__ import annotations

import pytest

from shoal.gateway.slo import Verdict, verdict
from shoal.gateway.terms import Terms

TARGETS = Terms(service_class="interactive", ttft_ms=1000.0, tpot_ms=100.0)
NONE = Terms(service_class="batch")


def judged(
    outcome: str,
    *,
    status: int = 0,
    took_s: float = 5.0,
    ttft_s: float | None = 0.5,
    tpot_s: float | None = 0.05,
    terms: Terms = TARGETS,
) -> Verdict | None:
    return verdict(terms, outcome, status=status, took_s=took_s, ttft_s=ttft_s, tpot_s=tpot_s)


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "expected"),
    [
        (0.5, 0.05, Verdict(met=True, ttft=True, tpot=True)),
        (1.0, 0.1, Verdict(met=True, ttft=True, tpot=True)),
        (1.001, 0.05, Verdict(met=False, ttft=False, tpot=True)),
        (0.5, 0.101, Verdict(met=False, ttft=True, tpot=False)),
        (0.5, None, Verdict(met=True, ttft=True, tpot=None)),  # one token: no time between two
    ],
)
def test_an_answered_request_is_held_against_its_targets(
    ttft_s: float, tpot_s: float | None, expected: Verdict
) -> None:
    assert judged("ok", ttft_s=ttft_s, tpot_s=tpot_s) == expected


def test_without_targets_being_answered_is_enough() -> None:
    assert judged("ok", terms=NONE, ttft_s=900.0, tpot_s=9.0) == Verdict(met=True, ttft=None, tpot=None)
    assert judged("failed", terms=NONE, status=502) == Verdict(met=False, ttft=None, tpot=None)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_refusal_for_load_a_failure_and_a_time_out_have_missed(status: int) -> None:
    outcome = "refused" if status in (429, 503) else "failed"
    assert judged(outcome, status=status, ttft_s=None, tpot_s=None) == Verdict(met=False, ttft=False, tpot=None)


def test_a_failure_after_a_timely_first_token_has_missed_all_the_same() -> None:
    assert judged("failed", status=502) == Verdict(met=False, ttft=True, tpot=True)


@pytest.mark.parametrize("status", [400, 403, 404, 413])
def test_what_was_wrong_in_itself_is_not_counted(status: int) -> None:
    assert judged("refused", status=status, ttft_s=None, tpot_s=None) is None


def test_a_client_that_leaves_is_counted_where_something_was_late_or_came() -> None:
    assert judged("aborted", took_s=0.9, ttft_s=None, tpot_s=None) is None
    assert judged("aborted", took_s=1.1, ttft_s=None, tpot_s=None) == Verdict(met=False, ttft=False, tpot=None)
    assert judged("aborted", took_s=9.0, ttft_s=0.5) == Verdict(met=True, ttft=True, tpot=True)
    assert judged("aborted", took_s=9.0, ttft_s=None, tpot_s=None, terms=NONE) is None
