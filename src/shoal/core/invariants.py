"""What is true of a scheduler between any two calls. Each failure says which request, block or counter it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

from shoal.core.progress import Request, State

if TYPE_CHECKING:
    from shoal.core.members import Members
    from shoal.core.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """AssertionError where an invariant is broken. Linear in blocks ever used: for tests, not for every step."""
    members = scheduler._members
    running, waiting, parking = members.running, list(members.line), members.parking
    tables = parking.device_tables() + members.fetching.device_tables() + members.lending.device_tables()
    members.tables.check(running.values(), tables, members.returned, members.planned)
    parking.check(waiting, members.storing.host_tables())
    moving = parking.requests() + members.fetching.requests()
    ahead = members.prefetches + members.prefetched
    live = {request.id: request for request in (*waiting, *moving, *ahead)} | running
    assert live == scheduler._requests, f"lost or kept too long: {live.keys() ^ scheduler._requests.keys()}"
    assert len(running) + members.num_returning <= scheduler.limits.max_running, f"{len(running)} requests run"
    assert members.num_returning == sum(r.state is State.RETURNING for r in moving), "returning"
    for request in running.values():
        assert request.state is State.RUNNING, f"{request.id} runs as {request.state}"
    counted = Counter(request.spec.service_class for request in running.values())
    assert members.num_of_class == counted, f"{counted} run, counted as {members.num_of_class}"
    grouped = {id: urgency for urgency, group in members.of_urgency.items() for id in group}
    assert grouped == {id: request.urgency for id, request in running.items()}, "those that run are grouped wrongly"
    assert all(members.of_urgency.values()), "an urgency that nobody has"
    scheduler._composer.check(running.values())
    for request in waiting:
        assert request.state is State.WAITING and not request.blocks, f"{request.id} waits with blocks"
    members.line.check()
    assert scheduler._promises.given == sum(r.demand for r in live.values()), "promises are counted wrongly"
    assert members.tokens_lost == sum(r.lost for r in waiting), "lost tokens are counted wrongly"
    _check_arrivals(members)
    _check_leaves(members.leaves, running)
    _check_flights(scheduler, live)
    for request in live.values():
        request.check(scheduler.limits.block_tokens)
    view = asdict(scheduler.view())
    classes = view.pop("classes")
    for name, value in (*view.items(), *((f"{n}.{i}", v) for n, c in classes.items() for i, v in enumerate(c))):
        assert value >= 0, f"{name} is {value}"


def _check_leaves(leaves: list[str], running: dict[str, Request]) -> None:
    assert len(set(leaves)) == len(leaves), f"a request leaves twice: {leaves}"
    assert not any(id in running for id in leaves), f"a running request leaves: {leaves}"


def _check_flights(scheduler: Scheduler, live: dict[str, Request]) -> None:
    steps = [flight.step for flight in scheduler._flights]
    expected = list(range(scheduler._members.returned + 1, scheduler._members.planned + 1))
    assert steps == expected, f"steps in flight are {steps}, not {expected}"
    planned: dict[int, int] = {}
    for flight in scheduler._flights:
        for request in flight.sampled:
            planned[id(request)] = planned.get(id(request), 0) + 1
    for request in live.values():
        count = planned.get(id(request), 0)
        assert count == request.placeholders, f"{request.id}: {request.placeholders} placeholders, {count} in flight"


def _check_arrivals(members: Members) -> None:
    for request in members.arrivals:
        assert members.running.get(request.id) is request, f"{request.id} has arrived and does not run"
        assert request.id not in members.leaves, f"{request.id} has arrived and leaves"
