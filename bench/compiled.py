"""Would `torch.compile` serve the default model faster on a CPU? Torch as it is, compiled, and shoal's own kernels.

16 requests at once, prompts of about 128 and answers of about 64 tokens, in turn in this process. The layers are
compiled as one function with dynamic shapes; what its first steps cost is shown beside the rate that follows. There is
no option for it: this bench shows why.
"""

from __future__ import annotations

import time
from statistics import median

import torch

from common import Report, arguments
from engine import Engine
from shoal.workload import trace
from shoal.workload.arrivals import ClosedLoop
from shoal.workload.lengths import Mix, Uniform

SEQS, MIX = 16, Mix(Uniform(128, 0.5), Uniform(64, 0.5))


def main() -> None:
    report = Report("compiled", arguments(__doc__.splitlines()[0]).parse_args())
    num_requests, num_rounds = (16, 2) if report.quick else (48, 3)
    engines = {
        "torch": Engine(kernels="off", max_num_seqs=SEQS),
        "torch, compiled": compiled(Engine(kernels="off", max_num_seqs=SEQS)),
        "shoal's kernels": Engine(max_num_seqs=SEQS),
    }
    first_s, rates = {}, {name: [] for name in engines}
    for name, engine in engines.items():
        began = time.perf_counter()
        engine.serve(trace.make(ClosedLoop(SEQS), MIX, SEQS, seed=0), seed=0)
        first_s[name] = time.perf_counter() - began
    for number in range(num_rounds):
        load = trace.make(ClosedLoop(SEQS), MIX, num_requests, seed=number)
        for name, engine in engines.items():
            rates[name].append(engine.serve(load, seed=number).tokens_per_s)
    rows = [
        (
            name,
            first_s[name],
            median(rates[name]),
            median(a / b for a, b in zip(rates[name], rates["torch"], strict=True)),
        )
        for name in engines
    ]
    report.table(f"{SEQS} at once, medians", ("layers by", "first 16 requests s", "tokens/s", "x torch"), rows)
    report.finish()


def compiled(engine: Engine) -> Engine:
    engine.runner._layers = torch.compile(engine.runner._layers.__call__, dynamic=True)
    return engine


if __name__ == "__main__":
    main()
