"""What does a number format cost in quality: perplexity of the default model on a text, each format against another.

Windows of 1,024 tokens of bench/data/opticks.txt, each a prompt whose log-probabilities the engine is asked for, so
that what is measured is what is served: the kernels, the scheduler's chunks, the KV pool's format. The error behind a
ratio is the standard error of the mean difference between two formats on the same tokens. "same first choice": the
share of places where the likeliest token is the one that bfloat16 finds likeliest.
"""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from common import Report, arguments
from engine import Engine
from shoal.core.plan import Logprobs, PromptScored
from shoal.core.request import RequestSpec, Sampling
from shoal.gateway.text.tokenizer import Tokenizer

TEXT = Path(__file__).parent / "data" / "opticks.txt"
WINDOW = 1024
MAX_RATIO = 1.02  # int8 over bfloat16
FORMATS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "float32": {"dtype": "float32"},
    "bfloat16, torch": {"dtype": "bfloat16", "kernels": "off"},
    "int8, torch": {"dtype": "bfloat16", "quantization": "int8", "kernels": "off"},
    "int8 weights, float32": {"dtype": "float32", "quantization": "int8"},
}
QUICK = ("bfloat16", "int8")
QUICK_WINDOWS = 5


class Scored(NamedTuple):
    """One number per token of all windows but the first tokens."""

    logprobs: list[float]
    firsts: list[int]  # likeliest tokens
    seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(-fmean(self.logprobs))


def main() -> None:
    report = Report("perplexity", arguments(__doc__.splitlines()[0]).parse_args())
    found: dict[str, Scored] = {}
    for name in QUICK if report.quick else FORMATS:
        engine = Engine(**FORMATS[name], kv_cache_bytes=256 << 20)
        found[name] = score(engine, windows(engine)[: QUICK_WINDOWS if report.quick else None])
    base = found["bfloat16"]
    columns = ("format", "perplexity", "ratio to bfloat16", "its error ±", "same first choice %", "tokens/s")
    rows = [(name, scored.perplexity, *against(base, scored), speed(scored)) for name, scored in found.items()]
    report.table(f"{len(base.logprobs)} tokens of {TEXT.name}, windows of {WINDOW}", columns, rows)
    ratio = found["int8"].perplexity / base.perplexity
    report.claim("perplexity int8 / bfloat16", round(ratio, 4), f"<= {MAX_RATIO:g}", ratio <= MAX_RATIO)
    report.finish()


def windows(engine: Engine) -> list[tuple[int, ...]]:
    ids = Tokenizer.load(engine.folder).encode(TEXT.read_text(encoding="utf-8"))
    return [tuple(ids[first : first + WINDOW]) for first in range(0, len(ids) - WINDOW + 1, WINDOW)]


def score(engine: Engine, prompts: list[tuple[int, ...]]) -> Scored:
    """All windows through a scheduler, as prompts that want no answer."""
    scheduler = engine.scheduler(dataclasses.replace(engine.limits, prefix_caching=False))
    sampling = Sampling(temperature=0, prompt_logprobs=1)
    entries: dict[str, list[Logprobs]] = {f"{number:03d}.0": [] for number in range(len(prompts))}
    for id, prompt in zip(entries, prompts, strict=True):
        scheduler.submit(RequestSpec(id=id, prompt=prompt, max_tokens=0, sampling=sampling), 0)
    began = time.perf_counter()
    while (plan := scheduler.plan(0)) is not None:
        engine.runner.launch(plan)
        for event in scheduler.apply(engine.runner.collect(), 0):
            if isinstance(event, PromptScored):
                entries[event.id] += event.entries
    seconds = time.perf_counter() - began
    everything = [entry for window in entries.values() for entry in window]
    assert len(everything) == len(prompts) * (WINDOW - 1)
    return Scored([entry.logprob for entry in everything], [entry.top[0][0] for entry in everything], seconds)


def against(base: Scored, other: Scored) -> tuple[float, float, float]:
    """Ratio of the perplexities, its standard error, and where the likeliest token is the same, in percent."""
    differences = [b - o for b, o in zip(base.logprobs, other.logprobs, strict=True)]
    ratio = math.exp(fmean(differences))
    same = fmean(b == o for b, o in zip(base.firsts, other.firsts, strict=True))
    return round(ratio, 5), ratio * stdev(differences) / math.sqrt(len(differences)), 100 * same


def speed(scored: Scored) -> float:
    return len(scored.logprobs) / scored.seconds


if __name__ == "__main__":
    main()
