"""What do tiers of the KV cache give, where conversations share beginnings that do not all fit on the device?

Many conversations with a long beginning of their own are gone on with in random order, a few at once, each several
times. All of their beginnings together take 0.5, 1, 2 or 4 times the device's blocks.

none    no prefix cache: every prompt is computed
device  the prefix cache in the device's blocks, least recently used ones given up first
host    and the host tier behind it, which is large enough for all

In the real engine, in turn, round by round. The first visit of each conversation, which nobody could have cached,
counts too.
"""

from __future__ import annotations

from random import Random
from statistics import median
from typing import NamedTuple

from common import Report, arguments
from engine import Engine
from live import note, serve
from shoal.sim import outcomes
from shoal.workload.trace import Row, Trace

NUM_CONVERSATIONS, BEGIN_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 16, 768, 16, 16
CALLERS = 2
HOST_BYTES = 1 << 30
RATIOS = (0.5, 1.0, 2.0, 4.0)  # of all beginnings, by the device's blocks
TIERS = ("none", "device", "host")
SPEED_TARGET, TTFT_TARGET, KEPT = 1.5, 0.5, 0.97  # KEPT: as fast, within what runs differ by


class Shape(NamedTuple):
    num_visits: int  # of each conversation
    num_rounds: int
    ratios: tuple[float, ...]


FULL, QUICK = Shape(5, 3, RATIOS), Shape(4, 1, (2.0,))


def main() -> None:
    report = Report("kv_tiers", arguments(__doc__.splitlines()[0]).parse_args())
    from shoal.engine.device import num_cores  # loads torch

    shape = QUICK if report.quick else FULL
    engine = Engine(max_num_seqs=8, host_cache_bytes=HOST_BYTES, threads=num_cores())
    blocks = NUM_CONVERSATIONS * (BEGIN_TOKENS // engine.limits.block_tokens)
    rows = []
    for ratio in shape.ratios:
        found: dict[str, list[outcomes.Report]] = {tier: [] for tier in TIERS}
        for number in range(shape.num_rounds):
            for tier in TIERS:
                note(f"working set of {ratio:g} pools, round {number + 1} of {shape.num_rounds}, {tier}")
                found[tier].append(run(engine, tier, int(blocks / ratio), shape.num_visits, seed=number))
        rows += [row(ratio, tier, found[tier]) for tier in TIERS]
        claim(report, ratio, found)
        report.save()
    columns = ("set / pool", "tiers", "tokens/s", "TTFT P50 ms", "P99 ms", "found on the device %",
               "in the host tier %", "out MB", "back MB")  # fmt: skip
    report.table(f"{NUM_CONVERSATIONS} conversations, {BEGIN_TOKENS} tokens each; medians", columns, rows)
    report.finish()


def run(engine: Engine, tier: str, num_blocks: int, num_visits: int, seed: int) -> outcomes.Report:
    chance = Random(seed)
    vocab = range(engine.limits.vocab_size)
    begins = [tuple(chance.choices(vocab, k=BEGIN_TOKENS)) for _ in range(NUM_CONVERSATIONS)]
    visits = []
    for _ in range(num_visits):
        visits += chance.sample(begins, len(begins))
    prompts = [(*begin, *chance.choices(vocab, k=OWN_TOKENS)) for begin in visits]
    load = Trace((Row(0, BEGIN_TOKENS + OWN_TOKENS, OUTPUT_TOKENS),) * len(prompts), CALLERS)
    return serve(
        engine,
        load,
        seed=seed,
        name=tier,
        prompts=prompts,
        num_blocks=num_blocks,
        prefix_caching=tier != "none",
        num_host_blocks=engine.limits.num_host_blocks if tier == "host" else 0,
    )


def row(ratio: float, tier: str, reports: list[outcomes.Report]) -> tuple[object, ...]:
    spreads = [report.ttft_ns for report in reports if report.ttft_ns is not None]
    asked = [sum(each.row.prompt_tokens for each in report.outcomes) for report in reports]
    view = reports[-1].view
    return (
        ratio,
        tier,
        median(report.output_tokens_per_s for report in reports),
        median(each.p50 for each in spreads) / 1e6,
        median(each.p99 for each in spreads) / 1e6,
        median(100 * report.view.prefix_hits / num for report, num in zip(reports, asked, strict=True)),
        median(100 * report.view.host_hits / num for report, num in zip(reports, asked, strict=True)),
        view.swapped_out_bytes / 1e6,
        view.swapped_in_bytes / 1e6,
    )


def claim(report: Report, ratio: float, found: dict[str, list[outcomes.Report]]) -> None:
    """Ratios are taken round by round."""

    def speed(tier: str, other: str) -> float:
        pairs = zip(found[tier], found[other], strict=True)
        return median(one.output_tokens_per_s / two.output_tokens_per_s for one, two in pairs)

    def ttft(tier: str, other: str) -> float:
        spreads = [(a.ttft_ns, b.ttft_ns) for a, b in zip(found[tier], found[other], strict=True)]
        return median(a.p50 / b.p50 for a, b in spreads if a is not None and b is not None)

    if ratio == 2.0:
        value = speed("host", "device")
        report.claim(
            "set of 2 pools: tokens/s, host / device", round(value, 2), f">= {SPEED_TARGET}", value >= SPEED_TARGET
        )
        value = ttft("host", "device")
        report.claim(
            "set of 2 pools: P50 TTFT, host / device", round(value, 2), f"<= {TTFT_TARGET}", value <= TTFT_TARGET
        )
    for tier, others in (("device", ("none",)), ("host", ("none", "device"))):
        value = min(speed(tier, other) for other in others)
        name = f"set of {ratio:g} pools: tokens/s, {tier} / the better of {' and '.join(others)}"
        report.claim(name, round(value, 2), f">= {KEPT}", value >= KEPT)


if __name__ == "__main__":
    main()
