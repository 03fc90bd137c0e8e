"""The waiting bound kept: who has waited for half of its bound goes before all others (bound.py says why that does)."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.core import victims
from shoal.core.members import Members
from shoal.core.part import Part
from shoal.core.progress import Request, State

SHIELD_TOKENS = 32  # what a request that pressed gets before somebody more urgent may preempt it


def pressing(members: Members, some_left_out: bool) -> list[Request]:
    """Who has waited for half of its bound and can be served, the end of whose bound is nearest first.
    `some_left_out`: not all that run were served by the last plan."""
    now_ns, returned = members.now_ns, members.returned
    found = [each for each in members.line.pressing(now_ns) if each.last_step <= returned and members.leader_done(each)]
    if some_left_out:
        found += [r for r in members.running.values() if r.presses_ns <= now_ns and r.scheduled < r.final]
    return sorted(found, key=lambda each: (each.due_ns, each.id)) if found else found


def make_way(members: Members, pressing: list[Request]) -> bool:
    """Preempts for those that press and wait. True: not all of them will find room in this plan."""
    pool = members.tables.pool
    num_slots, num_blocks = members.free_slots, pool.num_available
    for request in pressing:
        if request.state is State.RUNNING:
            continue
        needed = members.tables.blocks_to_enter(request) + 1
        if num_slots < 1 or num_blocks < needed:
            lacking = (1 - num_slots, min(needed, pool.num_blocks) - num_blocks)
            spared = _not_to_yield(members, request, pressing)
            chosen = victims.for_bound(members.running.values(), spared, *lacking, pool.num_sole, members.remaining)
            if not chosen:
                return True
            for victim in chosen:
                num_slots += 1
                num_blocks += pool.num_sole(victim.blocks)
                members.preempt(victim, keep=False)  # a copy would hold its blocks
        num_slots -= 1
        num_blocks -= needed
    return False


def serve(members: Members, pressing: list[Request], part: Part) -> bool:
    """Each of those that press gets a slice, in order, until one does not fit: False."""
    for request in pressing:
        if request.state is State.RUNNING:
            served = _serve_running(members, request, part)
        elif request.state is State.WAITING:
            served = _serve_waiting(members, request, part)
        else:
            served = True  # on its way
        if not served:
            return False
        request.shielded = request.known + SHIELD_TOKENS
        part.spared.add(request)
    return True


def _serve_running(members: Members, request: Request, part: Part) -> bool:
    room, pool = part.room, members.tables.pool
    if request.last_step > members.returned:
        return True  # in a step in flight
    if request.known - request.scheduled > 1 or request.scheduled < request.num_prompt:
        count = room.chunk(request.scheduled, request.known - request.scheduled, room.max_ns)
        if count:
            part.chunk(request, count)
        return count > 0
    if request.scheduled == request.capacity and not pool.num_available:
        spared = _not_to_yield(members, request, [request, *part.spared])
        running = members.running.values()
        for victim in victims.for_bound(running, spared, 0, 1, pool.num_sole, members.remaining):
            members.preempt(victim, keep=False)
    if request.scheduled == request.capacity and not pool.num_available:
        return False
    if not room.fit([request], room.max_ns):
        return False
    part.decode([request])
    return True


def _serve_waiting(members: Members, request: Request, part: Part) -> bool:
    if members.free_slots < 1 or members.tables.blocks_to_enter(request) > members.tables.pool.num_available:
        return False
    source = members.source(request)
    if source is not None:
        members.bring(request, source)
        return True
    start = len(request.chain.matched) * members.limits.block_tokens
    count = part.room.chunk(start, request.known - start, part.room.max_ns)
    if count:
        part.enter(request, count)
    return count > 0


def _not_to_yield(members: Members, request: Request, served: Iterable[Request]) -> set[Request]:
    """Whom one that presses cannot drive out: those that are served as it is and, once its bound is broken in spite of
    all, who pressed before and has not got far yet. Else, where steps take longer than was assumed, all would take
    turns and nobody would get anywhere."""
    spared = set(served)
    if request.due_ns < members.now_ns:
        spared |= {each for each in members.running.values() if each.known <= each.shielded}
    return spared
