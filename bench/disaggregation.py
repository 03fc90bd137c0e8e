"""Prompts and answers on the same two engines: each does both, or one computes prompts and the other decodes.

One service, two engines of the default model with one thread each. Chats (48 tokens in, 256 out, class interactive) run
all the time; beside them comes one long prompt (1,500 in, 48 out) after another, as often as keeps one engine busy for
half of the time. In turn, by `shoal role` and without a restart:

    unsplit   both, both
    split     prefill, decode
    free      both, decode: the router may split, where it expects that to pay; simulated only

Figures are over the time in which long prompts were under way; claims compare medians over rounds. The same is
simulated (splitting.py), on a machine that nothing disturbs. --quick: prompts of 500 tokens, answers of 64, one round.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from client import Outcome, Request, Target, send, session
from common import Report, arguments
from peers.server import Server, free_port
from shoal import models
from shoal.cli import role, status
from shoal.workload.latency import percentile
from splitting import TOKEN_BYTES, Fleet

MODES = {"unsplit": ("both", "both"), "split": ("prefill", "decode"), "free": ("both", "decode")}
ENGINES = ("engine-0", "engine-1")
NAME = "model"
VOCABULARY = range(100, 49152)
CHATS, CHAT_PROMPT, LONG_OUTPUT = 6, 48, 48  # at once; tokens
CHAT_CLASS = {"priority": -1}  # the most urgent class
LOAD = 0.5  # of one engine, by prompts alone
SETTLE_S = 2.0  # until gateways know of a new role, and from the first chat until a phase counts
START_LIMIT_S, ANSWER_LIMIT_S = 300.0, 120.0


class Shape(NamedTuple):
    """Of a run."""

    modes: tuple[str, ...]
    rounds: int
    num_long: int  # in a phase
    long_prompt: int  # tokens
    chat_output: int
    simulated_s: tuple[float, ...]  # between two long prompts


FULL = Shape(("unsplit", "split"), 2, 8, 1500, 256, (4.0, 8.0, 16.0))
QUICK = Shape(("unsplit", "split"), 1, 4, 500, 64, (4.0,))


class Service:
    """A running service, and what its processes say of themselves."""

    def __init__(self, target: Target, page: str) -> None:
        self.target = target
        self._page = page
        while True:
            found = status.fetch(page)
            if [each["state"] for each in found["replicas"]] == ["serving"] * len(ENGINES):
                break
            time.sleep(0.1)
        self._engines = [each["metrics"] for each in found["replicas"]]
        self._gateway = found["gateways"][0]["metrics"]

    def assign(self, roles: Iterable[str]) -> None:
        for name, each in zip(ENGINES, roles, strict=True):
            role.post(self._page, name, each)

    def counts(self) -> dict[str, float]:
        """Whatever only grows."""
        counts = {f"split_requests {'/'.join(key)}": value for key, value in _metric(self._gateway, "split_requests")}
        counts |= {f"migrations {'/'.join(key)}": value for key, value in _metric(self._gateway, "request_migrations")}
        for number, url in enumerate(self._engines):
            counts |= {
                f"{name} {number}": _metric(url, name)[0][1] for name in ("kv_fetched_bytes", "generation_tokens")
            }
        return counts


def _metric(url: str, name: str) -> list[tuple[tuple[str, ...], float]]:
    """A counter's values, by those of its labels."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    return [(tuple(s.labels.values()), s.value) for s in samples if s.name == f"shoal:{name}_total"]


class Timed(NamedTuple):
    """A request that was answered."""

    due_ns: int
    at_ns: Sequence[int]  # each token


class Measured(NamedTuple):
    """Of one phase."""

    tokens_per_s: float  # of all answers
    ttft_ms: float  # of long prompts
    ttft_p99_ms: float
    itl_ms: float  # between two tokens of a chat
    itl_p99_ms: float
    chat_ttft_ms: float
    long_itl_p99_ms: float


class Routed(NamedTuple):
    """In one phase."""

    share_split: float  # of all prompts
    share_decoded: float  # of all answers' tokens, by the first engine
    moved_mb: float
    decisions: str  # of the router; live, how the migrations ended, too


class Phase(NamedTuple):
    number: int
    mode: str
    measured: Measured
    routed: Routed
    failed: int = 0


MEASURED = (
    "tokens/s",
    "long TTFT P50 ms",
    "P99 ms",
    "chat ITL P50 ms",
    "P99  ms",
    "chat TTFT P50",
    "long ITL P99",
)
ROUTED = ("share split", "decoded by first engine", "KV moved MB", "decisions and ends of migrations")


