"""Why a layout was chosen, why others were not, and where nothing fits: what would."""

from __future__ import annotations

from dataclasses import replace

from shoal.planner import layouts, weights
from shoal.planner.catalogue import Gpu, gpus
from shoal.planner.choose import Option, Plan, Wanted, order
from shoal.planner.layouts import Cluster
from shoal.planner.memory import rank_memory
from shoal.planner.model import FORMATS, Model
from shoal.planner.units import gb, percent
from shoal.planner.weights import Precision


def reasons(result: Plan) -> list[str]:
    chosen = result.chosen
    if chosen is None:
        return refusal(result)
    lines = [f"{described(chosen, result.cluster)}. {_first_reason(result, chosen)}"]
    lines += [line for option in _notable(result, chosen) if (line := _against(result, chosen, option))]
    if chosen.misses:
        lines.append(f"Nothing on these GPUs serves all that is asked: {'; '.join(chosen.misses)}.")
    return lines


def described(option: Option, cluster: Cluster) -> str:
    layout = option.layout
    where = ""
    if cluster.nodes > 1 and layout.ranks <= cluster.gpus_per_node:
        where = " inside each node" if layout.ranks == cluster.gpus_per_node else " inside a node"
    elif cluster.nodes > 1:
        where = f" over {cluster.spans(layout.ranks)} nodes"
    replicas = "1 replica" if layout.dp == 1 else f"{layout.dp} replicas"
    return f"{layout}{where}, {replicas}"


def _first_reason(result: Plan, chosen: Option) -> str:
    """Why not a smaller replica: fewer ranks would be the first thing to try."""
    smaller = [o for o in result.options if o.layout.ranks < chosen.layout.ranks and not o.fits and o.usual]
    if not chosen.usual:
        usual = [option for option in result.options if option.usual and option.fits]
        if not usual:
            return f"No layout within a node holds {result.model.name}: {_lack(result, _largest_usual(result))}."
        best = min(usual, key=order)
        if len(best.misses) > len(chosen.misses):
            return f"The usual {best.layout} x {best.layout.dp} does not serve what is asked: {'; '.join(best.misses)}."
        gain = chosen.tokens_per_s / best.tokens_per_s - 1
        return f"{percent(gain)} tokens/s against the usual {best.layout} x {best.layout.dp}."
    if smaller:
        largest = max(smaller, key=lambda option: option.layout.ranks)
        return f"The most tokens/s of what is usual; {largest.layout} is too small: {_lack(result, largest)}."
    return "The most tokens/s of what is usual."


def _largest_usual(result: Plan) -> Option:
    return max((option for option in result.options if option.usual), key=lambda option: option.layout.tp)


def _lack(result: Plan, option: Option) -> str:
    memory = option.memory
    usable = int(memory.memory * memory.utilization)
    weights_text = f"weights take {gb(memory.weights)} GB"
    if memory.weights >= usable:
        return f"{weights_text} of the {gb(usable)} GB that a GPU gives"
    if memory.pool <= 0:
        return f"{weights_text} and activations {gb(memory.activations)} of the {gb(usable)} GB that a GPU gives"
    longest = memory.max_context(result.wanted.context)
    return f"{gb(memory.pool)} GB are left for KV, {longest:,} tokens of the {result.wanted.context:,} asked for"


def _notable(result: Plan, chosen: Option) -> list[Option]:
    """The best of each kind that people ask about: more TP, less TP, TP across nodes, PP, CP."""
    kinds = (
        lambda o: o.usual and o.layout.tp < chosen.layout.tp,
        lambda o: o.usual and o.layout.tp > chosen.layout.tp,
        lambda o: o.layout.tp > result.cluster.gpus_per_node and o.layout.pp == 1 and o.layout.cp == 1,
        lambda o: o.layout.pp > 1 and o.layout.cp == 1,
        lambda o: o.layout.cp > 1 and o.layout.pp == 1,
    )
    picked = []
    for kind in kinds:
        found = next((o for o in result.options if o.fits and o.layout != chosen.layout and kind(o)), None)
        if found is not None and found not in picked:
            picked.append(found)
    return picked


def _against(result: Plan, chosen: Option, other: Option) -> str:
    change = other.tokens_per_s / chosen.tokens_per_s - 1
    what = _difference(result, chosen, other)
    missing = f"; {other.misses[0]}" if other.misses and not chosen.misses else ""
    assert other.forecast is not None and chosen.forecast is not None
    tpot = other.forecast.tpot_s / chosen.forecast.tpot_s - 1
    return f"{other.layout} x {other.layout.dp} {what}: {percent(change)} tokens/s, {percent(tpot)} TPOT{missing}."


