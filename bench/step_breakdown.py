"""Where does the time of a step go: how many ms, and what share, does each of its parts take?

Steps of 1, 4, 16 and 64 decodes at a context of about 160 tokens, and of one prompt of 512 tokens, through the engine's
own step loop. The functions that do the parts are wrapped with timers from outside; a part within another counts only
in the inner one. "all, no timers" is the same steps before anything was wrapped, so it says what the timers cost.

In an engine the frame is made on the I/O thread; here it is made within the turn, since both share the machine's cores.
Times are means over the steps between the quarters of each case: a step that something else held up is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from common import Report, arguments
from engine import Engine, Run
from parts import Parts
from shoal.core.scheduler import Scheduler
from shoal.engine.loop import Turn
from shoal.wire import codec
from shoal.wire.messages import Frame
from shoal.workload.trace import Row, Trace

CONTEXT, BLOCK, PROMPT = 160, 16, 512
TARGET_PERCENT = 5.0
LAYER = {"qkv": "norm, qkv", "output": "output", "gate_up": "mlp", "down": "mlp"}  # parts by field of a model's layer
MODEL = ("embedding", "norm, qkv", "attention", "output", "mlp", "model, rest", "logits", "draw")
OUTSIDE = ("plan", "apply", "view", "batch", "store sampled", "launch, collect", "loop, updates", "frame")

Case = tuple[Trace, Callable[[Run, int], bool]]  # the load, and whether step number n of its run belongs to the case


def main() -> None:
    report = Report("step_breakdown", arguments(__doc__.splitlines()[0]).parse_args())
    count = 32 if report.quick else 160
    cases = {f"{num_seqs} decodes": decodes(num_seqs, count) for num_seqs in (1, 4, 16, 64)}
    cases[f"prompt of {PROMPT}"] = prompts(count // 4)
    engine = Engine(max_num_seqs=64)
    bare = {name: measure(engine, Parts("all but the frame"), *case) for name, case in cases.items()}
    parts = Parts("loop, updates")
    watch(parts, engine)
    timed = {name: measure(engine, parts, *case) for name, case in cases.items()}

    order = (*MODEL, *OUTSIDE)
    means = {name: [mean(turns, part) for part in order] for name, turns in timed.items()}
    never = [part for part, *row in zip(order, *means.values(), strict=True) if not any(row)]
    assert not never, f"never called: {never}; the engine does these parts in other functions than watch() wraps"
    rows = [(part, *(1e3 * each[place] for each in means.values())) for place, part in enumerate(order)]
    rows.append(("all", *(1e3 * sum(each) for each in means.values())))
    rows.append(("all, no timers", *(1e3 * fmean(sum(turn.values()) for turn in turns) for turns in bare.values())))
    report.table("ms per step", ("part", *cases), rows)
    shares = [(part, *(100 * each[place] / sum(each) for each in means.values())) for place, part in enumerate(order)]
    outside = [100 * sum(each[len(MODEL) :]) / sum(each) for each in means.values()]
    report.table("% of a step", ("part", *cases), [*shares, ("outside the model", *outside)])
    at_16 = outside[list(cases).index("16 decodes")]
    ok = at_16 <= TARGET_PERCENT
    report.claim("outside the model, % of a step of 16 decodes", round(at_16, 1), f"<= {TARGET_PERCENT:g}", ok)
    report.finish()


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


def measure(
    engine: Engine, parts: Parts, load: Trace, belongs: Callable[[Run, int], bool]
) -> Sequence[dict[str, float]]:
    """The turns of a case, slow and fast quarters left out."""
    parts.turns.clear()
    parts.start_turn()
    holder = Frames(parts)
    run = engine.serve(load, seed=1, on_turn=holder.on_turn, max_step_ns=10**12, max_prefill_chunk=PROMPT)
    assert len(run.steps) == len(parts.turns)
    turns = [turn for number, turn in enumerate(parts.turns) if number and belongs(run, number)]
    turns.sort(key=lambda turn: sum(turn.values()))
    return turns[len(turns) // 4 : -(len(turns) // 4)]


def mean(turns: Sequence[dict[str, float]], part: str) -> float:
    return fmean(turn.get(part, 0.0) for turn in turns)


class Frames:
    """Encodes a frame of each turn, as a session does, and ends the turn."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        parts.wrap(self, "encode", "frame")

    def encode(self, turn: Turn) -> None:
        for updates in turn.updates.values():
            codec.encode(Frame(view=turn.view, updates=updates))

    def on_turn(self, turn: Turn) -> None:
        if turn.step is not None:
            self.encode(turn)
            self._parts.end_turn()


# -- where the parts are -----------------------------------------------------------------------------------------------


def watch(parts: Parts, engine: Engine) -> None:
    """The only place that knows which function of the engine does what."""
    from shoal.engine import runner as module

    runner: Any = engine.runner
    model = runner._model
    for name in ("plan", "apply", "view"):
        parts.wrap(Scheduler, name, name)
    for name in ("launch", "collect"):
        parts.wrap(runner, name, "launch, collect")
    parts.wrap(runner._table, "build", "batch")
    parts.wrap(runner._table, "store_sampled", "store sampled")
    parts.wrap(module, "sample", "draw")
    parts.wrap_methods(runner._attention, "attention")
    parts.wrap_methods(runner._store, "attention")
    parts.wrap(model, "hidden", "model, rest")
    parts.wrap(model, "logits", "logits")
    weights = model._weights
    parts.wrap(weights.embedding, "rows", "embedding")
    for layer in weights.layers:
        for field, part in LAYER.items():
            parts.wrap_methods(getattr(layer, field), part)


if __name__ == "__main__":
    main()
