"""When blocks or slots are short: who goes (victims.py), for somebody more urgent or so that others grow."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice

from shoal.core import victims
from shoal.core.members import Members
from shoal.core.part import Part
from shoal.core.progress import Request, State
from shoal.core.urgency import Hurry

MAX_LOOKS = 128  # at requests of the line, in one plan
MAX_HEADS = 8  # of the waiting line, for whom one plan makes way
RESERVED = 32  # one of so many blocks is kept for more urgent newcomers
AHEAD_STEPS = 4  # within so many steps a copy to the host should be done


def yield_to_urgent(members: Members, newcomers: Iterable[Request], pressing: Collection[Request]) -> None:
    """Preempts for the first in line where less urgent requests are in their way."""
    running = members.running.values()
    if not running or not members.line:
        return
    worst: tuple[int, int] | None = None
    gain = members.tables.pool.num_sole
    candidates = victims.InOrder({one: group.values() for one, group in members.of_urgency.items()}, members.remaining)
    num_slots, num_blocks, num_heads = members.free_slots, 0, 0
    for head in islice(newcomers, MAX_LOOKS):
        if head.last_step > members.returned or members.storing.is_waiting(head):
            continue
        if head in pressing or not members.leader_done(head):
            continue
        if head.service.rank > members.worst_rank or num_heads == MAX_HEADS:
            return
        if head.service.rank == members.worst_rank:
            worst = worst or max(members.of_urgency)
            if head.urgency >= worst:
                return
        blocks = blocks_for(members, head)
        if members.sharing.is_coming(head) or members.fetching.is_coming(head):
            continue
        if not num_heads:
            num_blocks = members.num_coming - len(running) + 1
        num_slots, num_blocks, num_heads = num_slots - 1, num_blocks - blocks, num_heads + 1
        if num_slots < 0 or num_blocks < 0:
            chosen = victims.for_urgent(head, candidates, -num_slots, -num_blocks, gain)
            if not chosen:
                return
            for victim in chosen:
                num_slots, num_blocks = num_slots + 1, num_blocks + gain(victim.blocks) + 1
                members.preempt(victim)


def blocks_for(members: Members, request: Request) -> int:
    """Blocks that must be available before the request enters: for its known tokens, and one for it to grow. Who had
    to go before comes back when there is room for all that it is predicted to need."""
    blocks = members.tables.blocks_to_enter(request) + 1
    if request.started and members.running:
        size = members.limits.block_tokens
        end = min(request.final, request.known + members.remaining(request))
        blocks += max(0, -(-end // size) - -(-request.known // size))
    return blocks


def park_ahead(members: Members, hurry: Hurry) -> None:
    """A copy takes a few steps: whose blocks others will need by then is parked now, not when all wait for them. Others
    are those that grow, and more urgent newcomers where some are to be expected."""
    running, pool = members.running.values(), members.tables.pool
    kept = members.limits.num_blocks // RESERVED
    if not members.limits.num_host_blocks or pool.num_available >= len(running) + kept:
        return
    soon = [each for each in running if each.capacity - each.scheduled < AHEAD_STEPS and each.capacity < each.final]
    coming = members.num_coming
    if hurry.ttft_ns(members.worst_rank, members.now_ns):
        coming -= len(running) - len(soon) + kept // 2  # a newcomer leaves each that runs a block to grow
    if len(soon) > coming:
        for victim in victims.for_growth(soon, running, coming, pool.num_sole, members.remaining):
            if members.parking.pays(victim, members.tokens_lost):
                members.preempt(victim)


def find_blocks(members: Members, decodes: list[Request], part: Part) -> list[Request]:
    """Those of `decodes` that have a block for their token. Where blocks are short, others are preempted, or left out
    of this step since blocks will come back with a step or a copy in flight."""
    found = _with_blocks(members, decodes, part.spared)
    if decodes and not found and not part.slices and not part.chunks:
        left = [each for each in decodes if each.state is State.RUNNING]
        found = _with_blocks(members, left, ())  # somebody must get on
    return found


def _with_blocks(members: Members, decodes: list[Request], spared: Collection[Request]) -> list[Request]:
    pool = members.tables.pool
    if len(decodes) <= pool.num_available:
        return decodes
    growing = [request for request in decodes if request.scheduled == request.capacity]
    if len(growing) <= pool.num_available:
        return decodes
    able = [each for each in members.running.values() if each not in spared]
    for victim in victims.for_growth(growing, able, members.num_coming, pool.num_sole, members.remaining):
        members.preempt(victim)
    growing = sorted([each for each in growing if each.state is State.RUNNING], key=lambda each: each.order)
    left_out = growing[pool.num_available :]
    return [each for each in decodes if each.state is State.RUNNING and each not in left_out]
