"""Order in the line: classes by rank, tenants by what they were served, a tenant's own by priority and arrival."""

from __future__ import annotations

import pytest

from shoal.core.classes import DEFAULT_CLASSES
from shoal.core.kv.prefix import Chain
from shoal.core.progress import Request
from shoal.core.request import RequestSpec
from shoal.core.waiting import MAX_ACCOUNTS, FairLine


class Arrivals:
    def __init__(self) -> None:
        self.line = FairLine(DEFAULT_CLASSES)
        self.count = 0

    def add(self, tenant: str, name: str = "standard", priority: int = 0, tokens: int = 10) -> Request:
        self.count += 1
        spec = RequestSpec(
            id=f"{tenant}{self.count}",
            prompt=(1,) * tokens,
            max_tokens=1,
            service_class=name,
            tenant=tenant,
            priority=priority,
        )
        request = Request(spec, self.count, Chain(b""), None, DEFAULT_CLASSES[name])
        self.line.admitted(request)
        self.line.add(request)
        return request

    def order(self) -> list[str]:
        return [request.id for request in self.line]


def test_tenants_share_by_tokens_served_not_by_requests() -> None:
    arrivals = Arrivals()
    for _ in range(3):
        arrivals.add("a", tokens=10)
    arrivals.add("b", tokens=30)
    for _ in range(2):
        arrivals.add("c", tokens=10)
    # b's one request weighs as much as three of the others: while b is due, the others go on.
    assert arrivals.order() == ["a1", "b4", "c5", "a2", "c6", "a3"]


def test_who_was_served_more_waits() -> None:
    arrivals = Arrivals()
    first = arrivals.add("a")
    arrivals.add("b")
    first.account.served = 1000
    assert arrivals.order() == ["b2", "a1"]


def test_classes_come_by_rank_and_within_a_tenant_priority_then_arrival() -> None:
    arrivals = Arrivals()
    arrivals.add("a", "batch")
    arrivals.add("a", priority=3)
    arrivals.add("a")
    arrivals.add("a", "interactive", priority=9)
    assert arrivals.order() == ["a4", "a3", "a2", "a1"]


def test_being_away_earns_no_claim() -> None:
    arrivals = Arrivals()
    busy = arrivals.add("a")
    busy.account.served = 5000
    late = arrivals.add("b")
    assert late.account.served == 5000
    arrivals.line.remove(late)
    arrivals.line.ended(late)
    busy.account.served = 9000
    assert arrivals.add("b").account.served == 9000


def test_a_tenant_that_comes_when_nobody_is_there_owes_no_more_than_the_others() -> None:
    arrivals = Arrivals()
    first = arrivals.add("a")
    first.account.served = 700
    arrivals.line.remove(first)
    arrivals.line.ended(first)
    assert arrivals.add("b").account.served == 700
    assert arrivals.add("a").account.served == 700


def test_tenants_that_come_once_are_forgotten_and_those_with_requests_are_not() -> None:
    arrivals = Arrivals()
    stays = arrivals.add("stays")
    for number in range(3 * MAX_ACCOUNTS):
        request = arrivals.add(f"t{number}-")
        arrivals.line.remove(request)
        arrivals.line.ended(request)
    assert len(arrivals.line._accounts["standard"]) <= MAX_ACCOUNTS + 1
    assert stays.account is arrivals.line._accounts["standard"]["stays"]
    arrivals.line.check()


def test_the_one_just_seen_may_leave_while_the_line_is_walked() -> None:
    arrivals = Arrivals()
    requests = {request.id: request for request in (arrivals.add(tenant) for tenant in "abcabc")}
    seen = []
    for request in arrivals.line:
        seen.append(request.id)
        arrivals.line.remove(requests[request.id])
    assert sorted(seen) == sorted(requests) and len(arrivals.line) == 0
    arrivals.line.check()


@pytest.mark.parametrize(("waited_s", "presses"), [(59, False), (61, True)])
def test_half_of_the_bound_is_when_a_request_presses(waited_s: int, presses: bool) -> None:
    arrivals = Arrivals()
    request = arrivals.add("a")
    arrivals.line.stamp(1000)
    assert arrivals.line.pressing(1000 + waited_s * 10**9) == [request] * presses
    assert arrivals.line.longest_wait_ns("standard", 5000) == 4000
    arrivals.line.remove(request)
    assert arrivals.line.longest_wait_ns("standard", 5000) == 0
