"""Invented steps: some that start-up times to seed stepcost, and the largest there can be, to learn its memory.

They run before the first real step. What they leave in blocks is cleared when these are next given out.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.core.plan import Admit, Slice, StepPlan
from shoal.core.request import Sampling
from shoal.engine.config import EngineConfig

# Requests, tokens that each has already, tokens that it lacks. Between them they tell the features of stepcost apart:
# few and many rows in chunks and in decodes, little and much to attend to, in one context and in many. The first must
# be short on any machine, and what matters most comes early, since a slow one does not come to the end.
_GROUPS = (
    (1, 0, 16),
    (16, 0, 16),
    (1, 0, 128),
    (1, 0, 512),
    (16, 232, 16),
    (64, 0, 8),
    (1, 512, 512),
    (64, 40, 8),
    (1, 0, 512),
)
_DECODES = 3  # steps of one token each that follow
_GREEDY = Sampling(temperature=0)


def sweep(num_blocks: int, block_tokens: int, vocab_size: int, max_model_len: int) -> Iterator[StepPlan]:
    """A group's missing tokens in one step, then decodes of all its requests; groups that do not fit are left out.

    Requests of a group have blocks of their own, those of different groups the same ones.
    """
    step = 0
    leaves: list[str] = []
    for number, (num_requests, start, count) in enumerate(_GROUPS):
        known = start + count
        per_request = -(-(known + _DECODES) // block_tokens)
        if num_requests * per_request > num_blocks or known + _DECODES > max_model_len:
            continue
        admits, chunks = [], []
        for index in range(num_requests):
            blocks = tuple(range(index * per_request, (index + 1) * per_request))
            name = f"warm-up {number} {index}"
            tokens = tuple((7 * position + index) % vocab_size for position in range(known))
            admits.append(Admit(name, tokens, known, start, blocks, _GREEDY, 0, 0, ()))
            chunks.append(Slice(name, start, count, (), -1, True))
        step += 1
        yield StepPlan(step, leaves, admits, chunks, num_requests * count, 0)
        for ahead in range(_DECODES):
            step += 1
            decodes = [Slice(part.id, known + ahead, 1, (), step - 1, True) for part in chunks]
            yield StepPlan(step, [], [], decodes, num_requests, 0)
        leaves = [part.id for part in chunks]


def largest_step(config: EngineConfig, max_model_len: int) -> StepPlan:
    """As many tokens as a step may have, each request at the end of the longest context. All tables name block 0."""
    budget = config.max_num_batched_tokens
    count = min(config.max_prefill_chunk or budget, budget, max_model_len)
    num_requests = min(budget // count, config.max_num_seqs)
    start = max_model_len - count
    blocks = (0,) * -(-max_model_len // config.block_size)
    names = [f"largest {index}" for index in range(num_requests)]
    tokens = (0,) * max_model_len
    admits = [Admit(name, tokens, max_model_len, start, blocks, _GREEDY, 0, 0, ()) for name in names]
    slices = [Slice(name, start, count, (), -1, True) for name in names]
    return StepPlan(1, [], admits, slices, num_requests * count, 0)
