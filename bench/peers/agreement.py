"""Whether two servers answer the same greedy text, as far as that can be expected of them.

Engines that compute in bfloat16 legitimately differ where the best and the second best token are nearly as probable.
So tokens are compared up to the first difference, and that one counts only where both servers' margin is clear.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohttp
import msgspec

from client import Target

PROMPTS = (
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Germany is",
    "1, 2, 3, 4, 5, 6, 7, 8,",
    "Monday, Tuesday, Wednesday,",
)
OUTPUT_TOKENS = 16
CLEAR = 0.1  # between the probabilities of the best and the second best token
LIMIT_S = 60.0


class Step(NamedTuple):
    token: str
    margin: float  # in probability, over the second best


async def answer(http: aiohttp.ClientSession, target: Target, prompt: str) -> list[Step]:
    """The greedy continuation. Raises aiohttp.ClientError, TimeoutError."""
    body = {"model": target.model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "logprobs": 2}
    limit = aiohttp.ClientTimeout(total=LIMIT_S)
    async with http.post(f"{target.url}/v1/completions", json=body, timeout=limit) as response:
        response.raise_for_status()
        return steps(msgspec.json.decode(await response.read())["choices"][0]["logprobs"])


def steps(logprobs: dict[str, Any]) -> list[Step]:
    """From a completion's `logprobs`; its alternatives are a dict, in which two that read the same are one."""
    found = []
    for token, alternatives in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        best, second, *_ = (*sorted(map(math.exp, alternatives.values()), reverse=True), 0.0, 0.0)
        found.append(Step(token, best - second))
    return found


def compare(ours: Sequence[Step], theirs: Sequence[Step]) -> str:
    """In words: equal, different at a near tie, or really different."""
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine.token != other.token:
            where = f"after {number} equal tokens {mine.token!r} against {other.token!r}"
            margins = f"margins {mine.margin:.3f} and {other.margin:.3f}"
            clear = min(mine.margin, other.margin) >= CLEAR
            return f"{'DIFFERENT' if clear else 'near tie'}: {where}, {margins}"
    return f"equal, {min(len(ours), len(theirs))} tokens"
