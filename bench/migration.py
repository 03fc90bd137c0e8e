"""Running streams migrate between two engines: is every seam exact, how long is the pause, is anything left behind?

Two engine processes of the default model in float32, one thread each, and a gateway's dispatcher in this process. A
few streams run at a time, sampled; each migrates to the other engine and back, at random tokens. Its tokens are
compared with those of the same request undisturbed, and when all is over every block of both pools is free or cached.

The pause is what the client sees: from the last token before a migration to the next one. A step is the median
time between two tokens elsewhere in the same streams; the last block's time is what computing its tokens takes by the
engine's own costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from random import Random
from statistics import median

from common import Report, arguments
from neighbour import SECRET, Neighbour, processes
from shoal import models
from shoal.core.classes import DEFAULT_CLASSES
from shoal.core.request import Sampling
from shoal.fleet import scorers
from shoal.gateway.dispatch import Attempts, Dispatcher
from shoal.gateway.job import Job, Order
from shoal.gateway.link import Identity
from shoal.gateway.metrics import Metrics
from shoal.gateway.params import Params
from shoal.gateway.prompts import Prompt
from shoal.gateway.replicas import Replicas
from shoal.gateway.terms import Terms
from shoal.gateway.text.tokenizer import Tokenizer
from shoal.workload.latency import percentile

CONCURRENCY, NUM_TOKENS, MOVES = 4, 400, 8  # streams at once; tokens of each answer, migrations of each stream
PROMPT_TOKENS = (100, 600)
LAST_TOKENS = 30  # none of them begins a migration: it could not end
PAUSE_STEPS = 3
LIMIT_S, SETTLE_S = 300.0, 20.0
PARAMS = Params(
    n=1,
    max_tokens=NUM_TOKENS,
    min_tokens=0,
    sampling=Sampling(temperature=0.8),
    seed=1,
    stops=(),
    stop_token_ids=(),
    ignore_eos=True,
    include_stop=False,
    skip_special_tokens=True,
    priority=0,
    stream=True,
    include_usage=False,
)


@dataclass(slots=True)
class Stream:
    number: int
    prompt: tuple[int, ...]
    num_tokens: int
    at: list[int]  # tokens after which it migrates
    tokens: list[int] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)
    failure: str = ""


class Stage:
    """A gateway's dispatcher before two engines."""

    def __init__(self, engines: list[Neighbour]) -> None:
        self.replicas = Replicas(
            Identity(name="gateway", incarnation="1", secret=SECRET), static=[each.address for each in engines]
        )
        self.metrics = Metrics()
        tokenizer = Tokenizer.load(models.pull(models.DEFAULT))
        self.dispatcher = Dispatcher(self.replicas, tokenizer, self.metrics, DEFAULT_CLASSES, LIMIT_S)
        self.outcomes: Counter[str] = Counter()

    async def run(self, stream: Stream) -> None:
        now_s = time.monotonic()
        order = Order(
            id=f"{stream.number}-{len(stream.at)}",
            params=PARAMS,
            prompts=(Prompt(ids=stream.prompt),),
            max_tokens=(stream.num_tokens,),
            arrived_s=now_s,
            asked_s=now_s,
            terms=Terms(),
        )
        job = await self.dispatcher.start(order)
        try:
            async with asyncio.timeout(LIMIT_S):
                await self._read(stream, job)
        except Exception as e:
            stream.failure = f"{type(e).__name__}: {e}"
        finally:
            self.dispatcher.finish(job)

    async def _read(self, stream: Stream, job: Job) -> None:
        (attempts,) = job.attempts
        at, link, last_s = [*stream.at], None, 0.0
        while not job.exhausted:
            await job.news()
            now_s = time.perf_counter()
            tokens = attempts.delivered(0)
            if len(tokens) == len(stream.tokens):
                continue
            if last_s:
                where = stream.gaps_s if link is attempts.link or attempts.link is None else stream.pauses_s
                where.append(now_s - last_s)
            link, last_s = attempts.link or link, now_s
            stream.tokens[:] = tokens
            if at and len(tokens) >= at[0] and not attempts.migrating:
                at.pop(0)
                self._migrate(attempts)

    def _migrate(self, attempts: Attempts) -> None:
        target = attempts.elsewhere()
        if target is None or not attempts.migrate(target):
            self.outcomes["not begun"] += 1

    def outcomes_of_all(self) -> Counter[str]:
        found = Counter(self.outcomes)
        for metric in self.metrics.migrations.collect():
            found.update({s.labels["outcome"]: int(s.value) for s in metric.samples if s.name.endswith("_total")})
        return found

    def num_lost_blocks(self) -> int:
        """Of both pools, neither free nor cached, while nothing runs."""
        views = [link.view for link in self.replicas.links]
        return sum(view.total_blocks - view.free_blocks - view.cached_blocks if view else 1 for view in views)


