"""A tenant's limits: requests at once, requests that wait, tokens a minute. What is taken comes back exactly once."""

from __future__ import annotations

import random

import pytest

from shoal.gateway.errors import ApiError
from shoal.gateway.tenants import MINUTE_S, Hold, TenantLimits, Tenants

PER_MINUTE = TenantLimits(tokens_per_minute=600)  # ten a second


def refusal(*arguments: object, tenants: Tenants | None = None, hold: Hold | None = None) -> tuple[str, str]:
    """(reason, Retry-After) of `enter`, or of a hold's `charge`."""
    with pytest.raises(ApiError) as caught:
        (hold.charge if hold is not None else tenants.enter)(*arguments)  # type: ignore[union-attr, arg-type]
    assert caught.value.shape.status == 429
    return str(caught.value.reason), dict(caught.value.headers)["retry-after"]


def test_requests_at_once_are_limited_for_each_tenant_apart() -> None:
    tenants, limits = Tenants(), TenantLimits(max_in_flight=2)
    first = tenants.enter("a", limits, 0.0)
    tenants.enter("a", limits, 0.0)
    assert refusal("a", limits, 0.0, tenants=tenants) == ("tenant_requests_exceeded", "1")
    tenants.enter("b", limits, 0.0)
    first.release(turned_away=False)
    tenants.enter("a", limits, 0.0)
    assert tenants.in_flight() == {"a": 2, "b": 1}


def test_a_lease_is_given_back_once() -> None:
    tenants, limits = Tenants(), TenantLimits(max_in_flight=2, max_queued=2)
    first, second = (tenants.enter("a", limits, 0.0) for _ in range(2))
    for _ in range(3):
        first.release(turned_away=True)
        first.started()
    assert tenants.in_flight() == {"a": 1}
    tenants.enter("a", limits, 0.0)
    assert refusal("a", limits, 0.0, tenants=tenants)[0] == "tenant_requests_exceeded"
    second.release(turned_away=False)
    assert tenants.in_flight() == {"a": 1}


def test_requests_that_wait_are_limited_until_they_start() -> None:
    tenants, limits = Tenants(), TenantLimits(max_queued=1)
    first = tenants.enter("a", limits, 0.0)
    assert refusal("a", limits, 0.0, tenants=tenants) == ("tenant_queue_exceeded", "1")
    first.started()
    first.started()
    tenants.enter("a", limits, 0.0)
    assert refusal("a", limits, 0.0, tenants=tenants)[0] == "tenant_queue_exceeded"
    assert tenants.in_flight() == {"a": 2}


def test_a_refused_request_holds_nothing() -> None:
    tenants, limits = Tenants(), TenantLimits(max_in_flight=1, max_queued=5)
    held = tenants.enter("a", limits, 0.0)
    for _ in range(10):
        refusal("a", limits, 0.0, tenants=tenants)
    held.release(turned_away=False)
    assert tenants.in_flight() == {}
    tenants.enter("a", limits, 0.0)


def test_tokens_fill_up_evenly_and_the_time_to_come_back_is_the_right_one() -> None:
    tenants = Tenants()
    hold = tenants.enter("a", PER_MINUTE, 0.0)
    hold.charge(600, 0.0)
    assert refusal(1, 0.0, hold=hold) == ("tenant_tokens_exceeded", "1")
    assert refusal(300, 0.0, hold=hold) == ("tenant_tokens_exceeded", "30")
    assert refusal(300, 10.5, hold=hold) == ("tenant_tokens_exceeded", "20")
    assert refusal(300, 29.9, hold=hold) == ("tenant_tokens_exceeded", "1")
    hold.charge(300, 30.0)
    assert refusal(10, 30.0, hold=hold) == ("tenant_tokens_exceeded", "1")
    hold.charge(10, 31.0)


