"""Load an OpenAI-compatible server by the clock and report what its clients would have felt.

    python bench/driver.py http://127.0.0.1:8000 --rate 4 --requests 64 --input 128 --output 64 --range 0.5

Prompts are random token ids sent to /v1/completions with `ignore_eos`, so lengths are exact. Latencies count from the
moment a request was *due*, not from when it was sent: a driver that falls behind makes the figures worse, never better
(no coordinated omission), and one that fell behind by more than 25 ms at p99 calls its own run invalid. Tokens are
counted from the server's `usage`, never from events. Warm-up requests are sent before the clock starts and not counted.

Benches import it (`from driver import Schedule, Target, run, schedule`): `await run(target, schedule)` gives a Result.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import aiohttp
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from client import Failure, Outcome, Request, Target, send, served_model, session
from result import MAX_LAG_MS, Result
from shoal.workload import trace
from shoal.workload.arrivals import Arrivals, ClosedLoop, OpenLoop
from shoal.workload.latency import Slo
from shoal.workload.lengths import MIXES, Mix, Uniform

LEAD_NS = 20_000_000  # between setting the start and the start, so that nothing is late from the outset
PROBE_S = 0.02
PROGRESS_S = 0.25


@dataclass(frozen=True, slots=True)
class Schedule:
    requests: tuple[Request, ...]  # in order of `due_ns`
    concurrency: int | None = None  # a closed loop: `due_ns` is when one of so many callers is free
    warm_up: tuple[Request, ...] = ()  # sent at once before the clock starts

    def __post_init__(self) -> None:
        if not self.requests:
            raise ValueError("a schedule needs at least one request")


class Progressing(NamedTuple):
    sent: int
    done: int
    failed: int


def schedule(arrivals: Arrivals, mix: Mix, count: int, *, seed: int, vocab_size: int, warm_up: int = 0) -> Schedule:
    """Prompts of random ids in [100, vocab_size), where small ids of common vocabularies are special tokens."""
    load = trace.make(arrivals, mix, count, seed)
    rng = Random(f"{seed}/tokens")
    ids = range(min(100, vocab_size // 2), vocab_size)

    def requests(rows: Iterable[trace.Row]) -> tuple[Request, ...]:
        return tuple(Request(r.due_ns, tuple(rng.choices(ids, k=r.prompt_tokens)), r.output_tokens) for r in rows)

    warming = trace.make(ClosedLoop(1), mix, warm_up, seed + 1)
    return Schedule(requests(load.rows), load.concurrency, requests(warming.rows))


async def run(target: Target, load: Schedule, progress: Callable[[Progressing], None] | None = None) -> Result:
    """Send the whole schedule and wait for every answer, each at most `target.timeout_s`.

    Raises Failure when not one warm-up request was answered.
    """
    async with session() as http:
        await _warm_up(http, target, load.warm_up)
        start_ns = time.perf_counter_ns() + LEAD_NS
        drive = _drive_open if load.concurrency is None else _drive_closed
        outcomes: list[Outcome | None] = [None] * len(load.requests)
        sending = _Sending(http, target, load, start_ns, outcomes)
        lag_ns: list[int] = []
        probe = asyncio.create_task(_probe(lag_ns, sending, progress))
        try:
            await drive(sending)
        finally:
            probe.cancel()
    return Result(tuple(outcome for outcome in outcomes if outcome), tuple(lag_ns), load.concurrency is None)


@dataclass(slots=True)
class _Sending:
    http: aiohttp.ClientSession
    target: Target
    load: Schedule
    start_ns: int
    outcomes: list[Outcome | None]
    sent: int = 0
    done: int = 0
    failed: int = 0

    async def one(self, index: int, due_ns: int) -> None:
        self.sent += 1
        request = self.load.requests[index]
        self.outcomes[index] = outcome = await send(self.http, self.target, index, request, due_ns, self.start_ns)
        self.done += 1
        self.failed += bool(outcome.error)


async def _warm_up(http: aiohttp.ClientSession, target: Target, requests: tuple[Request, ...]) -> None:
    now_ns = time.perf_counter_ns()
    outcomes = await asyncio.gather(*(send(http, target, i, request, 0, now_ns) for i, request in enumerate(requests)))
    if outcomes and all(outcome.error for outcome in outcomes):
        raise Failure(outcomes[0].error, f"warm-up: {outcomes[0].detail}")


async def _drive_open(sending: _Sending) -> None:
    async with asyncio.TaskGroup() as group:
        for index, request in enumerate(sending.load.requests):
            await _sleep_until(sending.start_ns + request.due_ns)
            group.create_task(sending.one(index, request.due_ns))


async def _drive_closed(sending: _Sending) -> None:
    waiting = iter(range(len(sending.load.requests)))

    async def caller() -> None:
        for index in waiting:  # shared by all callers: each takes the next one
            await sending.one(index, time.perf_counter_ns() - sending.start_ns)

    await _sleep_until(sending.start_ns)
    async with asyncio.TaskGroup() as group:
        for _ in range(sending.load.concurrency or 1):
            group.create_task(caller())


async def _probe(lag_ns: list[int], sending: _Sending, progress: Callable[[Progressing], None] | None) -> None:
    """Tick, and note how late each tick came: the time by which this process can misread an arrival."""
    shown_ns = 0
    while True:
        due_ns = time.perf_counter_ns() + round(PROBE_S * 1e9)
        await asyncio.sleep(PROBE_S)
        now_ns = time.perf_counter_ns()
        lag_ns.append(max(0, now_ns - due_ns))
        if progress and now_ns - shown_ns > PROGRESS_S * 1e9:
            shown_ns = now_ns
            progress(Progressing(sending.sent, sending.done, sending.failed))


async def _sleep_until(due_ns: int) -> None:
    await asyncio.sleep(max(0, due_ns - time.perf_counter_ns()) / 1e9)


# -- command line ------------------------------------------------------------------------------------------------------


def report(result: Result, target: Target, load: dict[str, Any], slo: Slo | None) -> dict[str, Any]:
    """What `--json` writes, in the form of every bench of this project."""
    lag_ms, wrong = result.lag_p99_ms(), result.invalid()
    return {
        "bench": "driver",
        "target": {"url": target.url, "model": target.model},
        "load": load,
        "figures": result.figures(slo),
        "claims": [
            {"name": "driver_lag_p99_ms", "value": lag_ms, "target": MAX_LAG_MS, "ok": lag_ms <= MAX_LAG_MS},
            {"name": "reasons_to_distrust", "value": len(wrong), "target": 0, "ok": not wrong},
        ],
    }


def show(console: Console, figures: dict[str, Any]) -> None:
    table = Table(title=f"{figures['answered']} of {figures['requests']} answered in {figures['duration_s']:.1f} s")
    for heading in ("ms", "mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(heading, justify="left" if heading == "ms" else "right")
    for row in ("ttft", "tpot", "gap", "e2e"):
        if values := figures[f"{row}_ms"]:
            table.add_row(row, *(f"{values[name]:.1f}" for name in ("mean", "p50", "p90", "p95", "p99", "max")))
    console.print(table)
    console.print(
        f"{figures['requests_per_s']:.2f} requests/s, {figures['output_tokens_per_s']:.1f} output tokens/s, "
        f"{figures['total_tokens_per_s']:.1f} total tokens/s, driver lag p99 {figures['lag_p99_ms']:.1f} ms",
        soft_wrap=True,
    )
    if figures["slo_attainment"] is not None:
        console.print(f"SLO attainment {figures['slo_attainment']:.1%} of all requests")
    for kind, count in figures["errors"].items():
        console.print(f"{count} failed: {kind}")
    for reason in figures["invalid"]:
        console.print(f"INVALID RUN: {reason}", style="bold red")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="driver.py", description=__doc__.splitlines()[0])
    parser.add_argument("url", help="http://host:port of the server; an API key is read from SHOAL_API_KEY")
    parser.add_argument("--model", default="", help="served name (default: the first that the server lists)")
    pace = parser.add_mutually_exclusive_group(required=True)
    pace.add_argument("--rate", type=float, help="open loop: mean requests per second")
    pace.add_argument("--concurrency", type=int, help="closed loop: callers that each wait for their answer")
    parser.add_argument(
        "--burstiness", type=float, default=1.0, help="shape of the gamma intervals: 1 Poisson, <1 bursts, inf constant"
    )
    parser.add_argument("--requests", type=int, default=64, help="how many, warm-up apart (default 64)")
    parser.add_argument("--input", type=int, default=128, help="prompt length in tokens (default 128)")
    parser.add_argument("--output", type=int, default=64, help="output length in tokens (default 64)")
    parser.add_argument("--range", type=float, default=0.0, help="lengths vary by ± this share, uniformly (default 0)")
    parser.add_argument("--mix", choices=sorted(MIXES), help="a named length mix instead of --input, --output, --range")
    parser.add_argument("--warmup", type=int, default=2, help="requests sent first and not counted (default 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocab-size", type=int, default=8192, help="prompts are of token ids below it (default 8192)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one answer (default 600)")
    parser.add_argument("--slo-ttft-ms", type=float, help="report the share of requests within this")
    parser.add_argument("--slo-tpot-ms", type=float, help="report the share of requests within this")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rows", type=Path, help="write one JSON line per request to this file")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """0: the figures stand; 1: they do not; 2: nothing was measured."""
    options = parse(arguments)
    screen = Console(stderr=True)
    try:
        arrivals = (
            OpenLoop(options.rate, options.burstiness) if options.rate is not None else ClosedLoop(options.concurrency)
        )
        mix = MIXES[options.mix] if options.mix else _mix(options)
        load = schedule(
            arrivals,
            mix,
            options.requests,
            seed=options.seed,
            vocab_size=options.vocab_size,
            warm_up=options.warmup,
        )
        with live_line(screen, options.requests) as progress:
            target, result = asyncio.run(_measure(options, load, progress))
    except (ValueError, Failure) as error:
        screen.print(f"driver: {error}", markup=False, soft_wrap=True)
        return 2
    slo = _slo(options)
    settings = {"arrivals": _plain(arrivals), "mix": options.mix or _plain(mix), "requests": options.requests}
    document = report(result, target, {**settings, "seed": options.seed, "warm_up": options.warmup}, slo)
    show(Console(), document["figures"])
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(document)))
    if options.rows:
        options.rows.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in result.outcomes))
    return 1 if result.invalid() else 0


async def _measure(
    options: argparse.Namespace, load: Schedule, progress: Callable[[Progressing], None]
) -> tuple[Target, Result]:
    url, api_key = options.url.rstrip("/").removesuffix("/v1"), os.environ.get("SHOAL_API_KEY", "")
    model = options.model
    if not model:
        async with session() as http:
            model = await served_model(http, url, api_key)
    target = Target(url=url, model=model, api_key=api_key, timeout_s=options.timeout)
    return target, await run(target, load, progress)


@contextlib.contextmanager
def live_line(screen: Console, total: int, what: str = "") -> Iterator[Callable[[Progressing], None]]:
    """A line that shows progress, redrawn from the load's own loop; nothing where nobody watches."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=screen, disable=not screen.is_terminal, auto_refresh=False, transient=True) as bar:
        task = bar.add_task(f"{what}warming up", total=total)

        def update(now: Progressing) -> None:
            text = f"{what}{now.sent - now.done} in flight, {now.failed} failed"
            bar.update(task, completed=now.done, description=text, refresh=True)

        yield update


def _mix(options: argparse.Namespace) -> Mix:
    return Mix(Uniform(options.input, options.range), Uniform(options.output, options.range))


def _slo(options: argparse.Namespace) -> Slo | None:
    ttft, tpot = (ms and round(ms * 1e6) for ms in (options.slo_ttft_ms, options.slo_tpot_ms))
    return None if ttft is None and tpot is None else Slo(ttft, tpot)


def _plain(value: Any) -> Any:
    """A dataclass as a dict for JSON, which has no infinity."""
    if isinstance(value, Mix):
        return {"prompt": _plain(value.prompt), "output": _plain(value.output)}
    return {name: str(part) if part == math.inf else part for name, part in asdict(value).items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
