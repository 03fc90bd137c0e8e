"""What is true of a scheduler between any two calls. Each failure says which request, block or counter it is."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from shoal.core.request import Request, State

if TYPE_CHECKING:
    from shoal.core.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """AssertionError where an invariant is broken. Linear in blocks ever used: for tests, not for every step."""
    running, waiting = scheduler._running, list(scheduler._line)
    scheduler._tables.check(running.values(), scheduler._returned, scheduler._step)
    live = {request.id: request for request in waiting} | running
    assert live == scheduler._requests, f"lost or kept too long: {live.keys() ^ scheduler._requests.keys()}"
    assert len(running) <= scheduler._max_running, f"{len(running)} requests run"
    for request in running.values():
        assert request.state is State.RUNNING, f"{request.id} runs as {request.state}"
    scheduler._batching.check(running.values())
    for request in waiting:
        assert request.state is State.WAITING and not request.blocks, f"{request.id} waits with blocks"
    assert [r.order for r in waiting] == sorted(r.order for r in waiting), "the line is out of order"
    assert scheduler._line.num_tokens == sum(r.known for r in waiting), "the line counts its tokens wrongly"
    _check_leaves(scheduler._leaves, running)
    _check_flights(scheduler, live)
    for request in live.values():
        request.check(scheduler.limits.block_tokens)
    for name, value in asdict(scheduler.view()).items():
        assert value >= 0, f"{name} is {value}"


def _check_leaves(leaves: list[str], running: dict[str, Request]) -> None:
    assert len(set(leaves)) == len(leaves), f"a request leaves twice: {leaves}"
    assert not any(id in running for id in leaves), f"a running request leaves: {leaves}"


def _check_flights(scheduler: Scheduler, live: dict[str, Request]) -> None:
    steps = [flight.step for flight in scheduler._flights]
    expected = list(range(scheduler._returned + 1, scheduler._step + 1))
    assert steps == expected, f"steps in flight are {steps}, not {expected}"
    planned: dict[int, int] = {}
    for flight in scheduler._flights:
        for request in flight.sampled:
            planned[id(request)] = planned.get(id(request), 0) + 1
    for request in live.values():
        count = planned.get(id(request), 0)
        assert count == request.placeholders, f"{request.id}: {request.placeholders} placeholders, {count} in flight"