def test_who_waits_as_told_is_let_in() -> None:
    chance = random.Random(5)
    hold, now_s = Tenants().enter("a", PER_MINUTE, 0.0), 0.0
    for _ in range(500):
        tokens = chance.randrange(1, 3000)
        try:
            hold.charge(tokens, now_s)
        except ApiError as error:
            now_s += float(dict(error.headers)["retry-after"])
            hold.charge(tokens, now_s)


def test_a_request_larger_than_the_bucket_needs_a_full_one_and_leaves_a_debt() -> None:
    hold = Tenants().enter("a", PER_MINUTE, 0.0)
    hold.charge(1200, 0.0)
    assert refusal(1, 0.0, hold=hold) == ("tenant_tokens_exceeded", "61")
    assert refusal(1200, 60.0, hold=hold) == ("tenant_tokens_exceeded", "60")
    hold.charge(1200, 120.0)


def test_tokens_of_who_is_turned_away_go_back_and_no_more_than_those() -> None:
    tenants = Tenants()
    used, away = (tenants.enter("a", PER_MINUTE, 0.0) for _ in range(2))
    used.charge(300, 0.0)
    away.charge(300, 0.0)
    away.release(turned_away=True)
    away.release(turned_away=True)
    again = tenants.enter("a", PER_MINUTE, 0.0)
    again.charge(300, 0.0)
    assert refusal(1, 0.0, hold=again)[0] == "tenant_tokens_exceeded"


def test_without_limits_there_are_none() -> None:
    tenants = Tenants()
    holds = [tenants.enter("", TenantLimits(), 0.0) for _ in range(1000)]
    for hold in holds:
        hold.charge(1 << 40, 0.0)
    for hold in holds:
        hold.release(turned_away=False)
    assert tenants.in_flight() == {}


def test_a_limit_that_changes_holds_from_the_next_request_on() -> None:
    tenants = Tenants()
    tenants.enter("a", TenantLimits(max_in_flight=2), 0.0)
    assert refusal("a", TenantLimits(max_in_flight=1), 0.0, tenants=tenants)[0] == "tenant_requests_exceeded"
    tenants.enter("a", TenantLimits(max_in_flight=3), 0.0)


def test_tenants_that_use_nothing_take_no_memory_and_the_others_are_remembered() -> None:
    tenants, limits = Tenants(), TenantLimits(max_in_flight=1, tokens_per_minute=60)
    tenants.enter("busy", limits, 0.0)
    debtor = tenants.enter("debtor", limits, 0.0)
    debtor.charge(60 * 60, 0.0)
    debtor.release(turned_away=False)
    for number in range(20_000):
        tenants.enter(f"t{number}", limits, 1.0).release(turned_away=False)
    assert len(tenants._usage) < 5000
    assert refusal("busy", limits, 1.0, tenants=tenants)[0] == "tenant_requests_exceeded"
    assert refusal(1, 1.0, hold=tenants.enter("debtor", limits, 1.0))[0] == "tenant_tokens_exceeded"


@pytest.mark.parametrize("seed", range(20))
def test_no_window_of_time_holds_more_than_a_full_bucket_and_its_refill(seed: int) -> None:
    chance = random.Random(seed)
    rate = chance.choice([60, 600, 6000])
    tenants, limits, now_s = Tenants(), TenantLimits(tokens_per_minute=rate), 0.0
    admitted: list[tuple[float, int]] = []
    for _ in range(400):
        now_s += chance.choice([0.0, 0.01, 0.3, 2.0, 90.0]) * chance.random()
        hold, tokens = tenants.enter("a", limits, now_s), chance.randrange(1, rate)
        try:
            hold.charge(tokens, now_s)
        except ApiError:
            pass
        else:
            admitted.append((now_s, tokens))
        hold.release(turned_away=False)
    assert len(admitted) > 10
    for start in range(len(admitted)):
        total = 0
        for at_s, tokens in admitted[start:]:
            total += tokens
            assert total <= rate + (at_s - admitted[start][0]) * rate / MINUTE_S + 1e-6
