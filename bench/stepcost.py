"""How well is the time of a step predicted before it runs?

The real engine in this process, from its first step on: the cost model knows what the warm-up told it and learns as it
goes. Rounds of five loads, so that every kind of step comes early and often: 16, 64, 4 and 1 callers with chats, and
prompts alone. Kinds are those of the engine's metrics: decode (one token per request), prefill (chunks alone), mixed.
The error of a step is |predicted - measured| / measured; the claims are about all steps, the first ones included.

Then an hour in which all steps are alike is lived through quickly: steps of 16 decodes are recorded, and the cost model
is told of them again and again, as many as fill an hour. What it then believes of a prompt of 1,500 tokens in one step,
before it saw anything else, is held against the median of such prompts. They are measured in turn with steps of the
hour's kind, whose times tell how fast the machine is by now: a running engine would know that, but nothing of prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from statistics import median
from typing import Any

from common import Report, arguments
from engine import Engine
from shoal.core.limits import Limits
from shoal.core.scheduler import Scheduler
from shoal.core.stepcost import FEATURES, Features, StepCost
from shoal.engine.loop import Step, Turn
from shoal.workload import trace
from shoal.workload.arrivals import ClosedLoop
from shoal.workload.latency import percentile
from shoal.workload.lengths import LongTail, Mix, Uniform
from shoal.workload.trace import Row, Trace

PROMPTS = LongTail(128, 0.9, 1400)
LOADS = (  # callers, lengths, requests
    (16, Mix(PROMPTS, Uniform(16, 0.5)), 60),
    (1, Mix(Uniform(700, 0.97), Uniform(1)), 20),
    (64, Mix(Uniform(64, 0.5), Uniform(16, 0.5)), 128),
    (4, Mix(PROMPTS, Uniform(24, 0.5)), 20),
    (1, Mix(PROMPTS, Uniform(16, 0.5)), 2),
)
FIRST = 200  # steps that are shown by themselves too
KINDS = ("decode", "mixed", "prefill")
MEDIAN_PERCENT, P90_PERCENT = 10.0, 25.0
HOUR_NS = 3600 * 10**9
CONSTANT_SEQS, CONSTANT_ROUNDS, LONG_PROMPT = 16, 3, 1500
UNCUT = {"max_step_ns": 10**12, "max_prefill_chunk": 0}


class Learning(Engine):
    """Its schedulers share one cost model, as if it were one engine that serves load after load."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.learner = StepCost(self.cost)
        self.steps: list[Step] = []

    def scheduler(self, limits: Limits) -> Scheduler:
        self.runner.forget_all()
        return Scheduler(limits, hash_root=self.runner.hash_root, cost=self.learner)

    def watch(self, turn: Turn) -> None:
        if turn.step is not None and turn.step.num_tokens:
            self.steps.append(turn.step)


def main() -> None:
    report = Report("stepcost", arguments(__doc__.splitlines()[0]).parse_args())
    engine = Learning(max_num_seqs=64)
    for seed in range(2 if report.quick else 10):
        for callers, mix, count in LOADS:
            engine.serve(trace.make(ClosedLoop(callers), mix, count, seed), seed=seed, on_turn=engine.watch)
    show(report, engine)
    hour(report, engine, num_prompts=5 if report.quick else 15)
    report.finish()


def show(report: Report, engine: Learning) -> None:
    columns = ("kind", "steps", "ms, median", "error %, median", "error %, P90", "predicted / measured, median")
    for title, steps in ((f"first {FIRST} steps", engine.steps[:FIRST]), ("all steps", engine.steps)):
        by_kind = {kind: [step for step in steps if step.kind == kind] for kind in KINDS}
        rows = [(kind, *figures(same)) for kind, same in by_kind.items() if same]
        report.table(title, columns, rows)
    for kind, _, _, middle, p90, _ in rows:
        report.claim(f"{kind}: median error %", round(middle, 1), f"<= {MEDIAN_PERCENT:g}", middle <= MEDIAN_PERCENT)
        report.claim(f"{kind}: P90 error %", round(p90, 1), f"<= {P90_PERCENT:g}", p90 <= P90_PERCENT)
    rows = [("after the warm-up", *engine.cost), ("at the end", *engine.learner.coefficients)]
    report.table("coefficients, ns", ("when", *FEATURES), rows)


def figures(steps: Sequence[Step]) -> tuple[int, float, float, float, float]:
    ratios = [step.predicted_ns / step.busy_ns for step in steps]
    errors = [100 * abs(ratio - 1) for ratio in ratios]
    middle_ms = median(step.busy_ns for step in steps) / 1e6
    return len(steps), middle_ms, median(errors), percentile(errors, 90), median(ratios)


def hour(report: Report, engine: Learning, num_prompts: int) -> None:
    steps = [each for seed in range(CONSTANT_ROUNDS) for each in constant(engine, seed, num_output=96)]
    num_updates = HOUR_NS // int(median(busy_ns for _, busy_ns in steps))
    for features, busy_ns in islice(cycle(steps), num_updates):
        engine.learner.update(features, busy_ns)

    after = StepCost(engine.learner.coefficients)
    slower: list[float] = []
    times_ms: list[float] = []
    for seed in range(num_prompts):
        slower += [busy_ns / after.predict(features) for features, busy_ns in constant(engine, seed, num_output=32)]
        (step,) = engine.serve(Trace((Row(0, LONG_PROMPT, 1),), 1), seed=seed, **UNCUT).steps
        times_ms.append(step.busy_ns / 1e6)
    predicted_ms = after.predict(after.features(step.slices)) / 1e6
    expected_ms, measured_ms = predicted_ms * median(slower), median(times_ms)
    error = 100 * abs(expected_ms - measured_ms) / measured_ms
    columns = ("steps of the hour", "predicted ms", "slower by now", "expected ms", "measured ms, median", "error %")
    row = (num_updates, predicted_ms, median(slower), expected_ms, measured_ms, error)
    report.table(f"a prompt of {LONG_PROMPT} after an hour of {CONSTANT_SEQS} decodes a step", columns, [row])
    name = f"a prompt of {LONG_PROMPT} after a constant hour: error %"
    report.claim(name, round(error, 1), f"<= {P90_PERCENT:g}", error <= P90_PERCENT)


def constant(engine: Learning, seed: int, num_output: int) -> list[tuple[Features, int]]:
    """Steps of 16 decodes, with their times."""
    run = engine.serve(Trace((Row(0, 128, num_output),) * CONSTANT_SEQS, CONSTANT_SEQS), seed=seed)
    return [
        (StepCost.features(step.slices), step.busy_ns)
        for step in run.steps
        if len(step.slices) == CONSTANT_SEQS and all(part.count == 1 for part in step.slices)
    ]


if __name__ == "__main__":
    main()
