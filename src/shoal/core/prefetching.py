"""Prefixes that are brought here before the request that needs them: what a peer holds of it, into the cache.

    prefetch submitted ──► waits for room ──► fetched ──► its blocks are cached, Ended says how much is here

It computes nothing and nobody makes way for it. Where nothing can be fetched, that is told at once.
"""

from __future__ import annotations

from shoal.core.members import Members
from shoal.core.progress import Request, State


def start(members: Members) -> None:
    """Sends for them, or is done with them."""
    for request in list(members.prefetches):
        needed = members.tables.blocks_to_enter(request)
        if members.fetching.is_coming(request) or members.fetching.full:
            continue
        members.prefetches.remove(request)
        count = members.fetching.find_ahead(request, members.now_ns)
        if count and members.free_slots > 0 and needed < members.free_blocks:
            members.tables.place(request)
            members.fetches.append(members.fetching.bring(request, count))
            members.num_returning += 1
        else:
            members.prefetch_done(request, len(request.chain.matched) * members.limits.block_tokens)


def end(members: Members, request: Request) -> None:
    """It was taken back. What is on its way is given back when it comes."""
    if request in members.prefetched:
        members.prefetched.remove(request)
        return
    if request.state is State.RETURNING:
        members.num_returning -= 1
        request.blocks, request.capacity = [], 0
    else:
        members.prefetches.remove(request)
    request.move(State.FINISHED)
