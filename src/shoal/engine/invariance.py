"""Does this machine keep what `batch_invariant` promises? A start computes one prompt in two ways and compares bits.

Our kernels keep it by construction. Where torch computes, it rests on how torch's libraries treat the rows of calls of
one shape (FixedRows, FixedAttention), and that is found out by looking.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.plan import Admit, Logprobs, Slice, StepPlan
from shoal.core.request import Sampling

if TYPE_CHECKING:
    from shoal.engine.runner import Runner

_PROBE, _SHORT = 75, 5  # tokens; the first is more than two tiles of rows
_SCORED = Sampling(temperature=0, logprobs=0, prompt_logprobs=0)


def kept(runner: Runner) -> bool:
    """Only before the first real step. What it leaves in blocks is cleared when these are next given out."""
    size = min(-(-(_PROBE + 1) // runner.block_tokens), runner.num_blocks // 3)  # blocks of each request
    count = min(_PROBE, runner.max_model_len - 1, size * runner.block_tokens - 1)
    if count <= _SHORT:
        return True  # nothing is served by so small a pool

    def admit(name: str, index: int, num_tokens: int) -> Admit:
        tokens = tuple((7 * position + 31 * index) % runner.vocab_size for position in range(num_tokens))
        sampling = _SCORED if name == "probe" else Sampling()
        return Admit(name, tokens, num_tokens, 0, tuple(range(index * size, index * size + size)), sampling, 0, 0, ())

    probe, other, short = admit("probe", 0, count), admit("other", 1, count), admit("short", 2, _SHORT)

    def piece(of: Admit, start: int, end: int, from_step: int = -1) -> Slice:
        return Slice(of.id, start, end - start, (), from_step, end >= of.num_prompt)

    cut = count // 2 - 1
    alone = [[piece(probe, 0, count)], [piece(probe, count, count + 1, 1)]]
    among_others = [
        [piece(other, 0, count), piece(probe, 0, cut)],
        [piece(short, 0, _SHORT), piece(probe, cut, count), piece(other, count, count + 1, 1)],
        [piece(short, _SHORT, _SHORT + 1, 2), piece(probe, count, count + 1, 2)],
    ]
    return _scores(runner, [probe], alone) == _scores(runner, [probe, other, short], among_others)


def _scores(runner: Runner, admits: list[Admit], steps: list[list[Slice]]) -> list[Logprobs]:
    """Of the probe's prompt and of what was sampled for it. All logits of a row have a part in a log-probability."""
    scores: list[Logprobs] = []
    for number, slices in enumerate(steps, 1):
        num_tokens = sum(piece.count for piece in slices)
        plan = StepPlan(number, [], admits if number == 1 else [], slices, num_tokens, 0)
        result = runner.compute(plan)
        scores += result.prompt_logprobs.get("probe", [])
        scores += [result.logprobs["probe"]] if "probe" in result.logprobs else []
    runner.forget_all()
    return scores
