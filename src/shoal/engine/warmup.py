"""Invented steps: some that start-up times to seed stepcost, and the largest there can be, to learn its memory.

They run before the first real step. What they leave in blocks is cleared when these are next given out.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.core.plan import Admit, Slice, StepPlan
from shoal.core.request import Sampling
from shoal.engine.config import EngineConfig

_PROMPTS = ((1, 16), (1, 128), (4, 16), (1, 256), (16, 64))  # requests, tokens of each
_DECODES = 4  # steps of one token each that follow
_GREEDY = Sampling(temperature=0)


def growing_steps(num_blocks: int, block_tokens: int, vocab_size: int, max_model_len: int) -> Iterator[StepPlan]:
    """Prompts of several sizes and decodes behind them, each request in its own blocks, as far as the pool reaches."""
    step, next_block = 0, 0
    for num_requests, count in _PROMPTS:
        per_request = -(-(count + _DECODES) // block_tokens)
        if next_block + num_requests * per_request > num_blocks or count + _DECODES > max_model_len:
            return
        admits, prompts = [], []
        for index in range(num_requests):
            blocks = tuple(range(next_block, next_block + per_request))
            next_block += per_request
            name = f"warm-up {step} {index}"
            tokens = tuple((7 * position + index) % vocab_size for position in range(count))
            admits.append(Admit(name, tokens, count, 0, blocks, _GREEDY, 0, 0, ()))
            prompts.append(Slice(name, 0, count, (), -1, True))
        step += 1
        yield StepPlan(step, [], admits, prompts, num_requests * count, 0)
        for ahead in range(_DECODES):
            step += 1
            decodes = [Slice(part.id, count + ahead, 1, (), step - 1, True) for part in prompts]
            yield StepPlan(step, [], [], decodes, num_requests, 0)


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
