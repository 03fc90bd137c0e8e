"""What do tiers of the KV cache give, where conversations share beginnings that do not all fit on the device?

Many conversations with a long history of their own are gone on with in random order, two at once, each several times.
All of their histories together take 0.5, 2 or 4 times the device's blocks.

none    no prefix cache: every prompt is computed
device  the prefix cache in the device's blocks, least recently used ones given up first
host    and the host tier behind it, which is large enough for all
small   and a host tier behind it that is large enough for half of them
disk    the same with the disk tier behind it, which is large enough for all; what was just written is read from the
        system's memory, so the disk itself may be as slow as it likes

In the real engine, in turn, round by round, with as many threads as an engine takes by itself, with tiers or without.
The first visit of each conversation, which nobody could have cached, counts too.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from common import Report, arguments
from engine import Engine
from live import note, serve
from shoal.engine.transfer.storage import BELIEVED_BYTES_PER_S, Storage
from shoal.sim import outcomes
from shoal.workload.trace import Row, Trace

OWN_TOKENS, OUTPUT_TOKENS = 16, 16
CALLERS = 2
HOST_BYTES = DISK_BYTES = 1 << 30
RATIOS = (0.5, 2.0, 4.0)  # of all histories, by the device's blocks
TIERS = ("none", "device", "host", "small", "disk")
OTHERS = {"device": ("none",), "host": ("none", "device"), "small": ("none", "device")}
OTHERS["disk"] = (*OTHERS["small"], "small")  # is never slower than any of these
SPEED_TARGET, TTFT_TARGET, KEPT = 1.5, 0.5, 0.97  # KEPT: as fast, within what runs differ by


class Shape(NamedTuple):
    num_conversations: int
    history_tokens: int
    num_visits: int  # of each conversation
    num_rounds: int
    ratios: tuple[float, ...]


FULL, QUICK = Shape(10, 512, 4, 2, RATIOS), Shape(8, 512, 4, 1, (2.0,))


def main() -> None:
    report = Report("kv_tiers", arguments(__doc__.splitlines()[0]).parse_args())
    shape = QUICK if report.quick else FULL
    engine = Engine(max_num_seqs=8, host_cache_bytes=HOST_BYTES)
    blocks = shape.num_conversations * (shape.history_tokens // engine.limits.block_tokens)
    rows = []
    for ratio in shape.ratios:
        found: dict[str, list[outcomes.Report]] = {tier: [] for tier in TIERS}
        for number in range(shape.num_rounds):
            for tier in TIERS:
                note(f"working set of {ratio:g} pools, round {number + 1} of {shape.num_rounds}, {tier}")
                with TemporaryDirectory(prefix="shoal-kv-") as folder:
                    limits = tiers(engine, tier, blocks, Path(folder))
                    limits["num_blocks"] = int(blocks / ratio)
                    found[tier].append(run(engine, tier, shape, number, limits))
        rows += [row(ratio, tier, found[tier]) for tier in TIERS]
        claim(report, ratio, found)
        report.save()
    columns = ("set / pool", "tiers", "tokens/s", "TTFT P50 ms", "P99 ms", "hits %", "of them on device %",
               "from disk %", "out MB", "back MB")  # fmt: skip
    title = f"{shape.num_conversations} conversations of {shape.history_tokens} tokens; medians"
    report.table(title, columns, rows)
    report.finish()


def tiers(engine: Engine, tier: str, num_blocks: int, folder: Path) -> dict[str, Any]:
    """What `serve` is told of them. `num_blocks`: of all histories."""
    host = {"host": engine.limits.num_host_blocks, "small": num_blocks // 2, "disk": num_blocks // 2}.get(tier, 0)
    told: dict[str, Any] = {"prefix_caching": tier != "none", "num_host_blocks": host}
    if tier == "disk":
        runner = engine.runner
        told["disk"] = Storage(
            runner.host,
            folder / "kv",
            root=runner.hash_root,
            block_tokens=engine.limits.block_tokens,
            capacity_bytes=DISK_BYTES,
        )
        told["disk_bytes_per_s"] = BELIEVED_BYTES_PER_S
    return told


def run(engine: Engine, tier: str, shape: Shape, seed: int, limits: dict[str, Any]) -> outcomes.Report:
    chance = Random(seed)
    vocab = range(engine.limits.vocab_size)
    histories = [tuple(chance.choices(vocab, k=shape.history_tokens)) for _ in range(shape.num_conversations)]
    visits = []
    for _ in range(shape.num_visits):
        visits += chance.sample(histories, len(histories))
    prompts = [(*history, *chance.choices(vocab, k=OWN_TOKENS)) for history in visits]
    load = Trace((Row(0, shape.history_tokens + OWN_TOKENS, OUTPUT_TOKENS),) * len(prompts), CALLERS)
    return serve(engine, load, seed=seed, name=tier, prompts=prompts, **limits)


def row(ratio: float, tier: str, reports: list[outcomes.Report]) -> tuple[object, ...]:
    spreads = [report.ttft_ns for report in reports if report.ttft_ns is not None]
    asked = [sum(each.row.prompt_tokens for each in report.outcomes) for report in reports]
    views = [report.view for report in reports]
    hits = [view.prefix_hits + view.host_hits for view in views]
    return (
        ratio,
        tier,
        median(report.output_tokens_per_s for report in reports),
        median(each.p50 for each in spreads) / 1e6,
        median(each.p99 for each in spreads) / 1e6,
        median(100 * num / of for num, of in zip(hits, asked, strict=True)),
        median(100 * view.prefix_hits / max(1, num) for view, num in zip(views, hits, strict=True)),
        median(100 * view.disk_hits / max(1, num) for view, num in zip(views, hits, strict=True)),
        views[-1].swapped_out_bytes / 1e6,
        views[-1].swapped_in_bytes / 1e6,
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
    for tier, others in OTHERS.items():
        value = min(speed(tier, other) for other in others)
        name = f"set of {ratio:g} pools: tokens/s, {tier} / the best of {', '.join(others)}"
        report.claim(name, round(value, 2), f">= {KEPT}", value >= KEPT)


if __name__ == "__main__":
    main()