def _difference(result: Plan, chosen: Option, other: Option) -> str:
    layout, mine, layers = other.layout, chosen.layout, result.model.num_layers
    if layout.tp > result.cluster.gpus_per_node:
        assert result.between is not None
        return f"would send 2 x {layers} all-reduces a token over {result.between.title}"
    if layout.pp > 1:
        assert other.forecast is not None
        each = 2 * layers // layout.pp
        return f"would read each weight once per microbatch and wait {other.forecast.bubble:.0%} of the time".replace(
            "%", " %"
        ) + (f", with {each} all-reduces a stage over TP={layout.tp}" if layout.tp > 1 else "")
    if layout.cp > 1:
        longest = other.memory.max_context(1 << 40)
        return f"would hold {longest:,} tokens of one sequence, and compute queries, keys and values {layout.cp} times"
    if layout.tp > mine.tp:
        return f"would meet 2 x {layers} times a token over {result.within.title}"
    return (
        f"would read {gb(other.memory.weights)} GB of weights a step on each GPU instead of {gb(chosen.memory.weights)}"
    )


# -- where nothing fits ------------------------------------------------------------------------------------------------


def refusal(result: Plan) -> list[str]:
    """What is wrong, and what would fit."""
    model, gpu, cluster = result.model, result.gpu, result.cluster
    total = weights.total_bytes(weights.parts(model, result.precision))
    held = f"{gb(gpu.memory_bytes)} GB ({gpu.memory_bytes / 2**30:.1f} GiB)"
    one = cluster.gpus == 1
    line = (
        f"{model.name} needs {gb(total)} GB ({total / 2**30:.1f} GiB) for its weights alone in "
        f"{format_name(result.precision)}; "
        + (f"one {gpu.title} with {held} does" if one else f"{cluster.gpus} {gpu.title} with {held} each do")
        + " not serve it"
    )
    if result.options:
        nearest = max(result.options, key=lambda option: (option.memory.pool, option.layout.tp))
        line += f": with {nearest.layout} {_lack(result, nearest)}"
    fitting = what_fits(result)
    fits = "Fits: " + "; ".join(fitting) + "." if fitting else "Nothing in the catalogue holds it."
    return [f"{line}.", fits]


def what_fits(result: Plan) -> list[str]:
    """The smallest numbers of this GPU and of others, and this many GPUs with smaller weights."""
    found = []
    wanted = replace(result.wanted, concurrency=1)
    for gpu in sorted(gpus().values(), key=lambda each: (each.name != result.gpu.name, each.name)):
        number = smallest(result.model, gpu, wanted, result.precision, result.kv_dtype)
        if number is not None:
            found.append(f"{number} x {gpu.name}")
    if result.precision.quantization is None:
        for name in ("fp8", "int4"):
            smaller = Precision(result.precision.dtype, FORMATS[name])
            if name == "fp8" and "fp8" not in result.gpu.flops_per_s:
                continue
            number = smallest(result.model, result.gpu, wanted, smaller, result.kv_dtype)
            if number is not None and number <= result.cluster.gpus:
                found.insert(1, f"{number} x {result.gpu.name} with --quantization {name}")
    return found[:6]


def smallest(model: Model, gpu: Gpu, wanted: Wanted, precision: Precision, kv_dtype: str) -> int | None:
    """GPUs of one node, else of whole nodes, that hold one sequence of the context; None: more than 8 nodes."""
    for tp, pp in _sizes(model, gpu.per_node):
        memory = rank_memory(
            model,
            precision,
            kv_dtype,
            wanted.batch,
            gpu.memory_bytes,
            utilization=wanted.utilization,
            tp=tp,
            stages=layouts.stages(model, pp),
            allocator=wanted.allocator,
        )
        if memory.pool > 0 and memory.max_context(wanted.context) >= wanted.context:
            return tp * pp
    return None


def _sizes(model: Model, per_node: int) -> list[tuple[int, int]]:
    within = [tp for tp in layouts.allowed_tp(model) if tp <= per_node]
    return [(tp, 1) for tp in within] + [(within[-1], pp) for pp in range(2, min(8, model.num_layers) + 1)]


def format_name(precision: Precision) -> str:
    return precision.dtype if precision.quantization is None else precision.quantization.name
