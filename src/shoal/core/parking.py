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

from shoal.core.kv.host import HostTier
from shoal.core.limits import Limits
from shoal.core.plan import Copied, KvOp
from shoal.core.request import Request, State
from shoal.core.stepcost import StepCost, attended_tokens
from shoal.core.tables import BlockTables

LOST_SHARE = 0.75  # of what waits to be computed again stands before a victim; the rest comes after it
_LEARNED = 0.2  # weight of the newest copy in the rate


class Parking:
    def __init__(self, limits: Limits, tables: BlockTables, cost: StepCost) -> None:
        self.host = HostTier(limits.num_host_blocks)
        self.swapped_out_bytes = self.swapped_in_bytes = 0
        self.num_of_class: Counter[str] = Counter()  # parked ones, those that are being copied included
        self._limits = limits
        self._tables = tables
        self._cost = cost
        self._ns_per_byte = 1e9 / limits.copy_bytes_per_s
        self._leaving: list[Request] = []  # wait until the last step that names them has returned
        self._ops: deque[tuple[KvOp, Request, list[int]]] = deque()  # in flight, with the device blocks that they hold
        self._num_ops = 0

    @property
    def num_leaving_blocks(self) -> int:
        """Device blocks that come back when copies to the host are done."""
        pool = self._tables.pool
        tables = [request.blocks for request in self._leaving] + [held for op, _, held in self._ops if op.out]
        return sum([pool.num_sole(table) for table in tables])

    def pays(self, request: Request, tokens_lost: int) -> bool:
        """Whether the KV of a victim should be kept: there is room, and it is back sooner than computed again, behind
        the copies that wait and the `tokens_lost` that wait to be computed again."""
        num_blocks = self._num_blocks(request)
        if not num_blocks or num_blocks > self.host.num_free:
            return False
        if request.spec.sampling.prompt_logprobs is not None and request.scheduled < request.num_prompt:
            return False  # a chunk's last logits score the next one's first token, and the runner would forget them
        if self._limits.preemption != "auto":
            return self._limits.preemption == "swap"
        ahead = sum([len(op.device_blocks) for op, _, _ in self._ops]) + sum(map(self._num_blocks, self._leaving))
        # While blocks are left nobody waits for the copies out: the victim stays away while a step serves whom it makes
        # way for, and the longest one stands for that. Only what the copies out take beyond it delays the copy back.
        away_ns = self._limits.max_step_ns if self._tables.pool.num_available >= num_blocks else 0
        block_ns = self._limits.block_bytes * self._ns_per_byte
        swap_ns = max(0, (ahead + num_blocks) * block_ns - away_ns) + num_blocks * block_ns
        return swap_ns <= self._recompute_ns(request.scheduled) + LOST_SHARE * self._recompute_ns(tokens_lost)

    def _recompute_ns(self, tokens: int) -> int:
        """In steps of their own, as long as they may be."""
        base_ns = self._cost.predict((1, 0, 0, 0, 0))
        tokens_ns = self._cost.predict((0, tokens, attended_tokens(0, tokens), 1, tokens))
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
            self._start(request, True, request.blocks[: len(request.host_blocks)], request.host_blocks)
            for request in ready
        ]

    def must_copy(self, request: Request) -> bool:
        """Whether the host has blocks of a waiting request that the prefix index has not."""
        return len(request.host_blocks) > len(request.chain.matched)

    def bring(self, request: Request) -> KvOp:
        """Its table is there, with the blocks that were found in the prefix index; the rest is copied from the host."""
        num_found, num_kept = request.computed // self._limits.block_tokens, len(request.host_blocks)
        request.move(State.RETURNING)
        return self._start(request, False, request.blocks[num_found:num_kept], request.host_blocks[num_found:])

    def drop(self, request: Request) -> None:
        """The host's copy is not needed any more."""
        if request.host_blocks:
            self.num_of_class[request.spec.service_class] -= 1
            self.host.release(request.host_blocks)
            request.host_blocks, request.kept = [], 0

    def done(self, copied: Copied) -> Request:
        """The oldest copy is done; who was parking waits now, who was returning runs."""
        if not self._ops or self._ops[0][0].number != copied.number:
            first = self._ops[0][0].number if self._ops else 0
            raise ValueError(f"copy {copied.number} is done; expected {first} of {len(self._ops)} in flight")
        op, request, held = self._ops.popleft()
        num_bytes = len(op.device_blocks) * self._limits.block_bytes
        if copied.busy_ns > 0 and num_bytes:
            self._ns_per_byte += _LEARNED * (copied.busy_ns / num_bytes - self._ns_per_byte)
        ended = request.state is State.FINISHED
        if op.out:
            self.swapped_out_bytes += num_bytes
            if not ended:
                self._tables.filled(request)
                request.kept, request.computed, request.scheduled = request.computed, 0, 0
                request.blocks, request.capacity = [], 0
                request.move(State.WAITING)
        else:
            self.swapped_in_bytes += num_bytes
            if not ended:
                request.computed = request.scheduled = max(request.computed, request.kept)
                self.drop(request)
                request.move(State.RUNNING)
        if op.out or ended:
            self._tables.pool.release(held)
        if ended:
            self.host.release(request.host_blocks)
            request.host_blocks, request.kept = [], 0
        return request

    def abandon(self, request: Request, returned: int) -> None:
        """It has ended. What a copy in flight holds is given back when that is done."""
        if request in self._leaving:
            self._leaving.remove(request)
            self._tables.leave(request, returned)
        if request.state in (State.PARKING, State.RETURNING) and request.blocks:
            request.blocks, request.capacity = [], 0
            self.num_of_class[request.spec.service_class] -= 1
        else:
            self.drop(request)

    def check(self, waiting: Iterable[Request]) -> None:
        tables = [request.host_blocks for request in (*waiting, *self._leaving)]
        tables += [request.host_blocks for _, request, _ in self._ops]
        self.host.check(tables)

    def requests(self) -> list[Request]:
        """Live ones that are neither in the line nor among the running."""
        copying = [request for _, request, _ in self._ops if request.state is not State.FINISHED]
        return self._leaving + copying

    def device_tables(self) -> list[list[int]]:
        """Of blocks that are being copied or will be."""
        return [request.blocks for request in self._leaving] + [held for _, _, held in self._ops]

    def _num_blocks(self, request: Request) -> int:
        return -(-request.scheduled // self._limits.block_tokens)

    def _start(self, request: Request, out: bool, device: Sequence[int], host: Sequence[int]) -> KvOp:
        self._num_ops += 1
        op = KvOp(self._num_ops, request.id, out, tuple(device), tuple(host))
        self._ops.append((op, request, request.blocks))
        return op
