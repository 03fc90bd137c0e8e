"""What sharing contexts between two ranks (`--context-parallel-size 2`) brings: decoding beside long contexts.

One process with one thread, and two ranks with one thread each, in turn, decode one token for each of so many requests
at a context length; a step's median is their time per token. Two ranks share the work of the contexts and of what else
is in a layer, but for queries, keys and values. Then a context twice as long as one rank's pool holds is answered by
both, and by one process with a pool that holds all of it.

Key and value memory is written beforehand, with zeros, which takes as long to read as anything else.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import Report, arguments
from shoal import models
from shoal.core.limits import Limits
from shoal.core.plan import Admit, Ended, Slice, StepPlan, Token
from shoal.core.request import RequestSpec, Sampling
from shoal.core.scheduler import Scheduler
from shoal.engine.config import EngineConfig

GREEDY = Sampling(temperature=0)
CASES = ((1, 1000), (1, 4000), (1, 7000), (4, 7000))  # requests, tokens before
MAX_MODEL_LEN = 8192
RANK_TOKENS = 512  # that one rank's pool holds, in the second part
TARGET = 0.8


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 (default: %(default)s)")
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the engine has it
    report = Report("context", options)
    folder, dtype = models.pull(models.DEFAULT), options.dtype
    cases = CASES[1:3] if options.quick else CASES
    rounds, steps = (2, 4) if options.quick else (7, 8)
    pool = max(num * -(-(tokens + 500) // 32) for num, tokens in cases)
    with engine(folder, dtype, 1, pool * 32) as one, engine(folder, dtype, 2, pool * 32) as two:
        rows = []
        for num_requests, tokens in cases:
            times: dict[int, list[float]] = {1: [], 2: []}
            moved = two.moved_bytes
            for number in range(rounds):
                for ranks, runner in ((1, one), (2, two)) if number % 2 else ((2, two), (1, one)):
                    times[ranks] += decode(runner, num_requests, tokens, steps)
            moved = (two.moved_bytes - moved) * 2 // (rounds * (steps + 1) * num_requests)
            one_ms, two_ms = (statistics.median(times[ranks]) * 1e3 for ranks in (1, 2))
            rows.append((num_requests, tokens, one_ms, two_ms, two_ms / one_ms, moved))
    columns = ("requests", "context", "1 rank: ms per token", "2 ranks", "2 / 1", "bytes moved per token")
    report.table("decoding, one thread a rank", columns, rows)
    ratio = next(row[4] for row in rows if row[:2] == (1, 7000))
    report.claim("time per token at 7,000 tokens, 2 ranks / 1", ratio, f"<= {TARGET}", ratio <= TARGET)
    same, num_tokens = twice_what_a_rank_holds(folder, dtype)
    report.claim(f"a context of {num_tokens} where a rank holds {RANK_TOKENS}: same text", same, "yes", same)
    report.finish()


@contextmanager
def engine(folder: Path, dtype: str, num_ranks: int, num_tokens: int) -> Iterator[Any]:
    """A runner with room for so many tokens, one thread a rank."""
    from shoal.engine import runner as runners
    from shoal.engine.model.registry import read_config
    from shoal.engine.parallel import lead
    from shoal.engine.parallel.group import Group
    from shoal.engine.parallel.layout import layout_of

    model = read_config(folder)
    num_bytes = (
        num_tokens * model.num_layers * 2 * model.num_kv_heads * model.head_dim * (2 if dtype == "bfloat16" else 4)
    )
    config = EngineConfig(
        dtype=dtype,  # type: ignore[arg-type]
        threads=num_ranks,
        kv_cache_bytes=num_bytes,
        context_parallel_size=num_ranks,
    )
    if num_ranks == 1:
        yield runners.load(folder, config)
        return
    group = Group(layout_of(config), folder, config)
    try:
        yield lead.load(folder, config, group)
    finally:
        group.close()


def decode(runner: Any, num_requests: int, tokens: int, steps: int) -> list[float]:
    """Seconds of each step, the first one left out."""
    per_request = -(-(tokens + steps + 1) // runner.block_tokens)
    admits = []
    for number in range(num_requests):
        blocks = tuple(range(number * per_request, (number + 1) * per_request))
        known = tuple((7 * place + number) % 40_000 for place in range(tokens))
        admits.append(Admit(str(number), known, tokens, tokens - 1, blocks, GREEDY, 0, 0, ()))
    runner.forget_all()
    runner.clear([block for admit in admits for block in admit.blocks])
    times = []
    for step in range(1, steps + 2):
        start, from_step = tokens - 2 + step, -1 if step == 1 else step - 1
        slices = [Slice(admit.id, start, 1, (), from_step, True) for admit in admits]
        began = time.perf_counter()
        runner.compute(StepPlan(step, [], admits if step == 1 else [], slices, num_requests, 0))
        times.append(time.perf_counter() - began)
    return times[1:]


def twice_what_a_rank_holds(folder: Path, dtype: str) -> tuple[bool, int]:
    """Whether it is answered alike; the context's tokens."""
    prompt = tuple((37 * place + place // 7) % 40_000 for place in range(2 * RANK_TOKENS - 24))
    texts = []
    for num_ranks in (1, 2):
        with engine(folder, dtype, num_ranks, num_ranks * RANK_TOKENS if num_ranks > 1 else 4 * RANK_TOKENS) as runner:
            texts.append(answer(runner, RequestSpec(id="long", prompt=prompt, max_tokens=24, sampling=GREEDY)))
    return texts[0] == texts[1], len(prompt) + 24


def answer(runner: Any, spec: RequestSpec) -> list[int]:
    limits = Limits(
        num_blocks=runner.num_blocks,
        block_tokens=runner.block_tokens,
        max_model_len=min(MAX_MODEL_LEN, runner.max_model_len),
        vocab_size=runner.vocab_size,
    )
    scheduler = Scheduler(limits, hash_root=runner.hash_root)
    accepted = scheduler.submit(spec, 0)
    tokens: list[int] = []
    while (plan := scheduler.plan(1)) is not None:
        for event in scheduler.apply(runner.compute(plan), 1):
            if isinstance(event, Token):
                tokens.append(event.token)
            elif isinstance(event, Ended):
                return tokens
    raise AssertionError(f"it was not answered: {accepted}")


if __name__ == "__main__":
    main()
