"""A runner without a model: blocks hold the names of what was written to them, so every mistake of a plan is seen.

A slot's content stands for the KV of one token, and KV depends on all tokens before it: the name is a hash of the whole
prefix and of who may share it. A slice must find exactly its own prefix in its blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random

from shoal.core.plan import Admit, Brought, Copied, Fetch, Held, KvOp, Logprobs, Slice, StepPlan, StepResult


class Known:
    """One request as a runner keeps it."""

    def __init__(self, admit: Admit, scope: str) -> None:
        self.num_prompt = admit.num_prompt
        self.scores = admit.sampling.prompt_logprobs is not None
        self.table: list[int] = []
        self.tokens: list[int] = []
        self.names: list[int] = [hash(scope)]  # names[i]: of the first i tokens
        self.sampled_by = -1  # newest step that sampled for it
        self.end = 0  # of its newest slice
        for token in admit.tokens:
            self.push(token)

    def push(self, token: int) -> None:
        self.tokens.append(token)
        self.names.append(hash((self.names[-1], token)))


class BlockRunner:
    def __init__(
        self, block_tokens: int, sample: Callable[[str, int], int], scope: Callable[[str], str] = lambda id: ""
    ) -> None:
        """`sample(id, output index)` is the next token; `scope(id)` says which requests may share blocks."""
        self.size = block_tokens
        self.sample = sample
        self.scope = scope
        self.known: dict[str, Known] = {}
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}  # (block, offset) -> (name, step that wrote it)
        self.flights: deque[tuple[StepResult, set[int]]] = deque()  # with the blocks that the step names
        self.written: dict[int, int] = {}  # block -> newest step that wrote to it
        self.copies: deque[KvOp] = deque()
        self.host: dict[tuple[int, int], tuple[int, int]] = {}  # as slots
        self.moves: list[KvOp] = []  # with the disk
        self.disk: dict[bytes, tuple[Held, list[tuple[int, int] | None]]] = {}  # by key; the block's slots
        self.lost: list[bytes] = []  # that the next move tells of
        self.returned = 0
        self.fetches: dict[int, Fetch] = {}
        self.lent: dict[int, dict[tuple[int, int], int]] = {}  # lease -> (block, offset) -> name

    def launch(self, plan: StepPlan) -> None:
        for id in plan.leaves:
            del self.known[id]
        for admit in plan.admits:
            self._admit(admit)
        result, named = StepResult(plan.step, []), set()
        assert len({part.id for part in plan.slices}) == len(plan.slices), "a request is in the step twice"
        assert plan.num_tokens == sum(part.count for part in plan.slices)
        for op in plan.ops:
            self._start(op)
        for fetch in plan.fetches:
            self._start_fetch(fetch)
        for part in plan.slices:
            self._compute(part, plan.step, result)
            named.update(self.known[part.id].table)
        self.flights.append((result, named))

    def collect(self) -> StepResult:
        result, _ = self.flights.popleft()
        self.returned = result.step
        return result

    def _start(self, op: KvOp) -> None:
        """A copy begins. Until it is done, nobody may touch the blocks that it names, on either side."""
        if op.disk:
            assert not op.device_blocks and len(op.disk) == len(op.host_blocks), f"{op}"
            self._share_nothing(op)
            self.moves.append(op)
            return
        assert op.device_blocks and len(op.device_blocks) == len(op.host_blocks), f"{op}"
        for block in op.device_blocks:
            if op.out:  # others may read what they share with it
                assert self.written[block] <= self.returned, f"block {block} of {op} is written by a step in flight"
            else:
                assert not any(block in named for _, named in self.flights), f"block {block} of {op} is in flight"
                assert not self._copying(block), f"block {block} is copied twice at once"
        self._share_nothing(op)
        self.copies.append(op)

    def _share_nothing(self, op: KvOp) -> None:
        for other in (*self.copies, *self.moves):
            reads = all(bool(each.disk) == each.out for each in (op, other))  # of host blocks, for two at once
            assert reads or not set(op.host_blocks) & set(other.host_blocks), f"{op} and {other} share host blocks"

    def move(self, chance: Random) -> Copied:
        """One with the disk is done, in any order. Blocks fail, and others are given up there."""
        op = self.moves.pop(chance.randrange(len(self.moves)))
        bad = []
        for place, (held, block) in enumerate(zip(op.disk, op.host_blocks, strict=True)):
            slots = [(block, offset) for offset in range(self.size)]
            if chance.random() < 0.1:
                bad.append(place)
            elif op.out:
                self.disk[held.key] = held, [self.host.get(slot) for slot in slots]
            elif held.key not in self.disk:
                bad.append(place)
            else:
                for slot, content in zip(slots, self.disk[held.key][1], strict=True):
                    assert content is not None
                    self.host[slot] = content
            if place in bad and not op.out:
                self.host.update(dict.fromkeys(slots, (-1, 0)))
        if self.disk and chance.random() < 0.3:
            self.lost.append(chance.choice(list(self.disk)))
            del self.disk[self.lost[-1]]
        dropped, self.lost = (tuple(self.lost), []) if chance.random() < 0.7 else ((), self.lost)
        return Copied(op.number, 1000, tuple(bad), dropped)

    def copy(self, spoiled: Callable[[], bool] = lambda: False) -> Copied:
        """The oldest copy is done. `spoiled`: whether a block comes back with another content, asked for each."""
        op = self.copies.popleft()
        bad = [] if op.out else [place for place in range(len(op.device_blocks)) if spoiled()]
        source, target = (self.slots, self.host) if op.out else (self.host, self.slots)
        pairs = zip(op.device_blocks, op.host_blocks, strict=True)
        for here, there in [(d, h) if op.out else (h, d) for d, h in pairs]:
            for offset in range(self.size):
                target.pop((there, offset), None)
                if (here, offset) in source:
                    target[there, offset] = source[here, offset][0], 0
            if not op.out:
                self.written[there] = 0
        for place in bad:
            for offset in range(self.size):
                self.slots[op.device_blocks[place], offset] = -1, 0
        return Copied(op.number, 1000, tuple(bad))

    def _start_fetch(self, fetch: Fetch) -> None:
        assert fetch.blocks and len(fetch.blocks) == len(fetch.keys), f"{fetch}"
        for block in fetch.blocks:
            assert not any(block in named for _, named in self.flights), f"block {block} of {fetch} is in flight"
            assert not self._copying(block), f"block {block} of {fetch} is written twice at once"
        self.fetches[fetch.number] = fetch

    def fetched(self, number: int, tokens: Sequence[int], first: int, num_good: int) -> Brought:
        """A fetch is done: block `first` of the tokens and those after it came, `num_good` of them whole."""
        fetch = self.fetches.pop(number)
        names = [hash(self.scope(fetch.id))]
        for token in tokens:
            names.append(hash((names[-1], token)))
        for place, block in enumerate(fetch.blocks):
            self.written[block] = 0
            for offset in range(self.size):
                position = (first + place) * self.size + offset
                self.slots[block, offset] = names[position + 1] if place < num_good else -1, 0
        return Brought(number, num_good, 1000)

    def lend(self, lease: int, blocks: Sequence[int]) -> None:
        self.lent[lease] = {
            (block, offset): self.slots[block, offset][0] for block in blocks for offset in range(self.size)
        }

    def unlend(self, lease: int) -> None:
        for place, name in self.lent.pop(lease).items():
            assert self.slots[place][0] == name, f"block {place[0]} was written to while it was lent"

    def _copying(self, block: int) -> bool:
        """Or being fetched."""
        copied = any(block in op.device_blocks for op in self.copies)
        return copied or any(block in fetch.blocks for fetch in self.fetches.values())

    def _admit(self, admit: Admit) -> None:
        assert admit.id not in self.known, f"{admit.id} is admitted twice"
        assert admit.computed < len(admit.tokens)
        known = self.known[admit.id] = Known(admit, self.scope(admit.id))
        num_hit = -(-admit.computed // self.size)
        known.table += admit.blocks[:num_hit]
        for position in range(admit.computed):
            name, step = self.slots[known.table[position // self.size], position % self.size]
            assert name == known.names[position + 1], f"{admit.id}: hit at {position} holds another prefix"
            assert step <= self.returned, f"{admit.id}: hit at {position} is still being written by step {step}"
        self._append(admit.id, admit.blocks[num_hit:])

    def _append(self, id: str, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            assert not any(block in named for _, named in self.flights), f"{id}: block {block} is still in flight"
            assert not self._copying(block), f"{id}: block {block} is being copied"
            for offset in range(self.size):
                self.slots.pop((block, offset), None)
        self.known[id].table += blocks

    def _compute(self, part: Slice, step: int, result: StepResult) -> None:
        known = self.known[part.id]
        self._append(part.id, part.blocks)
        end = part.start + part.count
        assert part.count > 0 and end <= len(known.tokens), f"{part.id}: token {end - 1} is not known"
        unresolved = end == len(known.tokens) and known.sampled_by > self.returned
        assert part.from_step == (known.sampled_by if unresolved else -1), f"{part.id}: from_step {part.from_step}"
        for position in range(part.start):
            name, _ = self.slots[known.table[position // self.size], position % self.size]
            assert name == known.names[position + 1], f"{part.id}: position {position} holds another prefix"
        for position in range(part.start, end):
            block = known.table[position // self.size]
            self.slots[block, position % self.size] = known.names[position + 1], step
            self.written[block] = step
        if known.scores and 0 < part.start < known.num_prompt:
            assert known.end == part.start, f"{part.id}: nothing scores position {part.start}"
        known.end = end
        if known.scores and part.start < known.num_prompt:
            scored = range(max(part.start, 1), min(end, known.num_prompt))
            result.prompt_logprobs[part.id] = [Logprobs(-float(known.tokens[place]), ()) for place in scored]
        if part.sample:
            assert end == len(known.tokens)
            known.push(self.sample(part.id, end - known.num_prompt))
            known.sampled_by = step
            result.tokens.append(known.tokens[-1])
