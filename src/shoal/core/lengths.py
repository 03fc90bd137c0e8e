"""How many output tokens will a request still make? Learned from those that ended, by class and tenant.

Of each length it is counted how many answers reached it and how many of these ended there; the share that ended is the
hazard, and hazards multiply up to the chance of reaching any length (the product-limit estimate: Kaplan and Meier,
J. Am. Stat. Assoc. 53, 1958). An answer that max_tokens or its caller cut short says "at least so long": it counts
among those that reached its length and not among those that ended. That is right where the cut has nothing to do with
the length that the answer would have had.

    lengths     in buckets, 4 to each doubling; within a bucket answers end evenly
    forgetting  an observation counts 1 / e as much after MEMORY newer ones
    shrinkage   hazards of a tenant are drawn to those of its class, and these to a prior, as if a few more answers had
                been seen that ended so (the mean of a beta process: Hjort, Ann. Statist. 18, 1990)

What was learned is made into a table of chances now and then, from which predictions are read in constant time. When,
that depends on the endings alone, so that a replay of the same endings answers alike whoever asked in between.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

MOST_TENANTS = 1024  # pairs of tenant and class; the one that was not learned of for longest is forgotten
MEMORY = 512  # observations
FEW = 8  # up to so much evidence a tenant is predicted as its class

_CLASS_DRAW, _TENANT_DRAW = 2.0, 8.0  # so many answers the prior and the class stand for
_OFFSET = 3  # a length's place is the length + _OFFSET, so that the first bucket begins at a power of two
_NUM_BUCKETS = 76
_END = 1 << 21  # the place behind the last bucket
_NEWS = 8  # a table is due when a share of 1 / _NEWS of what it should know is new;
_REST = 4  # so many endings pay for one table: bounds what a step pays where many end in it
_MAX_WEIGHT = 1e9


def bucket(place: int) -> int:
    """Of _OFFSET < place < _END. `Lengths.remaining` does the same in line."""
    octave = place.bit_length() - 3
    return (octave << 2) + (place >> octave) - 4


_STARTS = [(4 + at % 4) << at // 4 for at in range(_NUM_BUCKETS + 1)]  # places
_WIDTHS = [end - start for start, end in pairwise(_STARTS)]


class Piece(NamedTuple):
    """The chances of one bucket, for a request of which nothing is known yet."""

    start: int  # its first place
    reached: float  # chance of a length of at least that
    ending: float  # chance of any one length in the bucket
    beyond: float  # mean number of tokens from its first place on


def _prior() -> list[float]:
    """Hazards before anything is known: of a request that has made n tokens, 128 + n / 3 are to come on average.

    P(length >= n) = (1 + (n - 1) / 384)^-4, a generalised Pareto distribution.
    """
    reached = [(1 + (start - _OFFSET - 1) / 384) ** -4 for start in _STARTS]
    return [1 - after / before for before, after in pairwise(reached)]


def _pieces(hazards: list[float]) -> list[Piece]:
    reached = [1.0]
    for hazard in hazards:
        reached.append(reached[-1] * (1.0 - hazard))
    pieces = []
    beyond = 0.0
    for at in range(_NUM_BUCKETS - 1, -1, -1):
        width = _WIDTHS[at]
        ending = (reached[at] - reached[at + 1]) / width
        beyond += width * (reached[at] - ending * 0.5 * (width - 1))
        pieces.append(tuple.__new__(Piece, (_STARTS[at], reached[at], ending, beyond)))
    return pieces[::-1]


_PRIOR = _prior()
_PRIOR_PIECES = _pieces(_PRIOR)


class _Observed:
    """Endings of one tenant in one class, or of a whole class."""

    __slots__ = ("_cut", "_ended", "_lived", "_news", "_weight", "evidence", "hazards", "pieces")

    def __init__(self, hazards: list[float], pieces: list[Piece]) -> None:
        """`hazards` and `pieces`: until the first rebuild; no pieces: those of the class are better."""
        self._ended = [0.0] * _NUM_BUCKETS  # by bucket: weight of the answers that ended by themselves,
        self._cut = [0.0] * _NUM_BUCKETS  # of those that were cut,
        self._lived = [0.0] * _NUM_BUCKETS  # and of the latter, times the share of the bucket that they lived through
        self._weight = 1.0  # of the next observation: it grows, instead of all others shrinking
        self._news = 0  # observations since the last rebuild
        self.evidence = 0.0  # observations that are remembered
        self.hazards = hazards
        self.pieces = pieces

    @property
    def stale(self) -> bool:
        return self._news * _NEWS > self.evidence

    def add(self, length: int, cut: bool) -> None:
        place = min(length + _OFFSET, _END - 1)
        at = bucket(place)
        if cut:
            self._cut[at] += self._weight
            self._lived[at] += self._weight * (place + 1 - _STARTS[at]) / _WIDTHS[at]
        else:
            self._ended[at] += self._weight
        self._weight *= 1.0 + 1.0 / MEMORY
        if self._weight > _MAX_WEIGHT:
            self._start_over_with_small_numbers()
        self.evidence = self.evidence * (1.0 - 1.0 / MEMORY) + 1.0
        self._news += 1

    def _start_over_with_small_numbers(self) -> None:
        for counts in (self._ended, self._cut, self._lived):
            counts[:] = [value / self._weight for value in counts]
        self._weight = 1.0

    def rebuild(self, parent: list[float], draw: float) -> None:
        """`parent`: the hazards that these are drawn to, as if by `draw` answers."""
        drawn = draw * self._weight
        hazards = [0.0] * _NUM_BUCKETS
        longer = 0.0  # weight of the answers that passed the bucket
        for at in range(_NUM_BUCKETS - 1, -1, -1):
            ended = self._ended[at]
            hazards[at] = (ended + drawn * parent[at]) / (ended + longer + self._lived[at] + drawn)
            longer += ended + self._cut[at]
        self.hazards = hazards
        self.pieces = _pieces(hazards)
        self._news = 0


_UNKNOWN = _Observed(_PRIOR, _PRIOR_PIECES)


class Lengths:
    """One replica's. In memory only: a replica that starts again learns again. What is asked changes nothing."""

    def __init__(self) -> None:
        self._classes: dict[str, _Observed] = {}
        self._tenants: dict[tuple[str, str], _Observed] = {}  # by class and tenant, the one learned of last at the end
        self._due: dict[tuple[str, str], None] = {}  # of these, whose tables shall be made again, in this order
        self._num_ended = 0

    def remaining(self, service_class: str, tenant: str, generated: int, max_tokens_left: int) -> int:
        """Mean number of tokens to come of a request that has made `generated` and has not ended, where it is cut after
        `max_tokens_left` more: from 1 to that, or 0 where nothing is left."""
        if max_tokens_left <= 1:
            return max(0, max_tokens_left)
        seen = self._tenants.get((service_class, tenant))
        if seen is None or not seen.pieces:
            seen = self._classes.get(service_class, _UNKNOWN)
        pieces = seen.pieces

        place = generated + 1 + _OFFSET  # of the next token: the request is known to reach it
        limit = place + max_tokens_left
        if limit >= _END:
            place, limit = min(place, _END - 1), _END - 1
        octave = place.bit_length() - 3
        start, reached, ending, beyond = pieces[(octave << 2) + (place >> octave) - 4]
        passed = place - start
        chance = reached - ending * passed
        tokens = beyond - passed * (reached - ending * 0.5 * (passed - 1))
        octave = limit.bit_length() - 3
        start, reached, ending, beyond = pieces[(octave << 2) + (limit >> octave) - 4]
        passed = limit - start
        tokens -= beyond - passed * (reached - ending * 0.5 * (passed - 1))
        return min(max_tokens_left, max(1, int(tokens / chance + 0.5)))

    def ended(self, service_class: str, tenant: str, num_output: int, *, by_limit: bool) -> None:
        """An answer of so many tokens is over: it ended by itself, or `by_limit`, at max_tokens or by an abort."""
        if num_output < 1:
            return
        of_class = self._classes.get(service_class)
        if of_class is None:
            of_class = self._classes[service_class] = _Observed(_PRIOR, _PRIOR_PIECES)
        key = (service_class, tenant)
        seen = self._tenants.pop(key, None) or _Observed(_PRIOR, [])
        self._tenants[key] = seen
        if len(self._tenants) > MOST_TENANTS:
            oldest = next(iter(self._tenants))
            del self._tenants[oldest]
            self._due.pop(oldest, None)
        of_class.add(num_output, by_limit)
        seen.add(num_output, by_limit)
        if seen.stale and seen.evidence > FEW:
            self._due.setdefault(key)
        self._num_ended += 1
        if self._num_ended % _REST == 0:
            self._rebuild_next()

    def _rebuild_next(self) -> None:
        for of_class in self._classes.values():
            if of_class.stale:
                of_class.rebuild(_PRIOR, _CLASS_DRAW)
                return
        if self._due:
            key = next(iter(self._due))
            del self._due[key]
            self._tenants[key].rebuild(self._classes[key[0]].hazards, _TENANT_DRAW)
