"""How much faster are mixed lengths served when requests join and leave between any two steps?

continuous  the scheduler with `composer="fcfs"`: whoever comes first enters first.
static      the same scheduler with `composer="static"`: the first 16 in line make a batch, and nobody else enters until
            each of them has ended, as served before Orca (Yu et al., OSDI 2022). It is a kind baseline: no padding, and
            who has ended is not computed further, so its steps get cheaper while the batch drains.

Both run the real engine on the same load in turn, A B A B; the ratio is taken round by round. All requests are there
from the start, and the time of a run is up to its last token, so the drain at the end counts for both. "simulated" is
what the simulator says of the same load and policy with the step costs that the engine's warm-up measured.

The claim is about the length mix "bimodal" of shoal.workload.lengths: nine short answers to each long one. How much is
gained is a matter of the lengths: "chat", shown beside it in the full form, has longer prompts, which both policies
compute alike, and longer answers, so fewer batches hold one that is much longer than the others.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from common import Report, arguments
from engine import Engine, Run
from shoal.core.stepcost import StepCost
from shoal.sim.load import simulate
from shoal.workload import trace
from shoal.workload.arrivals import ClosedLoop
from shoal.workload.lengths import MIXES
from shoal.workload.trace import Trace

MAX_SEQS = 16
CONTINUOUS, STATIC = "continuous", "static"
COMPOSERS = {CONTINUOUS: "fcfs", STATIC: "static"}
CLAIMED, TARGET = "bimodal", 2.0


def main() -> None:
    report = Report("batching", arguments(__doc__.splitlines()[0]).parse_args())
    forms = {CLAIMED: (64, 2)} if report.quick else {CLAIMED: (128, 5), "chat": (96, 3)}  # requests, rounds
    engine = Engine(max_num_seqs=MAX_SEQS)
    engine.serve(trace.make(ClosedLoop(4), MIXES[CLAIMED], 4, seed=2), seed=2)  # what is set up at first use
    for name, (num_requests, num_rounds) in forms.items():
        load = trace.make(ClosedLoop(num_requests), MIXES[name], num_requests, seed=1)
        runs: dict[str, list[Run]] = {policy: [] for policy in COMPOSERS}
        for _ in range(num_rounds):
            for policy, composer in COMPOSERS.items():
                runs[policy].append(engine.serve(load, seed=1, composer=composer))
        show(report, engine, name, load, runs)
        if name == CLAIMED:
            ratio = median(ratios(runs))
            report.claim("tokens/s, continuous / static", round(ratio, 2), f">= {TARGET:g}", ratio >= TARGET)
    report.finish()


def ratios(runs: dict[str, list[Run]]) -> list[float]:
    return [a.tokens_per_s / b.tokens_per_s for a, b in zip(runs[CONTINUOUS], runs[STATIC], strict=True)]


def show(report: Report, engine: Engine, name: str, load: Trace, runs: dict[str, list[Run]]) -> None:
    """Steps, and sequences in a step, are of the last run: every run plans nearly alike."""
    rows = []
    for policy, composer in COMPOSERS.items():
        steps = runs[policy][-1].steps
        limits = replace(engine.limits, composer=composer, prefix_caching=False)
        simulated = simulate(load, limits, StepCost(engine.cost)).output_tokens_per_s
        measured = (median(run.tokens_per_s for run in runs[policy]), median(run.seconds for run in runs[policy]))
        rows.append((policy, *measured, len(steps), sum(len(step.slices) for step in steps) / len(steps), simulated))
    num_tokens = sum(row.output_tokens for row in load.rows)
    report.table(
        f"{name}: {len(load.rows)} requests, {num_tokens} output tokens, {MAX_SEQS} at once; medians",
        ("policy", "tokens/s", "seconds", "steps", "sequences a step", "simulated tokens/s"),
        rows,
    )
    report.table(f"{name}: continuous / static", ("round", "ratio"), list(enumerate(ratios(runs), start=1)))


if __name__ == "__main__":
    main()
