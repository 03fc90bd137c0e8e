"""Prefix blocks in the host tier: which are copied there, and which come back for a prompt.

    a request ends, its blocks are cached on the device ──► copied to the host beside the steps, when no copy waits
    one waits whose prefix goes on in the host tier ──► copied back into its own blocks; it runs when that is done

So what the device gives up is in the host tier already, and giving it up never waits for a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from shoal.core.kv.host import HostEntry
from shoal.core.kv.prefix import Entry
from shoal.core.limits import Limits
from shoal.core.parking import Parking
from shoal.core.plan import KvOp
from shoal.core.progress import Request, State
from shoal.core.tables import BlockTables

MAX_COPY_BLOCKS = 64  # in one copy: whoever is parked meanwhile waits for its end
MAX_TAILS = 1024  # ended requests whose blocks wait to be copied


class Sharing:
    def __init__(self, limits: Limits, tables: BlockTables, parking: Parking) -> None:
        self.num_hit = 0  # tokens found
        self._size = limits.block_tokens
        self._enabled = limits.num_host_blocks > 0 and limits.prefix_caching
        self._tables = tables
        self._parking = parking
        self._host = parking.host
        self._tails: deque[Entry] = deque(maxlen=MAX_TAILS)
        self._coming: set[bytes] = set()  # keys of blocks that are on their way back

    # -- to the host ---------------------------------------------------------------------------------------------------

    def ended(self, request: Request) -> None:
        """Its blocks are cached now; they are copied when there is time."""
        if self._enabled and isinstance(request.chain.tail, Entry):
            self._tails.append(request.chain.tail)

    def start_spilling(self) -> list[KvOp]:
        """At most one copy, and none before those of requests."""
        while self._tails and not self._parking.busy:
            path = [entry for entry in self._tails[0].path() if entry.live]
            find = self._host.find
            found = [find(entry.key) for entry in path]
            there = [each for each in found if each is not None]
            missing = [place for place, each in enumerate(found) if each is None]
            self._host.used([each.key for each in reversed(there)])
            if not missing or not self._pays(missing[0], len(missing)):
                self._tails.popleft()
                continue
            self._host.hold(there)  # no prefix makes room for its own end
            missing = missing[: min(MAX_COPY_BLOCKS, self._host.num_available)]
            if missing:
                entries = [path[place] for place in missing]
                held = self._tables.pool.acquire(path[: missing[-1] + 1])
                device, host = [entry.block for entry in entries], self._host.allocate(len(entries))
                return [self._parking.start(True, device, host, held, spilled=entries, read=there)]
            self._host.let_go(there)
            if not there:
                return []  # the tier is full of what others own
            self._tails.popleft()
        return []

    def _pays(self, first: int, num_blocks: int) -> bool:
        """Whether blocks from the `first` on are back sooner than computed again."""
        recompute_ns = self._parking.recompute_ns(num_blocks * self._size, first * self._size)
        return self._parking.read_ns(num_blocks) < recompute_ns

    # -- and back ------------------------------------------------------------------------------------------------------

    def is_coming(self, request: Request) -> bool:
        """Whether the next block of its prefix is on its way back for somebody else."""
        return bool(self._coming) and request.chain.next_key in self._coming

    def find(self, request: Request) -> list[HostEntry]:
        """The blocks with which its prefix goes on in the host tier, if bringing them pays. `chain.matched` is up to
        date."""
        if not self._enabled or not self._host.num_cached or request.spec.sampling.prompt_logprobs is not None:
            return []
        end = (request.known - 1) // self._size
        found = self._host.match(request.chain, request.tokens, self._size, end)
        return found if found and self._pays(len(request.chain.matched), len(found)) else []

    def bring(self, request: Request, entries: Sequence[HostEntry]) -> KvOp:
        """Into the table that it has just got."""
        first = request.computed // self._size
        self._host.hold(entries)
        self._host.used(reversed(request.chain.keys[: first + len(entries)]))
        self._coming.update([entry.key for entry in entries])
        self.num_hit += len(entries) * self._size
        request.kept = (first + len(entries)) * self._size
        request.move(State.RETURNING)
        device, host = request.blocks[first : first + len(entries)], [entry.block for entry in entries]
        return self._parking.start(False, device, host, request.blocks, request=request, read=entries)

    def came(self, request: Request) -> None:
        """A copy for it is done."""
        if self._coming:
            self._coming.difference_update(request.chain.keys)
