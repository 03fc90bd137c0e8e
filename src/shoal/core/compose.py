"""Who advances by how many tokens in this step.

Every running request that needs one token to sample the next gets it, while the step stays within the time that the
targets leave. What is left goes to chunks: of running requests that are further behind, and of newcomers.

    value   each chunk is worth its class's weight, the more the nearer its deadline; part of it, part of that. The
            densest go first: worth by the share of tokens, time, blocks and slots that they take of what is left
    fcfs    first come first served, by priority; a baseline
    static  the first in line make a batch, and nobody else enters until all of it has ended; a baseline
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from shoal.core.limits import Limits
from shoal.core.progress import Request, State
from shoal.core.stepcost import Features, StepCost, attended_tokens
from shoal.core.waiting import FairLine, FirstComeLine, Line


def split(running: Iterable[Request]) -> tuple[list[Request], list[Request]]:
    """(decodes: one output token away from sampling the next, those further behind).

    Who has all its tokens planned is in neither.
    """
    decodes, behind = [], []
    for request in running:
        scheduled, known = request.scheduled, request.known
        if known - scheduled == 1 and known < request.limit and scheduled >= request.num_prompt:
            decodes.append(request)
        elif scheduled < request.final:
            behind.append(request)
    return decodes, behind


class Room:
    """What is left of one step while it is being composed: tokens and time."""

    def __init__(self, limits: Limits, cost: StepCost) -> None:
        self._limits = limits
        self._cost = cost
        # Where even one token takes longer than that, leaving the others out would cost much and save little.
        self.max_ns = max(limits.max_step_ns, cost.predict((1, 1, 1, 1, 1)) * 5 // 4)
        self._max_tokens = limits.max_num_batched_tokens
        self._max_chunk = limits.max_prefill_chunk or limits.max_num_batched_tokens
        self._new = self._attended = self._sequences = self._context = 0

    def copy(self) -> Room:
        room = Room(self._limits, self._cost)
        room._max_tokens = self._max_tokens
        room._new, room._attended = self._new, self._attended
        room._sequences, room._context = self._sequences, self._context
        return room

    @property
    def features(self) -> Features:
        return (1, self._new, self._attended, self._sequences, self._context)

    @property
    def num_tokens(self) -> int:
        return self._new

    @property
    def tokens_left(self) -> int:
        return self._max_tokens - self._new

    def leave(self, num_tokens: int) -> None:
        """No more than so many may be added."""
        self._max_tokens = min(self._max_tokens, self._new + num_tokens)

    def time_ns(self) -> int:
        """Of the step as it is now."""
        return self._cost.predict(self.features)

    def fit(self, decodes: Sequence[Request], limit_ns: int, whole_ns: int | None = None) -> int:
        """How many of them, from the first on, could get their token; at least one where the step is empty.
        `whole_ns`: `time_with` all of them, where that is known."""
        if whole_ns is not None and whole_ns <= limit_ns and len(decodes) <= self.tokens_left:
            return len(decodes)
        tokens = [request.known for request in decodes[: self.tokens_left]]
        if self._cost.predict(self._with_decodes(len(tokens), sum(tokens))) <= limit_ns:
            return len(tokens)
        attended = 0
        for place, known in enumerate(tokens):
            attended += known
            if (place or self._sequences) and self._cost.predict(self._with_decodes(place + 1, attended)) > limit_ns:
                return place
        return len(tokens)

    def add(self, count: int, known: int) -> None:
        """So many decodes; `known`: tokens of them all, those that are computed now included."""
        _, self._new, self._attended, self._sequences, self._context = self._with_decodes(count, known)

    def chunk(self, start: int, need: int, limit_ns: int) -> int:
        """Tokens that a request could get which lacks `need` from position `start` on.

        0: nothing left. The first slice of a step gets at least one token, whatever its time.
        """
        most = min(need, self._max_chunk, self.tokens_left)
        if most < 1:
            return 0
        low, high = 0 if self._sequences else 1, most  # the largest count that fits is in [low, high]
        middle = most  # the usual case first: all of it fits
        while low < high:
            if self._cost.predict(self._with(start, middle)) <= limit_ns:
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        return low

    def add_chunk(self, start: int, count: int) -> None:
        _, self._new, self._attended, self._sequences, self._context = self._with(start, count)

    def time_with(self, decodes: Sequence[Request]) -> int:
        return self._cost.predict(self._with_decodes(len(decodes), sum([request.known for request in decodes])))

    def time_of(self, start: int, need: int) -> int:
        """What a chunk would add to the step."""
        return self._cost.predict((0, need, attended_tokens(start, need), 1, start + need))

    def _with(self, start: int, count: int) -> Features:
        attended = self._attended + attended_tokens(start, count)
        return (1, self._new + count, attended, self._sequences + 1, self._context + start + count)

    def _with_decodes(self, count: int, known: int) -> Features:
        """`known`: tokens of them all, those that are computed now included."""
        return (1, self._new + count, self._attended + known, self._sequences + count, self._context + known)


# -- which chunks ------------------------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """A request that could get a chunk in this step."""

    request: Request
    start: int  # position of its next token
    need: int  # tokens that it lacks
    num_blocks: int  # available ones that it takes to let it in; 0: it is in
    num_slots: int  # 1: it is not in yet
    value: float  # of all that it lacks
    limit_ns: int  # the step may become so long for its sake


class Chosen(NamedTuple):
    candidate: Candidate
    tokens: int  # at least 1


FEW = 12  # up to so many candidates more than one order is tried


def choose(candidates: Sequence[Candidate], room: Room, num_blocks: int, num_slots: int) -> list[Chosen]:
    """What the step should take of these, while its room, the blocks and the slots last.

    A knapsack of four kinds of room. The order is by density: worth by the sum of the shares that a candidate takes of
    each kind (Toyoda, Management Science 21, 1975). With few candidates, orders by each kind alone are tried too, and
    the best outcome is taken.
    """
    if not candidates:
        return []
    left_ns = max(1, max(each.limit_ns for each in candidates) - room.time_ns())
    limits = (max(1, room.tokens_left), left_ns, max(1, num_blocks), max(1, num_slots))
    shares = [
        (
            each.need / limits[0],
            room.time_of(each.start, each.need) / limits[1],
            each.num_blocks / limits[2],
            each.num_slots / limits[3],
        )
        for each in candidates
    ]

    def taken(key: Callable[[int], float]) -> list[Chosen]:
        order = sorted(range(len(candidates)), key=key, reverse=True)  # stable: equal ones in the order given
        return _take([candidates[place] for place in order], room.copy(), num_blocks, num_slots)

    best = taken(lambda place: candidates[place].value / sum(shares[place]))
    whole = len(best) == len(candidates) and all(each.tokens == each.candidate.need for each in best)
    if whole or len(candidates) > FEW:
        return best
    keys: list[Callable[[int], float]] = [
        lambda place, kind=kind: candidates[place].value / max(shares[place][kind], 1e-9)  # type: ignore[misc]
        for kind in range(4)
        if sum(each[kind] for each in shares) > 1.0
    ]
    keys.append(lambda place: candidates[place].value)
    return max([best, *map(taken, keys)], key=worth)


def worth(chosen: Iterable[Chosen]) -> float:
    return sum([each.candidate.value * each.tokens / each.candidate.need for each in chosen])


def _take(order: Iterable[Candidate], room: Room, num_blocks: int, num_slots: int) -> list[Chosen]:
    chosen = []
    for each in order:
        if each.num_blocks > num_blocks or each.num_slots > num_slots:
            continue
        count = _grant(each, room)
        if count:
            chosen.append(Chosen(each, count))
            num_blocks -= each.num_blocks
            num_slots -= each.num_slots
    return chosen


def _grant(candidate: Candidate, room: Room) -> int:
    count = room.chunk(candidate.start, candidate.need, candidate.limit_ns)
    if count:
        room.add_chunk(candidate.start, count)
    return count


def in_turn(candidates: Sequence[Candidate], room: Room, num_blocks: int, num_slots: int) -> list[Chosen]:
    """In the order given, and nobody enters before one that does not fit."""
    chosen, room = [], room.copy()
    for each in candidates:
        if each.num_blocks > num_blocks or each.num_slots > num_slots:
            break
        count = _grant(each, room)
        if count:
            chosen.append(Chosen(each, count))
            num_blocks -= each.num_blocks
            num_slots -= each.num_slots
        elif each.num_slots:
            break
    return chosen


# -- the three composers -----------------------------------------------------------------------------------------------


class Composer(Protocol):
    weighs: bool  # by worth and deadlines; else in turn
    chosen_worth: float  # of all that was chosen so far
    in_turn_worth: float  # of what `in_turn` would have chosen instead

    def make_line(self) -> Line: ...

    def newcomers(self, line: Iterable[Request]) -> Iterable[Request]:
        """Of the waiting line, in its order, who may be admitted now. Asked at most twice a plan."""
        ...

    def choose(self, candidates: Sequence[Candidate], room: Room, num_blocks: int, num_slots: int) -> list[Chosen]:
        """What the step takes of these; nothing is changed."""
        ...

    def check(self, running: Iterable[Request]) -> None:
        """AssertionError where somebody runs who should not have been admitted."""
        ...


class Value:
    """Whoever is worth most for what it takes may enter between any two steps."""

    weighs = True

    def __init__(self, limits: Limits) -> None:
        self.chosen_worth = self.in_turn_worth = 0.0
        self._classes = limits.classes

    def make_line(self) -> Line:
        return FairLine(self._classes)

    def newcomers(self, line: Iterable[Request]) -> Iterable[Request]:
        return line

    def choose(self, candidates: Sequence[Candidate], room: Room, num_blocks: int, num_slots: int) -> list[Chosen]:
        chosen = choose(candidates, room, num_blocks, num_slots)
        found = baseline = worth(chosen)
        whole = len(chosen) == len(candidates) and all(each.tokens == each.candidate.need for each in chosen)
        if not whole and len(candidates) > 1:
            by_arrival = sorted(candidates, key=lambda each: (each.num_slots, each.request.order))
            baseline = worth(in_turn(by_arrival, room, num_blocks, num_slots))
        self.chosen_worth += found
        self.in_turn_worth += baseline
        return chosen

    def check(self, running: Iterable[Request]) -> None: ...


class FirstCome:
    """Whoever waits may enter between any two steps, in order."""

    weighs = False
    chosen_worth = 0.0  # nothing is worth more than anything else
    in_turn_worth = 0.0

    def __init__(self, limits: Limits) -> None: ...

    def make_line(self) -> Line:
        return FirstComeLine()

    def newcomers(self, line: Iterable[Request]) -> Iterable[Request]:
        return line

    def choose(self, candidates: Sequence[Candidate], room: Room, num_blocks: int, num_slots: int) -> list[Chosen]:
        return in_turn(candidates, room, num_blocks, num_slots)

    def check(self, running: Iterable[Request]) -> None: ...


class Static(FirstCome):
    """The first in line, as many as may run, make a batch, and nobody else enters until each of them has ended.

    The baseline that continuous batching is compared with, as in Orca (Yu et al., OSDI 2022). It is a kind one: who has
    ended is not computed further, and prompts of unlike lengths are not padded.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._num_slots = limits.max_running
        self._batch: list[Request] = []

    def newcomers(self, line: Iterable[Request]) -> Iterable[Request]:
        if all(request.state is State.FINISHED for request in self._batch):
            self._batch = self._form(line)
        return [request for request in self._batch if request.state is State.WAITING]

    def _form(self, line: Iterable[Request]) -> list[Request]:
        """A choice whose leader waits too enters with it or after it; in a batch before it, it would wait for ever."""
        batch: list[Request] = []
        for request in line:
            if len(batch) == self._num_slots:
                break
            leader = request.leader
            if leader is None or leader.state is State.FINISHED or leader in batch:
                batch.append(request)
        return batch

    def check(self, running: Iterable[Request]) -> None:
        assert len(self._batch) <= self._num_slots, f"a batch of {len(self._batch)}"
        for request in running:
            assert request in self._batch, f"{request.id} runs outside of the batch"


COMPOSERS: dict[str, Callable[[Limits], Composer]] = {"value": Value, "fcfs": FirstCome, "static": Static}
