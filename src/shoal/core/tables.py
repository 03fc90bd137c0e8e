"""Each request's block table: found in the prefix index, grown, filled, given back when nobody writes to it any more.

Blocks of a request that left the batch are held until the last step that names them has returned: until then the
runner may still write into them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from shoal.core.kv.blocks import BlockPool
from shoal.core.kv.evict import ORDERS
from shoal.core.kv.prefix import PrefixIndex
from shoal.core.limits import Limits
from shoal.core.progress import Request


class BlockTables:
    def __init__(self, limits: Limits) -> None:
        self._size = limits.block_tokens
        self._caching = limits.prefix_caching
        self.index = PrefixIndex(limits.block_tokens)
        self.pool = BlockPool(limits.num_blocks, self.index, ORDERS[limits.eviction](limits.num_blocks))
        self._held: dict[int, list[list[int]]] = {}  # step -> tables to release when it has returned
        self._unfound: deque[Request] = deque()  # have filled blocks that are not in the index yet
        self.num_queried = 0  # tokens looked up in the prefix index at admissions
        self.num_hit = 0  # tokens found

    def blocks_to_enter(self, request: Request) -> int:
        """How many available blocks it takes to give the request its table; the prefix hits are kept for `enter`.

        All known tokens get their blocks at once, so a prompt that started never waits for blocks half way.
        """
        hits = self.index.match(request.chain, request.tokens, self._most_hits(request))
        return -(-request.known // self._size) - len(hits) + self.pool.num_cached_of(hits)

    def _most_hits(self, request: Request) -> int:
        """Blocks. One token at least is computed: the next one is sampled from its logits."""
        looked_up = self._caching and request.spec.sampling.prompt_logprobs is None
        return (request.known - 1) // self._size if looked_up else 0

    def enter(self, request: Request) -> None:
        """The request gets its table, and the tokens found in the prefix index count as computed."""
        self.place(request)
        self.num_queried += request.known
        self.num_hit += request.computed

    def place(self, request: Request) -> None:
        """`enter` for one that computes nothing, and does not count as a look-up."""
        hits = request.chain.matched
        beyond = request.chain.beyond_hits(request.tokens, self._size, self._most_hits(request))
        blocks = self.pool.acquire(hits, beyond)
        blocks += self.pool.allocate(-(-request.known // self._size) - len(hits))
        request.blocks = blocks
        request.capacity = len(blocks) * self._size
        request.scheduled = request.computed = len(hits) * self._size
        request.chain.adopt(hits)

    def grow(self, request: Request) -> tuple[int, ...]:
        """One more block."""
        block = self.pool.take()
        request.blocks.append(block)
        request.capacity += self._size
        return (block,)

    def filled(self, request: Request) -> None:
        """`request.computed` has grown: its full blocks can be found from now on."""
        if self._caching:
            self.index.extend(request.chain, request.tokens, request.blocks, request.computed // self._size)

    def filled_later(self, request: Request) -> None:
        """The same for one block of output, which nobody waits for: done by `step_returned`, some in each step, so that
        a step in which all requests fill a block at once takes no longer than another."""
        if self._caching:
            self._unfound.append(request)

    def leave(self, request: Request, returned: int) -> None:
        """The request leaves the batch; `returned` is the newest step that came back."""
        self.filled(request)
        if request.last_step > returned:
            self._held.setdefault(request.last_step, []).append(request.blocks)
        else:
            self.pool.release(request.blocks)
        request.blocks = []
        request.capacity = 0

    def step_returned(self, step: int) -> None:
        for table in self._held.pop(step, ()):
            self.pool.release(table)
        waiting = self._unfound
        for _ in range(min(len(waiting), max(32, len(waiting) // 8))):
            self.filled(waiting.popleft())  # nothing is left to do for a request that left meanwhile

    def num_coming(self, running: Iterable[Request]) -> int:
        """Blocks that are available now, or will be without anyone's help as soon as the steps in flight return."""
        tables = [table for tables in self._held.values() for table in tables]
        tables += [request.blocks for request in running if request.scheduled >= request.final]
        return self.pool.num_available + sum([self.pool.num_sole(table) for table in tables])

    def check(self, running: Iterable[Request], copied: list[list[int]], returned: int, planned: int) -> None:
        """AssertionError where a block is lost, owned wrongly or held for a step that is not in flight. `copied`:
        tables of blocks that are being copied."""
        assert all(returned < step <= planned for step in self._held), f"blocks held for steps {list(self._held)}"
        held = [table for tables in self._held.values() for table in tables]
        self.pool.check(held + copied + [request.blocks for request in running])
