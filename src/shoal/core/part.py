"""A plan while it is being made: its room, and the slices that it has got so far."""

from __future__ import annotations

from itertools import repeat

from shoal.core.compose import Room
from shoal.core.members import Members, admit
from shoal.core.plan import Admit, Slice
from shoal.core.progress import Request


class Part:
    def __init__(self, members: Members, room: Room, step: int) -> None:
        self.step = step
        self.room = room
        self.arrived = [(request, admit(request)) for request in members.arrivals]
        self.admits: list[Admit] = []  # of newcomers
        self.spared: set[Request] = set(members.arrivals)  # not to be preempted by this plan
        self.decodes: list[Request] = []
        self.slices: list[Slice] = []  # of the decodes
        self.chunks: list[tuple[Request, Slice]] = []
        self.wanted_ns = 0  # the step's time with all decodes, were none left out
        self._members = members
        self._now_ns = members.now_ns

    def decode(self, decodes: list[Request]) -> None:
        """One token for each. This loop runs for every request in every step, hence without calls."""
        step, now_ns, num_known = self.step, self._now_ns, 0
        rows: list[tuple[object, ...]] = []
        for request in decodes:
            start, known = request.scheduled, request.known
            blocks = self._members.tables.grow(request) if start == request.capacity else ()
            rows.append((request.id, start, 1, blocks, request.last_step if request.placeholders else -1, True))
            num_known += known
            request.scheduled = known
            request.known = known + 1
            request.placeholders += 1
            request.last_step = step
            request.served_ns = now_ns
            request.account.served += 1
        self.room.add(len(decodes), num_known)
        self.decodes += decodes
        self.slices += map(tuple.__new__, repeat(Slice), rows)

    def chunk(self, request: Request, count: int) -> None:
        """The next `count` tokens of a request that has all its ids, and a placeholder where they reach its end."""
        start = request.scheduled
        end = request.scheduled = start + count
        request.last_step = self.step
        request.served_ns = self._now_ns
        request.account.served += count
        samples = end == request.known and request.samples
        if samples:
            request.known += 1
            request.placeholders += 1
        self.room.add_chunk(start, count)
        self.chunks.append((request, Slice(request.id, start, count, (), -1, samples)))

    def enter(self, request: Request, count: int) -> None:
        """A newcomer, with its first `count` tokens."""
        self.admits.append(self._members.enter(request))
        self.chunk(request, count)