class Load:
    def __init__(self, http: aiohttp.ClientSession, service: Service, shape: Shape, seed: int) -> None:
        self._http = http
        self._shape = shape
        self._service = service
        self._chance = Random(seed)
        self._start_ns = time.perf_counter_ns()
        self._chats: list[Outcome] = []
        self._over = False

    def _now_ns(self) -> int:
        return time.perf_counter_ns() - self._start_ns

    async def _ask(self, num_prompt: int, num_output: int, due_ns: int, **body: Any) -> Outcome:
        prompt = tuple(self._chance.choices(VOCABULARY, k=num_prompt))
        target = replace(self._service.target, body=self._service.target.body | body)
        return await send(self._http, target, 0, Request(due_ns, prompt, num_output), due_ns, self._start_ns)

    async def _chat(self) -> None:
        while not self._over:
            self._chats.append(await self._ask(CHAT_PROMPT, self._shape.chat_output, self._now_ns(), **CHAT_CLASS))

    async def _long(self, due_ns: int) -> Outcome:
        await asyncio.sleep(max(0, due_ns - self._now_ns()) / 1e9)
        return await self._ask(self._shape.long_prompt, LONG_OUTPUT, due_ns)

    @asynccontextmanager
    async def chats(self) -> AsyncIterator[None]:
        """Many at once, each caller one after the other, as long as something else is done. All end by themselves."""
        async with asyncio.TaskGroup() as group:
            for _ in range(CHATS):
                group.create_task(self._chat())
            yield
            self._over = True

    async def alone_s(self, count: int) -> float:
        """Median time to the first token of a long prompt with nothing beside it."""
        outcomes = [await self._long(self._now_ns()) for _ in range(count)]
        return median(outcome.latency.ttft_ns for outcome in outcomes) / 1e9

    async def phase(self, number: int, mode: str, count: int, every_s: float) -> Phase:
        service = self._service
        service.assign(MODES[mode])
        await asyncio.sleep(SETTLE_S)
        running: list[Outcome] = []
        async with self.chats():
            await asyncio.sleep(SETTLE_S)
            before, first_ns = service.counts(), self._now_ns()
            due_ns = [first_ns + round(number * every_s * 1e9) for number in range(count)]
            running = list(await asyncio.gather(*map(self._long, due_ns)))
            after, last_ns = service.counts(), self._now_ns()
        told = {name: value - before.get(name, 0.0) for name, value in after.items() if value > before.get(name, 0.0)}
        good = [[Timed(o.due_ns, o.chunk_ns) for o in each if not o.error] for each in (running, self._chats)]
        failed = sum(bool(outcome.error) for outcome in (*running, *self._chats))
        return Phase(number, mode, _measured(*good, (first_ns, last_ns)), _routed(told), failed)


def _routed(told: dict[str, float]) -> Routed:
    decisions = {
        name.partition(" ")[2]: round(v) for name, v in told.items() if name.startswith(("split", "migrations"))
    }
    splits = [value for name, value in told.items() if name.startswith("split_requests split/")]
    placed = [value for name, value in told.items() if name.startswith("split_requests ")]
    return Routed(
        sum(splits) / sum(placed) if placed else 0.0,
        told.get("generation_tokens 0", 0.0) / sum(told.get(f"generation_tokens {number}", 0.0) for number in (0, 1)),
        sum(told.get(f"kv_fetched_bytes {number}", 0.0) for number in (0, 1)) / 1e6,
        ", ".join(f"{name} {count}" for name, count in decisions.items()),
    )


def _measured(long: list[Timed], chats: list[Timed], window: tuple[int, int]) -> Measured:
    """`window`: nanoseconds; a gap counts where it ends."""
    first_ns, last_ns = window

    def gaps(requests: list[Timed]) -> list[float]:
        pairs = [pair for each in requests for pair in pairwise(each.at_ns)]
        return [(b - a) / 1e6 for a, b in pairs if first_ns <= b <= last_ns]

    ttft = [(each.at_ns[0] - each.due_ns) / 1e6 for each in long]
    num_tokens = sum(first_ns <= at <= last_ns for each in (*long, *chats) for at in each.at_ns)
    return Measured(
        num_tokens / (last_ns - first_ns) * 1e9,
        percentile(ttft, 50),
        percentile(ttft, 99),
        percentile(gaps(chats), 50),
        percentile(gaps(chats), 99),
        percentile([(each.at_ns[0] - each.due_ns) / 1e6 for each in chats], 50),
        percentile(gaps(long), 99),
    )


