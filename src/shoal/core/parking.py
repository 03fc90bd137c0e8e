"""Parking: a preempted request's KV goes to the host tier and comes back, copied beside the steps; nothing is lost.

    running ──park──► parking ──copied──► waiting (in the line, its KV in host blocks)
                                              │
    running ◄──copied── returning ◄───bring───┘

A block that is being copied belongs to its request until the copy is done, on both sides, whatever becomes of the
request: its owner is in here, and nobody else is given it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shoal.core.kv.host import HostEntry, HostTier
from shoal.core.kv.prefix import Entry
from shoal.core.limits import Limits
from shoal.core.plan import Copied, KvOp
from shoal.core.progress import Request, State
from shoal.core.stepcost import StepCost, attended_tokens
from shoal.core.tables import BlockTables

LOST_SHARE = 0.75  # of what waits to be computed again stands before a victim; the rest comes after it
_LEARNED = 0.2  # weight of the newest copy in the rate


@dataclass(slots=True)
class Copy:
    """One that is in flight."""

    op: KvOp
    held: list[int]  # device blocks that stay as they are until it is done
    request: Request | None = None  # whose KV moves
    spilled: list[Entry] = field(default_factory=list)  # prefix blocks that go to the host
    read: Sequence[HostEntry] = ()  # prefix blocks that stay in the host tier meanwhile; back: those that are copied


class Parking:
    def __init__(self, limits: Limits, tables: BlockTables, cost: StepCost) -> None:
        self.host = HostTier(limits.num_host_blocks, tables.index)
        self.num_bad = 0  # blocks that came back with another content
        self.swapped_out_bytes = self.swapped_in_bytes = 0
        self.num_of_class: Counter[str] = Counter()  # parked ones, those that are being copied included
        self._limits = limits
        self._tables = tables
        self._cost = cost
        self._ns_per_byte = 1e9 / limits.copy_bytes_per_s
        self._leaving: list[Request] = []  # wait until the last step that names them has returned
        self._copies: deque[Copy] = deque()
        self._num_ops = 0

    @property
    def num_leaving_blocks(self) -> int:
        """Device blocks that come back when copies to the host are done."""
        pool = self._tables.pool
        tables = [request.blocks for request in self._leaving] + [copy.held for copy in self._copies if copy.op.out]
        return sum([pool.num_sole(table) for table in tables])

    def pays(self, request: Request, tokens_lost: int) -> bool:
        """Whether the KV of a victim should be kept: there is room, and it is back sooner than computed again, behind
        the copies that wait and the `tokens_lost` that wait to be computed again."""
        num_blocks = self._num_blocks(request)
        if not num_blocks or num_blocks > self.host.num_available:
            return False
        if request.spec.sampling.prompt_logprobs is not None and request.scheduled < request.num_prompt:
            return False  # a chunk's last logits score the next one's first token, and the runner would forget them
        if self._limits.preemption != "auto":
            return self._limits.preemption == "swap"
        ahead = self._num_copying + sum(map(self._num_blocks, self._leaving))
        # While blocks are left nobody waits for the copies out: the victim stays away while a step serves whom it makes
        # way for, and the longest one stands for that. Only what the copies out take beyond it delays the copy back.
        away_ns = self._limits.max_step_ns if self._tables.pool.num_available >= num_blocks else 0
        block_ns = self._limits.block_bytes * self._ns_per_byte
        swap_ns = max(0, (ahead + num_blocks) * block_ns - away_ns) + num_blocks * block_ns
        return swap_ns <= self.recompute_ns(request.scheduled) + LOST_SHARE * self.recompute_ns(tokens_lost)

    def read_ns(self, num_blocks: int) -> float:
        """Until so many blocks are back, behind the copies that wait."""
        return (self._num_copying + num_blocks) * self._limits.block_bytes * self._ns_per_byte

    @property
    def _num_copying(self) -> int:
        """Blocks."""
        return sum([len(copy.op.device_blocks) for copy in self._copies])

    def recompute_ns(self, tokens: int, start: int = 0) -> int:
        """Of so many tokens from position `start` on, in steps of their own, as long as they may be."""
        base_ns = self._cost.predict((1, 0, 0, 0, 0))
        tokens_ns = self._cost.predict((0, tokens, attended_tokens(start, tokens), 1, start + tokens))
        return tokens_ns + base_ns * (tokens_ns // max(1, self._limits.max_step_ns - base_ns))

    def park(self, request: Request) -> None:
        """It has just left the batch and keeps its table until the copy is done."""
        request.move(State.PARKING)
        request.host_blocks = self.host.allocate(self._num_blocks(request))
        self.num_of_class[request.spec.service_class] += 1
        self._leaving.append(request)

    def start_leaving(self, returned: int) -> list[KvOp]:
        """Copies of those whose KV no step in flight writes any more."""
        ready = [request for request in self._leaving if request.last_step <= returned]
        self._leaving = [request for request in self._leaving if request.last_step > returned]
        return [
            self.start(
                True, request.blocks[: len(request.host_blocks)], request.host_blocks, request.blocks, request=request
            )
            for request in ready
        ]

    def must_copy(self, request: Request) -> bool:
        """Whether the host has blocks of a waiting request that the prefix index has not."""
        return len(request.host_blocks) > len(request.chain.matched)

    def bring(self, request: Request) -> KvOp:
        """Its table is there, with the blocks that were found in the prefix index; the rest is copied from the host."""
        num_found, num_kept = request.computed // self._limits.block_tokens, len(request.host_blocks)
        request.move(State.RETURNING)
        device, host = request.blocks[num_found:num_kept], request.host_blocks[num_found:]
        return self.start(False, device, host, request.blocks, request=request)

    def drop(self, request: Request) -> None:
        """The host's copy is not needed any more."""
        if request.host_blocks:
            self.num_of_class[request.spec.service_class] -= 1
            self.host.release(request.host_blocks)
            request.host_blocks, request.kept = [], 0

    def done(self, copied: Copied) -> Request | None:
        """The oldest copy is done; who was parking waits now, who was returning runs. None: it was nobody's."""
        if not self._copies or self._copies[0].op.number != copied.number:
            first = self._copies[0].op.number if self._copies else 0
            raise ValueError(f"copy {copied.number} is done; expected {first} of {len(self._copies)} in flight")
        copy = self._copies.popleft()
        op, request = copy.op, copy.request
        num_bytes = len(op.device_blocks) * self._limits.block_bytes
        if copied.busy_ns > 0 and num_bytes:
            self._ns_per_byte += _LEARNED * (copied.busy_ns / num_bytes - self._ns_per_byte)
        self._count(op.out, num_bytes)
        self.host.let_go(copy.read)
        self.num_bad += len(copied.bad)
        for place in copied.bad:
            if copy.read and not copy.read[place].num_readers:
                self.host.forget(copy.read[place])
        for entry, block in zip(copy.spilled, op.host_blocks, strict=False):
            self.host.store(entry, block)
        if copy.spilled:
            self.host.used([entry.key for entry in reversed(copy.spilled[-1].path())])
        if request is None or request.state is State.FINISHED:
            self._tables.pool.release(copy.held)
            if request is not None:
                self.host.release(request.host_blocks)
                request.host_blocks, request.kept = [], 0
        elif op.out:
            self._tables.filled(request)
            self._tables.pool.release(copy.held)
            request.kept, request.computed, request.scheduled = request.computed, 0, 0
            request.blocks, request.capacity = [], 0
            request.move(State.WAITING)
        else:
            if copied.bad:
                first = request.blocks.index(op.device_blocks[0])
                request.kept = (first + min(copied.bad)) * self._limits.block_tokens
                if request.spec.sampling.prompt_logprobs is not None and request.kept < request.num_prompt:
                    request.kept = 0  # what would score the next prompt token is not there any more
            request.computed = request.scheduled = max(request.computed, request.kept)
            self._tables.filled(request)
            self.drop(request)
            request.move(State.RUNNING)
        return request

    def _count(self, out: bool, num_bytes: int) -> None:
        if out:
            self.swapped_out_bytes += num_bytes
        else:
            self.swapped_in_bytes += num_bytes

    def abandon(self, request: Request, returned: int) -> None:
        """It has ended. What a copy in flight holds is given back when that is done."""
        if request in self._leaving:
            self._leaving.remove(request)
            self._tables.leave(request, returned)
        if request.state in (State.PARKING, State.RETURNING) and request.blocks:
            request.blocks, request.capacity = [], 0
            self.num_of_class[request.spec.service_class] -= bool(request.host_blocks)
        else:
            self.drop(request)

    def check(self, waiting: Iterable[Request], others: Iterable[Iterable[int]]) -> None:
        """`others`: host blocks that belong to nobody in here."""
        tables: list[Iterable[int]] = [request.host_blocks for request in (*waiting, *self._leaving)]
        tables += [copy.request.host_blocks for copy in self._copies if copy.request is not None]
        tables += [copy.op.host_blocks for copy in self._copies if copy.spilled]
        self.host.check([*tables, *others])

    def requests(self) -> list[Request]:
        """Live ones that are neither in the line nor among the running."""
        copying = [copy.request for copy in self._copies if copy.request is not None]
        return self._leaving + [request for request in copying if request.state is not State.FINISHED]

    def device_tables(self) -> list[list[int]]:
        """Of blocks that are being copied or will be."""
        return [request.blocks for request in self._leaving] + [copy.held for copy in self._copies]

    def _num_blocks(self, request: Request) -> int:
        return -(-request.scheduled // self._limits.block_tokens)

    @property
    def busy(self) -> bool:
        return bool(self._copies or self._leaving)

    def start(
        self,
        out: bool,
        device: Sequence[int],
        host: Sequence[int],
        held: list[int],
        *,
        request: Request | None = None,
        spilled: list[Entry] | None = None,
        read: Sequence[HostEntry] = (),
    ) -> KvOp:
        """A copy from now on in flight, until `done`."""
        op = KvOp(self.new_number(), request.id if request is not None else "", out, tuple(device), tuple(host))
        self._copies.append(Copy(op, held, request, spilled or [], read))
        return op

    def new_number(self) -> int:
        """Of the next KvOp."""
        self._num_ops += 1
        return self._num_ops
