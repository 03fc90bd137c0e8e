"""Sums of ranks beside their products: half of the rows is added up by a thread while the other half is multiplied.

For `layouts.py --overlap`: two ranks with one thread each, both ways in turn. On a CPU the thread that adds takes its
time from the core that multiplies, so only waiting for the other rank can be hidden.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from torch import Tensor

from shoal.core.plan import Admit, Slice, StepPlan
from shoal.core.request import Sampling
from shoal.engine.config import EngineConfig
from shoal.engine.loop import Runner
from shoal.engine.model import load as loading
from shoal.engine.parallel import lead, rank
from shoal.engine.parallel.group import COMMAND, Group
from shoal.engine.parallel.layout import layout_of
from shoal.engine.parallel.tensor import SplitInputs

PLAIN, OVERLAPPED = "one after the other", "overlapped"
CHUNK, DECODES = "a chunk of 512 tokens", "16 decodes"
GREEDY = Sampling(temperature=0)


class Overlapped(SplitInputs):
    _thread = ThreadPoolExecutor(1)

    def add(self, x_MK: Tensor, residual_MN: Tensor) -> Tensor:
        half = len(x_MK) // 2
        if not half:
            return super().add(x_MK, residual_MN)
        if self._comm.rank:
            residual_MN.zero_()
        first, second = residual_MN[:half], residual_MN[half:]
        self._layer.add(x_MK[:half], first)
        adding = self._thread.submit(self._comm.all_reduce, first)
        self._layer.add(x_MK[half:], second)
        adding.result()
        self._comm.all_reduce(second)
        return residual_MN


def measure(folder: Path, *, quick: bool) -> dict[tuple[str, str], float]:
    """Milliseconds of a step, by step and way: medians over rounds, both ways in turn."""
    rounds, repeats = (2, 10) if quick else (5, 30)
    found: dict[tuple[str, str], list[float]] = {}
    with _ranks(folder, PLAIN) as plain, _ranks(folder, OVERLAPPED) as overlapped:
        for _ in range(rounds):
            for way, runner in ((PLAIN, plain), (OVERLAPPED, overlapped)):
                for what, times in _steps(runner, repeats).items():
                    found.setdefault((what, way), []).append(median(times))
    return {key: median(values) for key, values in found.items()}


@contextmanager
def _ranks(folder: Path, way: str) -> Iterator[Runner]:
    config = EngineConfig(dtype="float32", threads=2, kv_cache_bytes=200 << 20, tensor_parallel_size=2)
    command = COMMAND if way == PLAIN else (sys.executable, __file__)
    group = Group(layout_of(config), folder, config, command=command)
    if way == OVERLAPPED:
        loading.SplitInputs = Overlapped  # type: ignore[misc]
    try:
        yield lead.load(folder, config, group)
    finally:
        loading.SplitInputs = SplitInputs  # type: ignore[misc]
        group.close()


def _steps(runner: Runner, repeats: int) -> dict[str, list[float]]:
    """Chunks of fresh requests, then decodes of 16 after contexts of 128 tokens."""
    step = 0
    times: dict[str, list[float]] = {CHUNK: [], DECODES: []}

    def compute(leaves: list[str], admits: list[Admit], slices: list[Slice]) -> float:
        nonlocal step
        step += 1
        runner.launch(StepPlan(step, leaves, admits, slices, sum(piece.count for piece in slices), 0))
        return runner.collect().busy_ns / 1e6

    def admit(name: str, num_tokens: int, first_block: int) -> Admit:
        blocks = tuple(range(first_block, first_block + num_tokens // 16 + 4))
        return Admit(name, tuple(range(100, 100 + num_tokens)), num_tokens, 0, blocks, GREEDY, 0, 0, ())

    left: list[str] = []
    for number in range(repeats // 2):
        name = f"chunk {number}"
        times[CHUNK].append(compute(left, [admit(name, 512, 0)], [Slice(name, 0, 512, (), -1, True)]))
        left = [name]
    names = [f"decode {number}" for number in range(16)]
    admits = [admit(name, 128, 12 * number) for number, name in enumerate(names)]
    compute(left, admits, [Slice(name, 0, 128, (), -1, True) for name in names])
    for ahead in range(repeats):
        decodes = [Slice(name, 128 + ahead, 1, (), step, True) for name in names]
        times[DECODES].append(compute([], [], decodes))
    compute(names, [], [])
    return times


if __name__ == "__main__":
    loading.SplitInputs = Overlapped  # type: ignore[misc]
    rank.main()
