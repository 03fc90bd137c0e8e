"""Where does the time of a step go: how many ms, and what share, does each of its parts take?

Steps of 1, 4, 16 and 64 decodes at a context of about 160 tokens, and of one prompt of 512 tokens, through the engine's
own step loop. The functions that do the parts are wrapped with timers from outside; a part within another counts only
in the inner one. Where the engine computes all layers in one call of its kernels, they are called part by part to be
told apart. "as served" is the same steps with nothing wrapped or replaced, in rounds that take turns with the timed
ones: it says what the timers and the calls cost. The claim is a share of the shorter of both.

In an engine the frame is made on the I/O thread; here it is made within the turn, since both share the machine's cores.
Times are means over the faster half of a case's steps, so that what else the machine did is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from common import Report, arguments
from engine import Engine, Run
from parts import Parts
from shoal.core.scheduler import Scheduler
from shoal.engine.loop import Turn as LoopTurn
from shoal.wire import codec
from shoal.wire.messages import Frame
from shoal.workload.trace import Row, Trace

CONTEXT, BLOCK, PROMPT = 160, 16, 512
TARGET_PERCENT = 5.0
LAYER = {"qkv": "norm, qkv", "output": "output", "gate_up": "mlp", "down": "mlp"}  # parts by field of a model's layer
MODEL = ("embedding", "norm, qkv", "attention", "output", "mlp", "model, rest", "logits", "draw")
OUTSIDE = ("plan", "apply", "view", "batch", "store sampled", "launch, collect", "loop, updates", "frame")

Turn = dict[str, float]  # seconds of each part
Wrap = Callable[[Parts, Engine, "Frames"], None]
Case = tuple[Trace, Callable[[Run, int], bool]]  # the load, and whether step number n of its run belongs to the case


def main() -> None:
    report = Report("step_breakdown", arguments(__doc__.splitlines()[0]).parse_args())
    num_rounds, count = (2, 24) if report.quick else (5, 64)
    cases = {f"{num_seqs} decodes": decodes(num_seqs, count) for num_seqs in (1, 4, 16, 64)}
    cases[f"prompt of {PROMPT}"] = prompts(count // 4)
    engine = Engine(max_num_seqs=64)
    served: dict[str, list[Turn]] = {name: [] for name in cases}
    timed: dict[str, list[Turn]] = {name: [] for name in cases}
    for _ in range(num_rounds):
        for found, wrap in ((served, watch_frames), (timed, watch)):
            for name, case in cases.items():
                found[name] += measure(engine, wrap, *case)
    means = {name: by_part(faster_half(turns)) for name, turns in timed.items()}
    wholes = {name: fmean(map(total, faster_half(turns))) for name, turns in served.items()}
    show(report, means, wholes)
    parts = means["16 decodes"]
    outside = 100 * sum(parts[part] for part in OUTSIDE) / min(wholes["16 decodes"], sum(parts.values()))
    ok = outside <= TARGET_PERCENT
    report.claim("outside the model, % of a step of 16 decodes", round(outside, 1), f"<= {TARGET_PERCENT:g}", ok)
    report.finish()


def show(report: Report, means: Mapping[str, Mapping[str, float]], wholes: Mapping[str, float]) -> None:
    never = [part for part in (*MODEL, *OUTSIDE) if not any(each[part] for each in means.values())]
    assert not never, f"never called: {never}; the engine does these parts in other functions than watch() wraps"
    lines = {part: [each[part] for each in means.values()] for part in (*MODEL, *OUTSIDE)}
    lines["outside the model"] = [sum(each[part] for part in OUTSIDE) for each in means.values()]
    lines["all"] = [sum(each.values()) for each in means.values()]
    lines["as served"] = list(wholes.values())
    columns = ("part", *means)
    report.table("ms per step", columns, [(name, *(1e3 * value for value in row)) for name, row in lines.items()])
    shares = [(name, *(100 * a / b for a, b in zip(row, lines["all"], strict=True))) for name, row in lines.items()]
    report.table("% of all", columns, shares)


# -- cases -------------------------------------------------------------------------------------------------------------


def decodes(num_seqs: int, count: int) -> Case:
    """`num_seqs` requests at once; at the middle of `count` steps their contexts are 160 tokens on average.

    Prompts differ in length, so that in each step about one in 16 needs a new block.
    """
    prompt = CONTEXT - count // 2 - BLOCK // 2
    rows = [Row(0, prompt + 7 * number % BLOCK, count + num_seqs) for number in range(num_seqs)]

    def belongs(run: Run, number: int) -> bool:
        slices = run.steps[number].slices
        return len(slices) == num_seqs and all(part.count == 1 for part in slices)

    return Trace(tuple(rows), num_seqs), belongs


def prompts(count: int) -> Case:
    rows = [Row(0, PROMPT, 1)] * count
    return Trace(tuple(rows), 1), lambda run, number: run.steps[number].slices[0].count == PROMPT


def measure(engine: Engine, wrap: Wrap, load: Trace, belongs: Callable[[Run, int], bool]) -> list[Turn]:
    """The turns that belong to a case."""
    parts, frames = Parts("loop, updates"), Frames()

    def on_turn(turn: LoopTurn) -> None:
        if turn.step is not None:
            frames.encode(turn)
            parts.end_turn()

    wrap(parts, engine, frames)
    try:
        parts.start_turn()
        run = engine.serve(load, seed=1, on_turn=on_turn, max_step_ns=10**12, max_prefill_chunk=PROMPT)
    finally:
        parts.unwrap()
    assert len(run.steps) == len(parts.turns)
    return [turn for number, turn in enumerate(parts.turns) if number and belongs(run, number)]


def total(turn: Turn) -> float:
    return sum(turn.values())


def faster_half(turns: list[Turn]) -> list[Turn]:
    return sorted(turns, key=total)[: (len(turns) + 1) // 2]


def by_part(turns: Sequence[Turn]) -> dict[str, float]:
    return {part: fmean(turn.get(part, 0.0) for turn in turns) for part in (*MODEL, *OUTSIDE)}


class Frames:
    """Encodes a frame of each turn, as a session does."""

    def encode(self, turn: LoopTurn) -> None:
        for updates in turn.updates.values():
            codec.encode(Frame(view=turn.view, updates=updates))


# -- where the parts are -----------------------------------------------------------------------------------------------


def watch_frames(parts: Parts, engine: Engine, frames: Frames) -> None:
    parts.wrap(frames, "encode", "frame")


def watch(parts: Parts, engine: Engine, frames: Frames) -> None:
    """The only place that knows which function of the engine does what."""
    from shoal.engine import runner as module
    from shoal.engine.model.layers import LayersPartByPart

    watch_frames(parts, engine, frames)
    runner: Any = engine.runner
    model = runner._model
    for name in ("plan", "apply", "view"):
        parts.wrap(Scheduler, name, name)
    for name in ("launch", "collect"):
        parts.wrap(runner, name, "launch, collect")
    for name in ("take_in", "build"):
        parts.wrap(runner._table, name, "batch")
    parts.wrap(runner._table, "store_sampled", "store sampled")
    parts.wrap(module, "sample", "draw")
    parts.wrap_methods(runner._attention, "attention")
    parts.wrap_methods(runner._store, "attention")
    weights = model.weights
    parts.replace(runner, "_layers", LayersPartByPart(weights.layers, runner._attention))
    parts.wrap(runner, "_layers", "model, rest")
    parts.wrap(model, "logits", "logits")
    parts.wrap(weights.embedding, "rows", "embedding")
    for layer in weights.layers:
        for field, part in LAYER.items():
            parts.wrap_methods(getattr(layer, field), part)


if __name__ == "__main__":
    main()
