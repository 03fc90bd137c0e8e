"""Who of the waiting line could enter in this step."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from shoal.core.members import Members
from shoal.core.pressure import MAX_LOOKS, RESERVED, blocks_for
from shoal.core.progress import NEVER_NS, Request
from shoal.core.urgency import Hurry

MIN_CHOICE, MAX_CANDIDATES = 16, 64  # weighed in one plan


def newcomers(members: Members, line: Iterable[Request], hurry: Hurry, weighs: bool) -> list[tuple[Request, int]]:
    """Those of `line` that could enter, with the available blocks that each takes: its own for all its known tokens,
    and one that is left alone for it to grow. Parked ones that can return are sent for on the way.

    Nobody takes what one that outranks it waits for: it would be driven out again.
    """
    num_slots, num_blocks = members.free_slots, members.free_blocks
    found: list[tuple[Request, int]] = []
    waits: list[Request] = []  # cannot enter yet
    most = min(MAX_CANDIDATES, max(MIN_CHOICE, num_slots)) if weighs else num_slots
    slots, left = num_slots, num_blocks  # what those found leave
    first = (NEVER_NS, 0)  # least urgency of those found
    for request in islice(line, MAX_LOOKS if weighs else None):
        if len(found) == most or num_slots < 1:
            break
        if not members.leader_done(request) or any(other.outranks(request) for other in waits):
            continue
        ready = request.last_step <= members.returned and request not in members.yielded
        blocks = blocks_for(members, request) if ready else 0
        coming = members.sharing.is_coming(request) or members.fetching.is_coming(request)
        if coming or members.storing.is_waiting(request):
            continue
        if weighs and members.running and hurry.ttft_ns(request.service.rank, members.now_ns):
            blocks += members.limits.num_blocks // RESERVED  # a more urgent one would have to wait for a copy
        ahead: list[int] = []
        if request.urgency > first:  # else none of them outranks it
            ahead = [taken for other, taken in found if other.outranks(request)]
        if not ready or sum(ahead) + blocks > num_blocks or len(ahead) >= num_slots:
            if not weighs or (ready and request.started):
                break  # nobody overtakes it
            waits = [request, *waits][:MAX_CANDIDATES]
        elif (source := members.source(request)) is None:
            found.append((request, blocks))
            first = min(first, request.urgency)
            slots, left = slots - 1, left - blocks
        elif slots > 0 and blocks <= left:
            members.bring(request, source)
            slots, left = slots - 1, left - blocks
            num_slots, num_blocks = num_slots - 1, num_blocks - blocks
    return found
