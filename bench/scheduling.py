"""Who is served when more comes than can be? Three composers on one mixed trace, on the real engine and simulated.

static  the first 8 in line make a batch, and nobody else enters until each of them has ended
fcfs    whoever comes first enters first, between any two steps
value   the scheduler as it is: classes, deadlines, predicted times and lengths, parking

Seven of ten requests are short chats (class interactive), two get long answers (standard), one has a long prompt
(batch). They come calmly at half of the capacity and in bursts at three times of it, and the KV pool holds less than
the 8 of a step would like. Static and fcfs know no classes: for them all are equal, and nobody is promised anything.

Measured first, in the same run: the capacity, requests/s of the mix under fcfs while many wait; how much of it the
interactive ones alone would take; and each class alone on an idle replica. Its targets are 3 x the TTFT and 2 x the
TPOT that it had there, at the median. Attainment is over all requests that were sent: refused, or late, is missed. The
worst wait is the longest time that an accepted request was without a slice, in the line, parked or passed over.

The composers take turns, round by round, each round with another trace; figures are medians over the rounds. On the
real engine the trace is a quarter as long, and static, which takes many minutes, runs in the first round only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple, Protocol

from common import Report, arguments
from engine import Engine, equal_classes
from live import note, serve
from shoal.core.classes import DEFAULT_CLASSES, ServiceClass
from shoal.core.limits import Limits
from shoal.core.stepcost import StepCost
from shoal.sim import outcomes
from shoal.sim.load import simulate
from shoal.sim.outcomes import Figures, Outcome
from shoal.workload import trace
from shoal.workload.arrivals import Bursts, ClosedLoop
from shoal.workload.latency import Slo, Spread
from shoal.workload.lengths import Mix, Uniform
from shoal.workload.trace import Part, Row, Trace

SEQS, BLOCKS, HOST_BYTES, MAX_STEP_MS = 8, 170, 1 << 29, 100
CALM, BURST = 0.5, 3.0  # x capacity
INTERACTIVE, STANDARD, BATCH = "interactive", "standard", "batch"
PARTS = (
    Part(7, INTERACTIVE, Mix(Uniform(48, 0.25), Uniform(12, 0.5)), ("a", "b", "c", "d")),
    Part(2, STANDARD, Mix(Uniform(64, 0.25), Uniform(400, 0.25)), ("a", "b")),
    Part(1, BATCH, Mix(Uniform(1400, 0.15), Uniform(16, 0.5)), ("a",)),
)
STATIC, FCFS, VALUE = COMPOSERS = ("static", "fcfs", "value")
TTFT_TIMES, TPOT_TIMES = 3, 2  # of the unloaded median
ALONE_TOKENS = 24  # an unloaded answer is cut to it: what a token takes is known by then

STATIC_TARGET, FCFS_TARGET, KEPT_TARGET, LOST_TARGET, LOAD_TARGET = 2.0, 0.97, 0.95, 0.60, 0.5


class Shape(NamedTuple):
    """How much is measured."""

    num_alone: int  # requests of each class, one after the other
    num_saturated: int  # requests that tell the capacity
    num_calm: int  # requests of each calm, and of each burst: a slower machine gets as many, more slowly
    num_burst: int
    num_cycles: int
    num_rounds: int


FULL = Shape(num_alone=9, num_saturated=120, num_calm=20, num_burst=80, num_cycles=4, num_rounds=3)
LIVE = FULL._replace(num_alone=5, num_saturated=60, num_cycles=1, num_rounds=2)
QUICK = Shape(num_alone=3, num_saturated=30, num_calm=2, num_burst=28, num_cycles=1, num_rounds=1)


class World(Protocol):
    """Where a load is run."""

    name: str

    def run(self, load: Trace, what: str, *, sent: bool = False, **limits: Any) -> outcomes.Report:
        """`sent`: may end when all requests are sent."""
        ...


@dataclass(frozen=True, slots=True)
class Simulated:
    limits: Limits
    cost: tuple[float, ...]  # of the machine, stepcost's coefficients
    tell: Callable[[str], None] = lambda text: None
    name: str = "simulated"

    def run(self, load: Trace, what: str, *, sent: bool = False, **limits: Any) -> outcomes.Report:
        self.tell(f"{self.name}, {what}")
        return simulate(load, replace(self.limits, **limits), StepCost(self.cost))


class Yardstick(NamedTuple):
    """What the world can do."""

    capacity_per_s: float  # requests of the mix
    interactive_per_s: float  # the same where all are interactive
    slos: dict[str, Slo]  # by class

    def classes(self) -> dict[str, ServiceClass]:
        """The default ones, with these targets where they have any."""
        return {
            name: replace(service, ttft_ms=self.slos[name].ttft_ns / 1e6, tpot_ms=self.slos[name].tpot_ns / 1e6)
            if service.ttft_ms
            else service
            for name, service in DEFAULT_CLASSES.items()
        }


def main() -> None:
    report = Report("scheduling", arguments(__doc__.splitlines()[0]).parse_args())
    live = Live()
    simulated = Simulated(live.limits, live.engine.cost, note)
    rows: list[Sequence[Any]] = []
    for world, shape in ((live, QUICK if report.quick else LIVE), (simulated, FULL)):
        rows += measure(report, world, shape)
        report.save()
    report.table("all of it; medians", COLUMNS, rows)
    report.finish()


class Live:
    name = "live"

    def __init__(self) -> None:
        from shoal.engine.device import num_cores  # loads torch

        # All cores compute: what is copied here takes a small part of one.
        self.engine = Engine(
            max_num_seqs=SEQS, max_step_ms=MAX_STEP_MS, host_cache_bytes=HOST_BYTES, threads=num_cores()
        )
        self.limits = replace(self.engine.limits, num_blocks=BLOCKS)
        self.run(Trace((Row(0, 64, 4),) * SEQS), "what is set up at first use")

    def run(self, load: Trace, what: str, *, sent: bool = False, **limits: Any) -> outcomes.Report:
        note(f"{self.name}, {what}")
        stop = lambda ledger: sent and len(ledger.outcomes) == len(load.rows)  # noqa: E731
        return serve(self.engine, load, seed=1, name=what, stop=stop, **({"num_blocks": BLOCKS} | limits))


def measure(report: Report, world: World, shape: Shape) -> list[Sequence[Any]]:
    """Rows of the table, with claims about them."""
    yard = yardstick(world, shape)
    calm_per_s, burst_per_s = CALM * yard.capacity_per_s, BURST * yard.capacity_per_s
    arrivals = Bursts(calm_per_s, shape.num_calm / calm_per_s, burst_per_s, shape.num_burst / burst_per_s)
    found: dict[str, list[outcomes.Report]] = {name: [] for name in COMPOSERS}
    loads: list[tuple[float, float]] = []
    for number in range(1, shape.num_rounds + 1):
        load = trace.mixed(arrivals, PARTS, arrivals.expected(shape.num_cycles), seed=number)
        loads += loads_in_bursts(load, arrivals, yard)
        for name in COMPOSERS:
            if name == STATIC and shape is LIVE and number > 1:
                continue
            classes = yard.classes() if name == VALUE else equal_classes()
            what = f"round {number} of {shape.num_rounds}, {name}"
            found[name].append(world.run(load, what, composer=name, classes=classes))
    show_yardstick(report, world.name, yard, loads)
    show_rounds(report, world.name, found)
    claim(report, world.name, shape, yard, found, max(interactive for _, interactive in loads))
    return [row for name in COMPOSERS for row in class_rows(world.name, name, found[name], yard)]


# -- what the world can do ---------------------------------------------------------------------------------------------


def yardstick(world: World, shape: Shape) -> Yardstick:
    slos = {part.service_class: alone(world, part, shape.num_alone) for part in PARTS}
    short = [part for part in PARTS if part.service_class == INTERACTIVE]
    return Yardstick(
        capacity_per_s(world, PARTS, shape.num_saturated),
        capacity_per_s(world, short, shape.num_saturated),
        slos,
    )


def alone(world: World, part: Part, count: int) -> Slo:
    """The targets of a class: from `count` of its requests, one at a time."""
    load = trace.mixed(ClosedLoop(1), [part], count, seed=1)
    rows = [row._replace(output_tokens=min(row.output_tokens, ALONE_TOKENS)) for row in load.rows]
    report = world.run(Trace(tuple(rows), 1), f"{part.service_class} alone", composer=FCFS, classes=equal_classes())
    ttft, tpot = report.ttft_ns, report.tpot_ns
    assert ttft is not None and tpot is not None
    return Slo(round(TTFT_TIMES * ttft.p50), round(TPOT_TIMES * tpot.p50))


def capacity_per_s(world: World, parts: Sequence[Part], count: int) -> float:
    """Requests per second under fcfs while more than fit are there: until the last one is sent, then the load fades.

    What is under way at that moment counts by the share of its answer that is there.
    """
    load = trace.mixed(ClosedLoop(2 * SEQS), parts, count, seed=2)
    names = ", ".join(part.service_class for part in parts)
    report = world.run(load, f"saturated with {names}", sent=True, composer=FCFS, classes=equal_classes())
    end_ns = max(outcome.due_ns for outcome in report.outcomes)
    return sum(share_done(outcome, end_ns) for outcome in report.outcomes) / end_ns * 1e9


def share_done(outcome: Outcome, now_ns: int) -> float:
    """Of the answer. Its tokens are taken as evenly spread between the first and the last that came."""
    count = len(outcome.tokens)
    if now_ns < outcome.first_ns or not count:
        return 0.0
    if now_ns < outcome.last_ns:
        count = 1 + (count - 1) * (now_ns - outcome.first_ns) / (outcome.last_ns - outcome.first_ns)
    return count / outcome.row.output_tokens


def loads_in_bursts(load: Trace, arrivals: Bursts, yard: Yardstick) -> list[tuple[float, float]]:
    """Of each burst: what all that came in it, and what its interactive requests alone, ask for, x capacity."""
    bursts: dict[int, list[Row]] = {}
    for row in load.rows:
        if (number := arrivals.burst_of(row.due_ns)) is not None:
            bursts.setdefault(number, []).append(row)
    return [
        (
            len(rows) / arrivals.burst_s / yard.capacity_per_s,
            sum(row.service_class == INTERACTIVE for row in rows) / arrivals.burst_s / yard.interactive_per_s,
        )
        for rows in bursts.values()
    ]


# -- what came of it ---------------------------------------------------------------------------------------------------

COLUMNS = (
    "where", "composer", "tokens/s", "class", "sent", "refused",
    "TTFT P50 ms", "P95", "P99", "TPOT P50 ms", "P95 ", "P99 ", "attained", "worst wait s",
)  # fmt: skip


def class_rows(where: str, composer: str, reports: Sequence[outcomes.Report], yard: Yardstick) -> list[Sequence[Any]]:
    tokens_per_s = median(report.output_tokens_per_s for report in reports)
    return [
        (where, composer, tokens_per_s, part.service_class, *class_figures(part.service_class, reports, yard))
        for part in PARTS
    ]


def class_figures(name: str, reports: Sequence[outcomes.Report], yard: Yardstick) -> list[Any]:
    figures = [report.by_class()[name] for report in reports]
    return [
        median(each.num_requests for each in figures),
        median(each.num_refused for each in figures),
        *percentiles_ms([each.ttft_ns for each in figures]),
        *percentiles_ms([each.tpot_ns for each in figures]),
        median(each.attainment(yard.slos[name]) for each in figures),
        median(each.worst_wait_ns for each in figures) / 1e9,
    ]


def percentiles_ms(spreads: Sequence[Spread | None]) -> list[float]:
    """Of rounds in which nobody was answered, nothing."""
    some = [each for each in spreads if each is not None]
    if not some:
        return [float("nan")] * 3
    return [median(getattr(each, name) for each in some) / 1e6 for name in ("p50", "p95", "p99")]


def show_yardstick(report: Report, where: str, yard: Yardstick, loads: Sequence[tuple[float, float]]) -> None:
    rows = [(name, slo.ttft_ns / 1e6, slo.tpot_ns / 1e6) for name, slo in yard.slos.items()]
    report.table(
        f"{where}: targets, {TTFT_TIMES} and {TPOT_TIMES} x the unloaded median",
        ("class", "TTFT ms", "TPOT ms"),
        rows,
    )
    columns = ("capacity, requests/s", "interactive alone", "load in bursts, x capacity", "least", "most",
               "interactive in bursts", "most ")  # fmt: skip
    total, interactive = [a for a, _ in loads], [b for _, b in loads]
    spreads = (median(total), min(total), max(total), median(interactive), max(interactive))
    report.table(f"{where}: capacity and load", columns, [(yard.capacity_per_s, yard.interactive_per_s, *spreads)])


def show_rounds(report: Report, where: str, found: Mapping[str, Sequence[outcomes.Report]]) -> None:
    rows = [
        (
            name, number, each.output_tokens_per_s, each.duration_ns / 1e9, each.num_steps, each.num_preemptions,
            each.view.parks, each.recomputed_tokens, each.view.swapped_out_bytes / 1e6, dict(each.refusals) or "",
        )
        for name, reports in found.items()
        for number, each in enumerate(reports, start=1)
    ]  # fmt: skip
    columns = ("composer", "round", "tokens/s", "seconds", "steps", "preempted", "parked", "recomputed tokens",
               "swapped out MB", "refused")  # fmt: skip
    report.table(f"{where}: rounds", columns, rows)


def claim(
    report: Report,
    where: str,
    shape: Shape,
    yard: Yardstick,
    found: Mapping[str, Sequence[outcomes.Report]],
    most_interactive: float,
) -> None:
    """Ratios are taken round by round."""

    def ratio(a: str, b: str) -> float:
        pairs = zip(found[a], found[b], strict=False)  # static: in the first round only
        return median(one.output_tokens_per_s / other.output_tokens_per_s for one, other in pairs)

    def attained(name: str) -> float:
        classes: list[Figures] = [each.by_class()[INTERACTIVE] for each in found[name]]
        return median(each.attainment(yard.slos[INTERACTIVE]) for each in classes)

    claims = [
        ("tokens/s, value / static", ratio(VALUE, STATIC), STATIC_TARGET, True),
        ("tokens/s, value / fcfs", ratio(VALUE, FCFS), FCFS_TARGET, True),
    ]
    if shape is not QUICK:  # whose burst is too short to tell
        claims += [
            ("interactive attainment, value", attained(VALUE), KEPT_TARGET, True),
            ("interactive attainment, fcfs", attained(FCFS), LOST_TARGET, False),
            ("interactive load in the worst burst, x capacity", most_interactive, LOAD_TARGET, False),
        ]
    for name, value, target, least in claims:
        ok = value >= target if least else value <= target
        report.claim(f"{where}: {name}", round(value, 3), f"{'>=' if least else '<='} {target:g}", ok)


if __name__ == "__main__":
    main()