@contextlib.asynccontextmanager
async def stage() -> AsyncIterator[Stage]:
    settings = [
        {"name": f"engine-{n}", "transport": "both", "threads": 1, "dtype": "float32", "kv_cache_bytes": 1 << 30}
        for n in range(2)
    ]
    async with processes(*settings) as engines:
        made = Stage(engines)
        tasks = [asyncio.create_task(part) for part in (made.replicas.run(), made.dispatcher.run())]
        try:
            await until(lambda: all(link.ready for link in made.replicas.links))
            yield made
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def until(look: Callable[[], bool]) -> None:
    """Or for as long as it may take."""
    for _ in range(int(SETTLE_S / 0.05)):
        if look():
            return
        await asyncio.sleep(0.05)


async def all_of(made: Stage, streams: list[Stream]) -> None:
    waiting = iter(streams)

    async def one_after_the_other() -> None:
        for stream in waiting:
            await made.run(stream)
            print(f"stream {stream.number} of {len(streams)}, {len(stream.at)} migrations", file=sys.stderr, flush=True)

    await asyncio.gather(*(one_after_the_other() for _ in range(CONCURRENCY)))


async def measure(report: Report) -> None:
    chance = Random(1)
    num_streams, num_tokens, num_moves = (4, 150, 4) if report.quick else (13, NUM_TOKENS, MOVES)
    async with stage() as made:
        streams = []
        for number in range(num_streams):
            prompt = tuple(chance.choices(range(100, 49_000), k=chance.randint(*PROMPT_TOKENS)))
            at = sorted(chance.sample(range(2, num_tokens - LAST_TOKENS), num_moves))
            streams.append(Stream(number, prompt, num_tokens, at))
        await all_of(made, streams)
        await until(lambda: not made.num_lost_blocks())
        num_lost = made.num_lost_blocks()
        plain = [Stream(stream.number, stream.prompt, stream.num_tokens, []) for stream in streams]
        await all_of(made, plain)
        costs = next(iter(made.replicas.links)).costs
        claim(report, streams, plain, made.outcomes_of_all(), num_lost, costs)


def claim(
    report: Report,
    streams: list[Stream],
    plain: list[Stream],
    outcomes: Counter[str],
    num_lost: int,
    costs: tuple[float, ...],
) -> None:
    pauses = [each * 1e3 for stream in streams for each in stream.pauses_s]
    gaps = [each * 1e3 for stream in streams for each in stream.gaps_s]
    step_ms = median(gaps)
    block_ms = scorers.recompute_ns(costs, PROMPT_TOKENS[1], 16) / 1e6
    rows = [
        (name, len(values), median(values), percentile(sorted(values), 95), percentile(sorted(values), 99))
        for name, values in (
            ("between tokens, undisturbed", [each * 1e3 for stream in plain for each in stream.gaps_s]),
            ("between tokens, beside migrations", gaps),
            ("pause of a migration", pauses),
        )
    ]
    report.table("what clients see", ("", "number", "P50 ms", "P95", "P99"), rows)
    report.table("migrations", ("outcome", "number"), sorted(outcomes.items()))
    num_whole = sum(len(stream.tokens) == stream.num_tokens and not stream.failure for stream in streams)
    num_equal = sum(stream.tokens == other.tokens for stream, other in zip(streams, plain, strict=True))
    num_asked, num_done = sum(len(stream.at) for stream in streams), outcomes["migrated"]
    report.claim("migrations", num_done, f"{num_asked}", num_done == num_asked)
    report.claim("streams with all their tokens", num_whole, f"{len(streams)}", num_whole == len(streams))
    report.claim("texts equal to undisturbed ones", num_equal, f"{len(streams)}", num_equal == len(streams))
    most_ms = PAUSE_STEPS * step_ms + block_ms
    p99_ms = percentile(sorted(pauses), 99)
    name = f"pause P99 ms, {PAUSE_STEPS} steps of {step_ms:.0f} ms and a last block of {block_ms:.0f} ms"
    report.claim(name, round(p99_ms, 1), f"<= {most_ms:.1f}", p99_ms <= most_ms)
    report.claim("blocks left behind", num_lost, "0", num_lost == 0)
    for stream in streams:
        if stream.failure:
            print(f"stream {stream.number}: {stream.failure}")


def main() -> None:
    report = Report("migration", arguments(__doc__.splitlines()[0]).parse_args())
    asyncio.run(measure(report))
    report.finish()


if __name__ == "__main__":
    main()
