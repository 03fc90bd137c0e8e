"""Prefix blocks that another engine holds: whether fetching them pays, and those that are on their way.

    one waits whose prefix goes on at a peer ──► fetched into its own blocks; it runs when that is done

A fetch runs beside steps and copies, and fetches end in any order. Any number of its first blocks may come; what does
not is computed. It is one try: whoever was fetched for runs afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.limits import Limits
from shoal.core.parking import Parking
from shoal.core.plan import Brought, Fetch
from shoal.core.progress import Request, State
from shoal.core.request import Peer
from shoal.core.tables import BlockTables

MAX_FETCHES = 4  # at one time: as many as an engine carries out at once
LATENCY_NS = 10_000_000  # to find the peer, to prove who asks, and until it has answered
LEAST_LIMIT_NS = 200_000_000
AHEAD_LIMIT_NS = 10_000_000_000  # where nobody waits for it
REST_NS = 2_000_000_000  # a peer of which nothing came is not asked again for so long
KNOWN_NS = 300_000_000_000  # what was learned of a peer is forgotten after so long without news: it may be faster now
MAX_LINKS = 1024
_LEARNED = 0.2  # weight of the newest fetch in the rate


@dataclass(slots=True)
class _Link:
    """What is known of the way to one peer."""

    ns_per_byte: float
    heard_ns: int
    rests_until_ns: int = 0


@dataclass(slots=True)
class _Flight:
    fetch: Fetch
    held: list[int]  # device blocks that stay as they are until it is done
    request: Request


class Fetching:
    def __init__(self, limits: Limits, tables: BlockTables, parking: Parking) -> None:
        self.num_brought = 0  # tokens
        self._size = limits.block_tokens
        self._limits = limits
        self._tables = tables
        self._parking = parking
        self._flights: dict[int, _Flight] = {}
        self._links: dict[str, _Link] = {}
        self._coming: set[bytes] = set()  # keys of blocks that are on their way
        self._num_fetches = 0

    def is_coming(self, request: Request) -> bool:
        """Whether the next block of its prefix is on its way for somebody else."""
        return bool(self._coming) and request.chain.next_key in self._coming

    def find(self, request: Request, num_in_host: int, now_ns: int) -> int:
        """How many blocks its peer should bring; 0: without it is sooner done. `chain.matched` is up to date;
        `num_in_host`: blocks with which its prefix goes on in the host tier, if bringing them pays."""
        if request.started or request.host_blocks or request.spec.sampling.prompt_logprobs is not None:
            return 0
        count, peer = self.find_ahead(request, now_ns), request.spec.peer
        if peer is None or count <= num_in_host or self.full:
            return 0
        first = len(request.chain.matched)
        without_ns = self._parking.read_ns(num_in_host) if num_in_host else 0.0
        start = (first + num_in_host) * self._size
        without_ns += self._parking.recompute_ns((count - num_in_host) * self._size, start)
        return count if self._fetch_ns(peer, count, now_ns) < without_ns else 0

    def find_ahead(self, request: Request, now_ns: int) -> int:
        """How many blocks its peer could bring beyond those that are here: a prefetch takes all, since nobody waits."""
        peer, limits = request.spec.peer, self._limits
        if peer is None or not limits.fetch_bytes_per_s or not limits.prefix_caching or self._rests(peer, now_ns):
            return 0
        return max(0, min(peer.num_blocks, (request.known - 1) // self._size) - len(request.chain.matched))

    @property
    def full(self) -> bool:
        """As many are under way as can be."""
        return len(self._flights) >= MAX_FETCHES

    def _rests(self, peer: Peer, now_ns: int) -> bool:
        link = self._links.get(peer.address)
        return link is not None and now_ns < link.rests_until_ns

    def _fetch_ns(self, peer: Peer, num_blocks: int, now_ns: int) -> float:
        """Beside those that come from the same peer."""
        link = self._links.get(peer.address)
        if link is not None and now_ns - link.heard_ns < KNOWN_NS:
            ns_per_byte = link.ns_per_byte
        else:
            ns_per_byte = 1e9 / self._limits.fetch_bytes_per_s
        fetches = [flight.fetch for flight in self._flights.values()]
        num_blocks += sum([len(fetch.blocks) for fetch in fetches if fetch.address == peer.address])
        return LATENCY_NS + num_blocks * self._limits.block_bytes * ns_per_byte

    def bring(self, request: Request, count: int) -> Fetch:
        """Into the table that it has just got."""
        peer, size = request.spec.peer, self._size
        assert peer is not None
        first = request.computed // size
        places = range(first, first + count)
        keys = tuple([request.chain.key(i, tuple(request.tokens[i * size : (i + 1) * size])) for i in places])
        # By then it would have been computed: a peer that is slow or dead costs as much again, not more.
        least_ns = AHEAD_LIMIT_NS if request.spec.prefetch else LEAST_LIMIT_NS
        limit_ns = max(least_ns, self._parking.recompute_ns(count * size, first * size))
        self._num_fetches += 1
        blocks = tuple(request.blocks[first : first + count])
        fetch = Fetch(self._num_fetches, request.id, peer.address, peer.incarnation, keys, blocks, limit_ns)
        self._flights[fetch.number] = _Flight(fetch, request.blocks, request)
        self._coming.update(keys)
        request.move(State.RETURNING)
        return fetch

    def done(self, brought: Brought, now_ns: int) -> Request | None:
        """Who was fetched for runs; None: it has ended. ValueError: no such fetch is under way."""
        flight = self._flights.get(brought.number)
        if flight is None or not 0 <= brought.num_good <= len(flight.fetch.blocks):
            raise ValueError(f"fetch {brought.number} brought {brought.num_good} blocks; under way: {[*self._flights]}")
        del self._flights[brought.number]
        self._coming.difference_update(flight.fetch.keys)
        self._learn(flight.fetch, brought, now_ns)
        request = flight.request
        if request.state is State.FINISHED:
            self._tables.pool.release(flight.held)
            return None
        num_tokens = brought.num_good * self._size
        self.num_brought += num_tokens
        request.computed = request.scheduled = request.computed + num_tokens
        self._tables.filled(request)
        request.move(State.RUNNING)
        return request

    def _learn(self, fetch: Fetch, brought: Brought, now_ns: int) -> None:
        num_bytes = brought.num_good * self._limits.block_bytes
        believed = 1e9 / self._limits.fetch_bytes_per_s
        link = self._links.pop(fetch.address, None)
        fresh = link is None or now_ns - link.heard_ns >= KNOWN_NS
        if link is None or fresh:
            link = _Link(believed, now_ns)
        link.heard_ns = now_ns
        if not brought.num_good:
            link.rests_until_ns = now_ns + REST_NS
        elif num_bytes:
            seen = max(0, brought.busy_ns - LATENCY_NS) / num_bytes
            link.ns_per_byte += (1.0 if fresh else _LEARNED) * (seen - link.ns_per_byte)
        self._links[fetch.address] = link
        if len(self._links) > MAX_LINKS:
            del self._links[next(iter(self._links))]  # heard of longest ago

    # -- watching ------------------------------------------------------------------------------------------------------

    def requests(self) -> list[Request]:
        """Live ones that wait for a fetch."""
        waiting = [flight.request for flight in self._flights.values()]
        return [request for request in waiting if request.state is not State.FINISHED]

    def device_tables(self) -> list[list[int]]:
        return [flight.held for flight in self._flights.values()]
