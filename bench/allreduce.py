"""What ranks of one host pay for talking: sums and gathers through shared memory and by gloo, and a plan on its way.

sums       of a step's hidden states, 576 values a row: 1, 16 and 512 rows; with 2 and 3 ranks, both ways in turn
gather     the logits of 16 rows over 49,152 tokens
plan       from rank 0's encoding it to rank 1's having it decoded, after a pause of 1 ms, as between two steps:
           through the sockets that are used, and through shared memory, whose reader looks again and again

Medians, in microseconds, of rank 0; every rank is a process with one thread.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import msgspec
import torch

from common import Report, arguments
from shoal.core.plan import Slice, StepPlan
from shoal.engine.config import EngineConfig
from shoal.engine.device import choose
from shoal.engine.kernels.library import Kernels
from shoal.engine.parallel import network
from shoal.engine.parallel.comm import Comm
from shoal.engine.parallel.layout import Layout
from shoal.engine.parallel.messages import Built, FromRank, Message, Pipe, Step, ToRank
from shoal.engine.parallel.shared import Memory

HIDDEN, VOCABULARY = 576, 49152
ROWS = (1, 16, 512)
GATHERED_ROWS = 16
PLAN_BYTES = 4096  # room for one, through shared memory
PAUSE_S = 0.001
LIMIT_S = 60.0
SHARED, GLOO, SOCKETS = "shared memory", "gloo", "sockets"
STEP_SUMS_MS, PLAN_US = 3, 300


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--rank", help="used by the bench itself")
    options = parser.parse_args()
    if options.rank is not None:
        rank, size, quick, first, second, pipe = json.loads(options.rank)
        print(json.dumps(Rank(rank, size, quick, (first, second), socket.socket(fileno=pipe)).run()))
        return
    report = Report("allreduce", options)
    rows: list[tuple[Any, ...]] = []
    plans: dict[str, float] = {}
    for size in (2, 3):
        found = measure(size, report.quick)
        plans = plans or {how: found[f"plan, {how}"] for how in (SOCKETS, SHARED)}
        for what in (*map(name_of, ROWS), "gather of logits"):
            shared, gloo = (found[f"{what}, {how}"] for how in (SHARED, GLOO))
            rows.append((size, what, shared, gloo, gloo / shared))
    columns = ("ranks", "what", "shared memory µs", "gloo µs", "gloo / shared memory")
    report.table("collectives", columns, rows)
    report.table("a plan of 16 decodes, to rank 1", ("through", "µs"), list(plans.items()))
    worst = min(row[-1] for row in rows)
    report.claim("gloo by shared memory, worst case", round(worst, 1), ">= 1", worst >= 1)
    step_ms = round(60 * next(row[2] for row in rows if row[:2] == (2, name_of(16))) / 1e3, 2)
    what = "all sums of a step of 30 layers, 16 rows, 2 ranks, ms"
    report.claim(what, step_ms, f"<= {STEP_SUMS_MS}", step_ms <= STEP_SUMS_MS)
    report.claim("a plan through sockets, µs", round(plans[SOCKETS]), f"<= {PLAN_US}", plans[SOCKETS] <= PLAN_US)
    report.finish()


def name_of(rows: int) -> str:
    return f"sum of {rows} rows, {rows * HIDDEN * 4 / 1e3:g} KB"


def measure(size: int, quick: bool) -> dict[str, float]:
    """What rank 0 found."""
    memory, pair = Memory(Layout(tp=size)), socket.socketpair()
    ranks: list[subprocess.Popen[str]] = []
    for rank in range(size):
        fds = (*memory.fds, pair[min(rank, 1)].fileno())
        command = [sys.executable, __file__, "--rank", json.dumps([rank, size, quick, *fds])]
        output = subprocess.DEVNULL if rank else subprocess.PIPE
        ranks.append(subprocess.Popen(command, pass_fds=fds, stdout=output, text=True))
    try:
        found: dict[str, float] = json.loads(ranks[0].communicate(timeout=LIMIT_S * 5)[0])
        return found
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        for end in pair:
            end.close()
        memory.close()


class Rank:
    """One rank of the bench: all of them do the same calls in the same order."""

    def __init__(self, rank: int, size: int, quick: bool, fds: tuple[int, int], pipe: socket.socket) -> None:
        device = choose(EngineConfig(kernels="off", device="cpu", threads=1))
        layout = Layout(tp=size)
        self._rank = rank
        self._size = size
        self._repeats = 100 if quick else 400
        self._pipe = Pipe(pipe, FromRank if rank == 0 else ToRank)
        self._comms: dict[str, Comm] = {
            SHARED: Memory(layout, fds).comms(rank, Kernels(1), limit_s=LIMIT_S).layer,
            GLOO: network.join(layout, rank, device, fds[1], limit_s=LIMIT_S).layer,
        }

    def run(self) -> dict[str, float]:
        found = {}
        for rows in ROWS:
            x = torch.zeros(rows, HIDDEN)
            found |= self._both(name_of(rows), lambda comm, x=x: comm.all_reduce(x))
        own, widths = torch.zeros(GATHERED_ROWS, VOCABULARY // self._size), [VOCABULARY // self._size] * self._size
        out = torch.zeros(GATHERED_ROWS, VOCABULARY)
        found |= self._both("gather of logits", lambda comm: comm.all_gather(own, widths, out))
        if self._rank < 2:
            found[f"plan, {SOCKETS}"] = self._plans(self._by_socket)
            found[f"plan, {SHARED}"] = self._plans(self._by_memory)
        return found

    def _both(self, what: str, call: Callable[[Comm], object]) -> dict[str, float]:
        times: dict[str, list[float]] = {how: [] for how in self._comms}
        for _ in range(5):
            for how, comm in self._comms.items():
                times[how] += _timed(lambda comm=comm: call(comm), self._repeats // 5)
        return {f"{what}, {how}": median(values) for how, values in times.items()}

    def _plans(self, exchange: Callable[[Message], None]) -> float:
        """Half of what it takes there and back; the way back carries next to nothing."""
        slices = [Slice(f"gateway-0.{number:08d}.0", 180 + number, 1, (), 41, True) for number in range(16)]
        plan = Step(42, StepPlan(42, [], [], slices, 16, 28_000_000))
        times = []
        for _ in range(self._repeats // 2):
            if self._rank == 0:
                time.sleep(PAUSE_S)
            times += _timed(lambda: exchange(plan), 1, warm_up=0)
        return median(times) / 2

    def _by_socket(self, plan: Message) -> None:
        if self._rank == 0:
            self._pipe.send(plan)
            assert self._pipe.receive() == Built()
        else:
            assert isinstance(self._pipe.receive(), Step)
            self._pipe.send(Built())

    def _by_memory(self, plan: Message) -> None:
        comm, answer = self._comms[SHARED], torch.zeros(8, dtype=torch.uint8)
        if self._rank == 0:
            body = msgspec.msgpack.encode(plan)
            room = torch.frombuffer(bytearray(body.ljust(PLAN_BYTES, b"\xc0")), dtype=torch.uint8)
            comm.send(room, 1)
            comm.receive(answer, 1)
        else:
            data = comm.receive(torch.zeros(PLAN_BYTES, dtype=torch.uint8), 0).numpy().data
            assert isinstance(msgspec.msgpack.decode(data[: len(msgspec.msgpack.encode(plan))], type=Step), Step)
            comm.send(answer, 0)


def _timed(call: Callable[[], object], count: int, *, warm_up: int = 5) -> list[float]:
    """In microseconds."""
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e6)
    return times


if __name__ == "__main__":
    main()