def simulate(report: Report, shape: Shape) -> None:
    rows = []
    for every_s in shape.simulated_s:
        phases = []
        for mode, roles in MODES.items():
            fleet = Fleet(roles, seed=1)
            fleet.run(CHATS, (CHAT_PROMPT, 256), (1500, LONG_OUTPUT), 8, every_s)
            long, chats = [[Timed(each.due_ns, each.at_ns) for each in some] for some in (fleet.long, fleet.chats)]
            measured = _measured(long, chats, (long[0].due_ns, max(each.at_ns[-1] for each in long)))
            decisions = ", ".join(f"{name} {count}" for name, count in sorted(fleet.decisions.items()))
            num_tokens = [site.num_tokens for site in fleet.sites.values()]
            num_split = fleet.decisions["split"] / max(1, fleet.decisions.total())
            mb = fleet.moved_tokens * TOKEN_BYTES / 1e6
            routed = Routed(num_split, num_tokens[0] / sum(num_tokens), mb, decisions)
            phases.append(Phase(0, mode, measured, routed))
            rows.append((every_s, mode, *measured, *routed))
        claim(report, phases, f"simulated, every {every_s:g} s: ")
    report.table("simulated", ("every s", "mode", *MEASURED, *ROUTED), rows)


async def measure(report: Report, service: Service, shape: Shape) -> None:
    phases: list[Phase] = []
    async with session() as http:
        await asyncio.sleep(SETTLE_S)
        every_s = await Load(http, service, shape, 0).alone_s(3) / LOAD
        print(f"one long prompt every {every_s:.2f} s", file=sys.stderr, flush=True)
        await Load(http, service, shape, 1).phase(0, "unsplit", 2, 0.0)  # not counted: what is learned at first
        for number in range(1, shape.rounds + 1):
            for mode in shape.modes:
                load = Load(http, service, shape, 10 * number + shape.modes.index(mode))
                phases.append(await load.phase(number, mode, shape.num_long, every_s))
                print(phases[-1], file=sys.stderr, flush=True)
    report.table("in turn", ("round", "mode", *MEASURED), [(each.number, each.mode, *each.measured) for each in phases])
    report.table("routed", ("round", "mode", *ROUTED), [(each.number, each.mode, *each.routed) for each in phases])
    claim(report, phases)
    failed = sum(each.failed for each in phases)
    report.claim("requests that failed", failed, "none", not failed)


def claim(report: Report, phases: list[Phase], where: str = "") -> None:
    def of(mode: str, figure: str) -> float:
        return median(getattr(each.measured, figure) for each in phases if each.mode == mode)

    def ratio(mode: str, figure: str) -> float:
        return of(mode, figure) / of("unsplit", figure)

    for mode in dict.fromkeys(each.mode for each in phases if each.mode != "unsplit"):
        itl, ttft = ratio(mode, "itl_p99_ms"), ratio(mode, "ttft_ms")
        none = not any(each.routed.share_split for each in phases if each.mode == mode)
        name = f"{where}{mode} by unsplit: P99 ITL of chats {itl:.2f}, P50 TTFT of long prompts {ttft:.2f}; the lower"
        report.claim(name, round(min(itl, ttft), 3), "at most 0.8, or nothing is split", min(itl, ttft) <= 0.8 or none)
        report.claim(f"{where}{mode} by unsplit: tokens/s", round(ratio(mode, "tokens_per_s"), 3), "to know", True)


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # as Ctrl-C: the service is ended
    report = Report("disaggregation", options)
    shape = QUICK if options.quick else FULL
    simulate(report, shape)
    model = models.pull(models.DEFAULT)
    port, page = free_port(), free_port()
    command = [sys.executable, "-m", "shoal.cli", "serve", str(model), "--served-model-name", NAME]
    command += ["--replicas", str(len(ENGINES)), "--threads", "1", "--port", str(port), "--controller-port", str(page)]
    command += ["--kv-cache-bytes", str(1 << 30)]
    body = {"temperature": 0.0, "ignore_eos": True}
    target = Target(url=f"http://127.0.0.1:{port}", model=NAME, timeout_s=ANSWER_LIMIT_S, body=body)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ending:
        server = Server("shoal", command, {"SHOAL_API_KEY": ""}, target, Path(folder) / "log")
        ending.callback(server.end)
        asyncio.run(server.until_it_answers(START_LIMIT_S))
        service = Service(target, f"http://127.0.0.1:{page}")
        asyncio.run(measure(report, service, shape))
    report.finish()


if __name__ == "__main__":
    main()
