"""How much faster are mixed lengths served when requests join and leave between any two steps?

continuous  the scheduler as it is.
static      the same scheduler with `batching="static"`: the first 16 in line make a batch, and nobody else enters until
            each of them has ended, as served before Orca (Yu et al., OSDI 2022). It is a kind baseline: no padding, and
            who has ended is not computed further, so its steps get cheaper while the batch drains.

Both run the real engine on the same load in turn, A B A B: all requests are there from the start, prompts have 16 to
256 tokens, four of five outputs 8 to 32 and every fifth 64 to 256. The time of a run is up to its last token, so the
drain at the end counts for both. "simulated" is what the simulator says of the same load and policy with the step costs
that the engine's warm-up measured. The ratio is taken round by round; the claim is about its median.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from common import Report, arguments
from engine import Engine, Run
from shoal.core.stepcost import StepCost
from shoal.sim.load import simulate
from shoal.workload import trace
from shoal.workload.arrivals import ClosedLoop
from shoal.workload.lengths import Mix, Mixture, Uniform

MAX_SEQS = 16
LENGTHS = Mix(
    prompt=Uniform(136, 0.88),  # 16 to 256
    output=Mixture(((0.8, Uniform(20, 0.6)), (0.2, Uniform(160, 0.6)))),  # 8 to 32, 64 to 256
)
POLICIES = ("continuous", "static")
TARGET = 2.0


def main() -> None:
    report = Report("batching", arguments(__doc__.splitlines()[0]).parse_args())
    num_requests, num_rounds = (64, 2) if report.quick else (128, 5)
    load = trace.make(ClosedLoop(num_requests), LENGTHS, num_requests, seed=1)
    engine = Engine(max_num_seqs=MAX_SEQS)
    engine.serve(trace.make(ClosedLoop(4), LENGTHS, 4, seed=2), seed=2)  # what is set up at first use
    runs: dict[str, list[Run]] = {policy: [] for policy in POLICIES}
    for _ in range(num_rounds):
        for policy in POLICIES:
            runs[policy].append(engine.serve(load, seed=1, batching=policy))

    rows = []
    for policy in POLICIES:
        limits = replace(engine.limits, batching=policy, prefix_caching=False)
        simulated = simulate(load, limits, StepCost(engine.cost)).output_tokens_per_s
        rows.append((policy, *figures(runs[policy]), simulated))
    columns = ("policy", "tokens/s", "seconds", "steps", "sequences a step", "simulated tokens/s")
    num_tokens = sum(row.output_tokens for row in load.rows)
    title = f"{num_requests} requests, {num_tokens} output tokens, {MAX_SEQS} at once; medians of {num_rounds}"
    report.table(title, columns, rows)
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(runs["continuous"], runs["static"], strict=True)]
    report.table("continuous / static, round by round", ("round", "ratio"), list(enumerate(ratios, start=1)))
    ratio = median(ratios)
    report.claim("tokens/s, continuous / static", round(ratio, 2), f">= {TARGET:g}", ratio >= TARGET)
    report.finish()


def figures(runs: Sequence[Run]) -> tuple[float, float, int, float]:
    """Medians: tokens/s, seconds; steps and sequences a step of the last run, since every run plans nearly alike."""
    steps = runs[-1].steps
    sequences = sum(len(step.slices) for step in steps) / len(steps)
    return median(run.tokens_per_s for run in runs), median(run.seconds for run in runs), len(steps), sequences


if __name__ == "__main__":
    main()
