"""The disk tier: which prefix blocks are written there, and which are read for a prompt before it is composed.

    a block came to the host tier ──► written beside the steps, when no write is under way
    one arrives whose prefix goes on on the disk ──► read into host blocks; it waits for that, and holds nobody up
                                                 ──► sharing.py finds them in the host tier

What lies on the disk is decided by the store that keeps it. Known here is what the store has told, which may be out of
date by now: what cannot be read is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.core.kv.hashing import NO_KEY
from shoal.core.kv.host import HostEntry
from shoal.core.kv.news import DISK
from shoal.core.limits import Limits
from shoal.core.parking import Parking
from shoal.core.plan import Copied, Held, KvOp
from shoal.core.progress import Request
from shoal.core.tables import BlockTables

MAX_WRITE_BLOCKS = 16  # in one move
MAX_READ_BLOCKS = 128  # in all moves under way
MAX_FRESH = 4096  # blocks that wait to be written
_LEARNED = 0.2  # weight of the newest read in the rate
_FORGOTTEN = 0.05  # of what was learned, each time that it keeps a read from being tried


class Stored(NamedTuple):
    """A block on the disk. A hash stands for its token ids, which take ten times as much: it is only there to tell
    blocks apart whose keys collide."""

    parent: bytes  # key of the block before
    check: int


@dataclass(slots=True)
class Move:
    """One that is under way."""

    op: KvOp
    entries: list[HostEntry]  # written: they are cached; read: they will be
    prefix: list[bytes]  # read: keys up to the last of them
    waiting: list[Request] = field(default_factory=list)


class Storing:
    def __init__(self, limits: Limits, tables: BlockTables, parking: Parking, held: Iterable[Held]) -> None:
        """`held`: what an earlier run left."""
        self.num_hit = 0  # tokens read
        self._size = limits.block_tokens
        self._block_bytes = limits.block_bytes
        self._tables = tables
        self._parking = parking
        self._host = parking.host
        self._held: dict[bytes, Stored] = {}
        self._moves: dict[int, Move] = {}
        self._coming: dict[bytes, Move] = {}  # keys of blocks that are being read
        self._waiting: dict[Request, int] = {}  # for so many moves
        self._writing = False
        self._ns_per_byte = self._believed = 0.0  # of a read: learned, and before anything was
        if limits.disk_bytes_per_s and limits.prefix_caching:
            self._held = {each.key: Stored(each.parent, hash(each.tokens)) for each in held}
            self._host.fresh = deque(maxlen=MAX_FRESH)
            self._ns_per_byte = self._believed = 1e9 / limits.disk_bytes_per_s

    def tell_held(self) -> None:
        """As news: a block after the one before it."""
        told: set[bytes] = set()
        for last in self._held:
            key, path = last, list[bytes]()
            while key in self._held and key not in told:
                told.add(key)
                path.append(key)
                key = self._held[key].parent
            for one in reversed(path):
                self._tell(one, self._held[one].parent)

    def _tell(self, key: bytes, parent: bytes | None) -> None:
        """`parent`: None: it is not there any more."""
        if self._tables.index.news is not None:
            before = b"" if parent is None or parent == NO_KEY else parent
            self._tables.index.news.append((key, before, DISK, parent is not None))

    # -- to the disk ---------------------------------------------------------------------------------------------------

    def start_writing(self) -> list[KvOp]:
        """At most one write at a time: the next blocks that came to the host tier and are still there."""
        fresh = self._host.fresh
        if not fresh or self._writing:
            return []
        entries: list[HostEntry] = []
        most = min(MAX_WRITE_BLOCKS, max(1, self._host.num_blocks // 8))  # nobody else gets these blocks meanwhile
        while fresh and len(entries) < most:
            entry = fresh.popleft()
            if self._host.find(entry.key) is entry and entry.key not in self._held:
                entries.append(entry)
        recompute_ns = self._parking.recompute_ns(len(entries) * self._size)
        if not entries or self._read_ns(len(entries)) >= recompute_ns:
            return []
        self._host.hold(entries)
        self._writing = True
        return [self._start(True, "", entries, []).op]

    # -- and back ------------------------------------------------------------------------------------------------------

    def is_waiting(self, request: Request) -> bool:
        """Whether blocks are being read for it."""
        return request in self._waiting

    def fetch(self, request: Request) -> list[KvOp]:
        """It has just arrived: what its prefix has on the disk alone is read, if that is sooner there than computed."""
        if not self._held or request.leader is not None or request.spec.sampling.prompt_logprobs is not None:
            return []
        self._tables.blocks_to_enter(request)  # finds what the device has
        first, found, moves = self._find(request)
        found = found[: min(MAX_READ_BLOCKS - self._num_reading, self._host.num_available)]
        if found:
            recompute_ns = self._parking.recompute_ns(len(found) * self._size, first * self._size)
            if self._read_ns(self._num_reading + len(found)) < recompute_ns:
                for entry, block in zip(found, self._host.allocate(len(found)), strict=True):
                    entry.block = block
                end = first + len(found)
                moves.append(self._start(False, request.id, found, request.chain.keys[:end]))
                self._coming.update(dict.fromkeys([entry.key for entry in found], moves[-1]))
            else:
                self._ns_per_byte += _FORGOTTEN * (self._believed - self._ns_per_byte)
                found = []
        for move in moves:
            move.waiting.append(request)
        if moves:
            self._waiting[request] = len(moves)
        return [moves[-1].op] if found else []

    def _find(self, request: Request) -> tuple[int, list[HostEntry], list[Move]]:
        """Of its prefix beyond the device: the blocks that only the disk has, the place of the first one, and the moves
        that bring others."""
        chain = request.chain
        first, found, moves, num_passed = len(chain.matched), list[HostEntry](), list[Move](), len(chain.matched)
        end = (request.known - 1) // self._size
        for index, key, block_tokens, check in chain.beyond(request.tokens, self._size, end):
            cached, move, held = self._host.find(key), self._coming.get(key), self._held.get(key)
            if cached is not None:
                if cached.check != check:
                    break  # sharing.py counts it
            elif move is not None:
                moves += [] if move in moves else [move]
            elif held is not None:
                before = chain.keys[index - 1] if index else b""
                if held.check != hash(block_tokens) or held.parent != (before or NO_KEY):
                    self._tables.index.collisions += 1
                    break
                first = first if found else index
                found.append(HostEntry(key, before, block_tokens, check, -1))
            else:
                break
            num_passed += 1
        self._host.used(reversed(chain.keys[:num_passed]))  # what the host has of it is not to make room for the rest
        return first, found, moves

    @property
    def _num_reading(self) -> int:
        return len(self._coming)

    def _read_ns(self, num_blocks: int) -> float:
        """Until so many blocks are on the device."""
        return num_blocks * self._block_bytes * self._ns_per_byte + self._parking.read_ns(num_blocks)

    # -- moves ---------------------------------------------------------------------------------------------------------

    def _start(self, out: bool, id: str, entries: list[HostEntry], prefix: list[bytes]) -> Move:
        held = tuple([Held(entry.key, entry.parent or NO_KEY, entry.tokens) for entry in entries])
        blocks = tuple([entry.block for entry in entries])
        op = KvOp(self._parking.new_number(), id, out, (), blocks, held)
        move = self._moves[op.number] = Move(op, entries, prefix)
        return move

    def is_under_way(self, number: int) -> bool:
        return number in self._moves

    def done(self, copied: Copied) -> None:
        """A move is done, in whatever order."""
        move = self._moves.pop(copied.number)
        bad = set(copied.bad)
        if move.op.out:
            self._written(move, bad)
        else:
            self._read(move, bad, copied.busy_ns)
        for key in copied.dropped:
            if self._held.pop(key, None) is not None:
                self._tell(key, None)

    def _written(self, move: Move, bad: set[int]) -> None:
        self._writing = False
        self._host.let_go(move.entries)
        for place, held in enumerate(move.op.disk):
            if place not in bad and held.key not in self._held:
                self._held[held.key] = Stored(held.parent, hash(held.tokens))
                self._tell(held.key, held.parent)

    def _read(self, move: Move, bad: set[int], busy_ns: int) -> None:
        if busy_ns > 0 and not bad:
            num_bytes = len(move.entries) * self._block_bytes
            self._ns_per_byte += _LEARNED * (busy_ns / num_bytes - self._ns_per_byte)
        for place, entry in enumerate(move.entries):
            del self._coming[entry.key]
            if place in bad:
                self._host.release([entry.block])
            else:
                self._host.keep(entry)
        self._host.used(reversed(move.prefix))
        self.num_hit += (len(move.entries) - len(bad)) * self._size
        for request in move.waiting:
            self._waiting[request] -= 1
            if not self._waiting[request]:
                del self._waiting[request]

    # -- watching ------------------------------------------------------------------------------------------------------

    def host_tables(self) -> list[tuple[int, ...]]:
        """Host blocks that are being read into."""
        return [move.op.host_blocks for move in self._moves.values() if not move.op.out]
