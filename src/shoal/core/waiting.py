"""The waiting line: in which order requests are looked at when there is room in the batch.

    FirstComeLine   by class rank, priority, arrival: for the baselines
    FairLine        classes by rank; within a class the tenant that was served least; within a tenant by priority, then
                    arrival

A preempted request keeps its arrival, so it comes back before later ones of its tenant.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import takewhile
from operator import attrgetter
from typing import Any

from shoal.core.classes import ServiceClass
from shoal.core.progress import NEVER_NS, Account, Request

_order = attrgetter("order")
_served = attrgetter("served_ns", "id")
MAX_ACCOUNTS = 1024  # of tenants that a class remembers, beside those that have requests now


class Line:
    """What both lines count."""

    def __init__(self) -> None:
        self.num_tokens = 0  # known tokens of all that wait
        self.num_of_class: Counter[str] = Counter()
        self.num_live: Counter[str] = Counter()  # by class: accepted and not ended, here or not
        self._fresh: list[Request] = []  # nobody told them the time yet
        self._by_served: dict[str, list[Request]] = {}  # by class, who waits longest first

    def __len__(self) -> int:
        return self.num_of_class.total()

    def __iter__(self) -> Iterator[Request]:
        """In order. The request just seen may be removed meanwhile, no other."""
        raise NotImplementedError

    def admitted(self, request: Request) -> None:
        """A request was accepted; `add` follows. Until `ended`, it is one of its tenant's."""
        self.num_live[request.spec.service_class] += 1

    def ended(self, request: Request) -> None:
        """A request that was accepted has left for good."""
        self.num_live[request.spec.service_class] -= 1

    def add(self, request: Request) -> None:
        self.num_tokens += request.known
        self.num_of_class[request.spec.service_class] += 1
        if request.served_ns < 0:
            self._fresh.append(request)
        else:
            self._time(request)

    def remove(self, request: Request) -> None:
        self.num_tokens -= request.known
        self.num_of_class[request.spec.service_class] -= 1
        if request.served_ns < 0:
            self._fresh.remove(request)
        else:
            _take_out(self._by_served[request.spec.service_class], request, _served)

    def _time(self, request: Request) -> None:
        insort(self._by_served.setdefault(request.spec.service_class, []), request, key=_served)

    def stamp(self, now_ns: int) -> list[Request]:
        """Those that arrived since the last plan: they wait from now on, and as long as they had waited elsewhere."""
        for request in self._fresh:
            request.arrived_ns = request.served_ns = max(0, now_ns - request.spec.waited_ns)
            if request.num_output:  # it goes on with what another replica began
                request.token_due_ns = now_ns + request.tpot_ns if request.tpot_ns else NEVER_NS
            elif request.ttft_ns:
                request.token_due_ns = request.arrived_ns + request.ttft_ns
            self._time(request)
        fresh, self._fresh = self._fresh, []
        return fresh

    def pressing(self, now_ns: int) -> list[Request]:
        """Those that have waited for half of their bound."""
        return [
            request
            for line in self._by_served.values()
            for request in takewhile(lambda each: each.presses_ns <= now_ns, line)
        ]

    def check(self) -> None:
        """AssertionError where a count or an order is wrong."""
        waiting = list(self)
        assert len(waiting) == len(self), f"{len(waiting)} wait, {len(self)} are counted"
        assert self.num_tokens == sum(request.known for request in waiting), "the line counts its tokens wrongly"
        for line in self._by_served.values():
            assert line == sorted(line, key=_served), "the line is out of order"
        timed = sum(len(line) for line in self._by_served.values())
        assert timed + len(self._fresh) == len(waiting), (
            f"{timed} have a time, {len(self._fresh)} not, of {len(waiting)}"
        )

    def longest_wait_ns(self, service_class: str, now_ns: int) -> int:
        line = self._by_served.get(service_class)
        return max(0, now_ns - line[0].served_ns) if line else 0


class FirstComeLine(Line):
    def __init__(self) -> None:
        super().__init__()
        self._line: list[Request] = []  # sorted by order

    def __iter__(self) -> Iterator[Request]:
        place = 0
        while place < len(self._line):
            request = self._line[place]
            yield request
            if place < len(self._line) and self._line[place] is request:
                place += 1

    def add(self, request: Request) -> None:
        super().add(request)
        insort(self._line, request, key=_order)

    def remove(self, request: Request) -> None:
        super().remove(request)
        _take_out(self._line, request, _order)


class FairLine(Line):
    def __init__(self, classes: dict[str, ServiceClass]) -> None:
        super().__init__()
        ranked = sorted(classes, key=lambda name: (classes[name].rank, name))
        self._accounts: dict[str, dict[str, Account]] = {name: {} for name in ranked}  # by class, then tenant
        self._waiting: dict[str, dict[str, Account]] = {name: {} for name in ranked}  # of them, those with a line

    def __iter__(self) -> Iterator[Request]:
        for accounts in self._waiting.values():
            heap = [(account.served, account.tenant, 0) for account in accounts.values()]
            heapify(heap)
            while heap:
                served, tenant, place = heappop(heap)
                line = accounts[tenant].line if tenant in accounts else []
                if place >= len(line):
                    continue
                request = line[place]
                yield request
                place += place < len(line) and line[place] is request
                heappush(heap, (served + request.known, tenant, place))

    def admitted(self, request: Request) -> None:
        super().admitted(request)
        accounts, tenant = self._accounts[request.spec.service_class], request.spec.tenant
        account = accounts.get(tenant)
        if account is None:
            account = accounts[tenant] = Account(tenant)
        if not account.num_live:
            # A tenant that was away has no claim on what it did not ask for meanwhile.
            active = [each.served for each in accounts.values() if each.num_live]
            account.served = max(account.served, min(active) if active else max(a.served for a in accounts.values()))
        account.num_live += 1
        request.account = account

    def ended(self, request: Request) -> None:
        super().ended(request)
        account = request.account
        account.num_live -= 1
        if not account.num_live:
            accounts = self._accounts[request.spec.service_class]
            accounts[account.tenant] = accounts.pop(account.tenant)  # the last one to be forgotten
            if len(accounts) > MAX_ACCOUNTS:
                idle = next(tenant for tenant, each in accounts.items() if not each.num_live)
                del accounts[idle]

    def add(self, request: Request) -> None:
        super().add(request)
        account = request.account
        insort(account.line, request, key=_order)
        self._waiting[request.spec.service_class][account.tenant] = account

    def remove(self, request: Request) -> None:
        super().remove(request)
        account = request.account
        _take_out(account.line, request, _order)
        if not account.line:
            del self._waiting[request.spec.service_class][account.tenant]


def _take_out(line: list[Request], request: Request, key: Callable[[Request], Any]) -> None:
    place = bisect_left(line, key(request), key=key)
    assert line[place] is request, f"{request.id} does not wait"
    del line[place]
