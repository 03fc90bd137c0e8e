"""What `shoal plan` shows: tables for people, documents for programs, a configuration for `shoal serve`.

Tables give sizes in GB (10^9 bytes), documents in bytes; times in documents are seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from shoal.planner import catalogue, choose, explain, kv, weights
from shoal.planner.units import count, gb, ms, size

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from shoal.planner.catalogue import Gpu
    from shoal.planner.choose import Option, Plan, Wanted
    from shoal.planner.fleet import Fleet
    from shoal.planner.model import Model
    from shoal.planner.weights import Precision

Document = dict[str, Any]
SHOWN = 8


# -- the model alone ---------------------------------------------------------------------------------------------------


def needs(model: Model, wanted: Wanted, precision: Precision, kv_dtype: str) -> Group:
    rows = [
        (gpu.name, f"{gpu.memory_bytes / 1e9:.1f}", "-" if number is None else str(number), gpu.title)
        for gpu in catalogue.gpus().values()
        for number in (explain.smallest(model, gpu, wanted, precision, kv_dtype),)
    ]
    fewest = _table(
        f"fewest GPUs that hold it, with one sequence of {wanted.context:,} tokens", "GPU", "GB", "GPUs", ""
    )
    for row in rows:
        fewest.add_row(*row)
    return _stacked(_model_table(model, precision, kv_dtype), fewest)


def needs_document(model: Model, wanted: Wanted, precision: Precision, kv_dtype: str) -> Document:
    fewest = {gpu.name: explain.smallest(model, gpu, wanted, precision, kv_dtype) for gpu in catalogue.gpus().values()}
    return {"model": _model_document(model, precision, kv_dtype), "context": wanted.context, "fewest_gpus": fewest}


def _model_table(model: Model, precision: Precision, kv_dtype: str) -> Table:
    parts = weights.parts(model, precision)
    kind = explain.format_name(precision)
    table = _table(f"{model.name}: weights in {kind}, KV in {kv_dtype}", "part", "parameters", "GB")
    for name, part in parts.items():
        if part.parameters:
            table.add_row(name, count(part.parameters), gb(part.num_bytes))
    total = weights.total_bytes(parts)
    table.add_row("weights", count(weights.parameters(model)), f"{gb(total)} ({total / 2**30:.1f} GiB)")
    groups = kv.groups(model, kv_dtype)
    table.add_row("KV of a token", "", f"{size(kv.token_bytes(groups))} ({kv.token_bytes(groups) / 1024:.1f} KiB)")
    if any(group.window for group in groups):
        windowed = ", ".join(f"{group.num_layers} layers: {group.window:,}" for group in groups if group.window)
        table.add_row("sliding windows", "", f"{windowed} tokens")
    return table


def _model_document(model: Model, precision: Precision, kv_dtype: str) -> Document:
    parts = weights.parts(model, precision)
    return {
        "name": model.name,
        "architecture": model.architecture,
        "dtype": precision.dtype,
        "quantization": precision.quantization.name if precision.quantization else None,
        "kv_dtype": kv_dtype,
        "parameters": weights.parameters(model),
        "weight_bytes": weights.total_bytes(parts),
        "weight_bytes_by_part": {name: part.num_bytes for name, part in parts.items()},
        "kv_bytes_per_token": kv.token_bytes(kv.groups(model, kv_dtype)),
        "max_context": model.max_context,
    }


# -- layouts -----------------------------------------------------------------------------------------------------------


def layouts(plan: Plan, *, show_all: bool = False) -> Group:
    from rich.text import Text

    parts: list[Any] = [_model_table(plan.model, plan.precision, plan.kv_dtype)]
    options = plan.options if show_all else _interesting(plan)
    title = f"layouts on {_where(plan)}: {_load(plan.wanted)}; per GPU, GB"
    columns = ("layout", "replicas", "GPUs", "weights", "activations", "KV", "KV tokens", "holds")
    table = _table(title, *columns, "TTFT ms", "TPOT ms", "tokens/s", "")
    for option in options:
        table.add_row(*_cells(option, plan), style="bold" if option is plan.chosen else "")
    parts.append(table)
    sentences = explain.reasons(plan)
    text = Text()
    for number, sentence in enumerate(sentences):
        text.append(f"\n  {sentence}" if number else sentence, style="" if number else "bold")
    parts += [text, Text("\n".join(_notes(plan)), style="dim")]
    return _stacked(*parts)


def _interesting(plan: Plan) -> list[Option]:
    """The best ones, and of those that do not fit the usual ones."""
    fitting = [option for option in plan.options if option.fits][:SHOWN]
    if plan.chosen is not None and plan.chosen not in fitting:
        fitting.append(plan.chosen)
    return fitting + [option for option in plan.options if not option.fits and option.usual]


def _cells(option: Option, plan: Plan) -> list[str]:
    layout, memory, found = option.layout, option.memory, option.forecast
    cells = [str(layout), str(layout.dp), str(layout.gpus), gb(memory.weights), gb(memory.activations)]
    if found is None:
        missing = gb(memory.pool) if memory.pool > 0 else "-"
        return [*cells, missing, f"{memory.pool_tokens:,}", "-", "-", "-", "-", "does not fit"]
    note = "recommended" if option is plan.chosen else ""
    note = "; ".join(filter(None, (note, *option.misses)))
    times = (ms(found.ttft_s), ms(found.tpot_s), f"{option.tokens_per_s:,.0f}")
    return [*cells, gb(memory.pool), f"{memory.pool_tokens:,}", f"{option.holds:,}", *times, note]


def _where(plan: Plan) -> str:
    gpu, cluster = plan.gpu, plan.cluster
    text = f"{cluster.gpus_per_node} x {gpu.name}" + (f" x {cluster.nodes} nodes" if cluster.nodes > 1 else "")
    links = plan.within.title + (f"; {plan.between.title}" if plan.between and cluster.nodes > 1 else "")
    return f"{text} ({links})"


def _load(wanted: Wanted) -> str:
    return (
        f"{wanted.concurrency:,} requests at once, prompts of {wanted.load.prompt:,} and answers of "
        f"{wanted.load.output:,} tokens, context {wanted.context:,}"
    )


def _notes(plan: Plan) -> list[str]:
    gpu = plan.gpu
    memory = (plan.chosen or plan.options[0]).memory if plan.options else None
    notes = [
        f"Times are estimates: {gpu.bytes_share:.0%} of {gpu.bytes_per_s / 1e12:.3g} TB/s, {gpu.flops_share:.0%} of "
        f"the dense matrix rate, {1e6 * gpu.step_s:.0f} us a step ({gpu.source}).".replace("%", " %")
    ]
    if memory is not None:
        notes.append(
            f"{gb(memory.workspace)} GB of each GPU stay free for the driver's context, collectives and what an "
            f"allocator loses (--gpu-memory-utilization {memory.utilization:g})."
        )
    if plan.chosen is not None:
        host = choose.host_tier(plan, plan.chosen)
        notes.append(f"A host tier that parks all that runs on a replica takes {size(host)} (engine.host_cache_bytes).")
    if reason := _not_shoals(plan.model):
        notes.append(reason)
    return notes


def _not_shoals(model: Model) -> str:
    from shoal.engine.model.registry import ARCHITECTURES

    if model.architecture in ARCHITECTURES:
        return ""
    return f"shoal's engine does not serve {model.architecture}; it serves {', '.join(ARCHITECTURES)}."


def layouts_document(plan: Plan) -> Document:
    return {
        "model": _model_document(plan.model, plan.precision, plan.kv_dtype),
        "gpu": _gpu_document(plan.gpu),
        "gpus_per_node": plan.cluster.gpus_per_node,
        "nodes": plan.cluster.nodes,
        "wanted": _wanted_document(plan.wanted),
        "layouts": [_option_document(option, plan) for option in plan.options],
        "recommended": None if plan.chosen is None else _option_document(plan.chosen, plan),
        "reasons": explain.reasons(plan),
        "notes": _notes(plan),
    }


def _option_document(option: Option, plan: Plan) -> Document:
    layout, memory, found = option.layout, option.memory, option.forecast
    document: Document = {
        "tp": layout.tp,
        "pp": layout.pp,
        "cp": layout.cp,
        "replicas": layout.dp,
        "gpus": layout.gpus,
        "fits": option.fits,
        "usual": option.usual,
        "weight_bytes": memory.weights,
        "activation_bytes": memory.activations,
        "workspace_bytes": memory.workspace,
        "kv_pool_bytes": max(0, memory.pool),
        "kv_pool_tokens": memory.pool_tokens,
        "max_context": memory.max_context(plan.model.max_context),
    }
    if found is not None:
        document |= {
            "holds": option.holds,
            "running_per_replica": found.running,
            "ttft_s": found.ttft_s,
            "tpot_s": found.tpot_s,
            "tokens_per_s": option.tokens_per_s,
            "bubble": found.bubble,
            "host_tier_bytes_per_replica": choose.host_tier(plan, option),
            "misses": list(option.misses),
        }
    return document


def _gpu_document(gpu: Gpu) -> Document:
    return {
        "name": gpu.name,
        "title": gpu.title,
        "memory_bytes": gpu.memory_bytes,
        "bytes_per_s": gpu.bytes_per_s,
        "flops_per_s": dict(gpu.flops_per_s),
        "bytes_share": gpu.bytes_share,
        "flops_share": gpu.flops_share,
        "source": gpu.source,
        "url": gpu.url,
    }


def _wanted_document(wanted: Wanted) -> Document:
    return {
        "context": wanted.context,
        "prompt": wanted.load.prompt,
        "output": wanted.load.output,
        "concurrency": wanted.concurrency,
        "ttft_s": wanted.ttft_s or None,
        "tpot_s": wanted.tpot_s or None,
        "max_num_seqs": wanted.batch.max_seqs,
        "max_num_batched_tokens": wanted.batch.max_tokens,
        "block_size": wanted.batch.block_tokens,
        "gpu_memory_utilization": wanted.utilization,
        "kv_allocator": wanted.allocator,
    }


# -- fleets ------------------------------------------------------------------------------------------------------------


def fleets(
    model: Model,
    found: Sequence[Fleet],
    kinds: Iterable[Gpu],
    rate: float,
    wanted: Wanted,
    precision: Precision,
    kv_dtype: str,
) -> Group:
    from rich.text import Text

    title = (
        f"the smallest fleet of each kind for {rate:g} requests/s of {wanted.load.prompt:,} + {wanted.load.output:,} "
        f"tokens, context {wanted.context:,}{_targets(wanted)}"
    )
    columns = ("GPU", "GPUs", "nodes", "replica", "replicas", "requests/s each", "running each")
    table = _table(title, *columns, "TTFT P99 ms", "TPOT ms", "host memory per node")
    for fleet in found:
        table.add_row(
            fleet.gpu.name,
            str(fleet.gpus),
            str(fleet.nodes),
            str(fleet.layout),
            str(fleet.layout.dp),
            f"{rate / fleet.layout.dp:.3g} of {fleet.rate_per_replica:.3g}",
            str(fleet.forecast.running),
            ms(fleet.forecast.ttft_s),
            ms(fleet.forecast.tpot_s),
            f"{fleet.host_bytes_per_node / 2**30:.0f} GiB",
        )
    cannot = _cannot(found, kinds)
    lines = _fleet_reasons(found, wanted)
    if cannot:
        lines.append(f"Cannot at any size: {', '.join(cannot)}.")
    return _stacked(_model_table(model, precision, kv_dtype), table, Text("\n".join(lines)))


def _targets(wanted: Wanted) -> str:
    targets = [("TTFT", wanted.ttft_s), ("TPOT", wanted.tpot_s)]
    return "".join(f", {name} at most {ms(value)} ms" for name, value in targets if value)


def _fleet_reasons(found: Sequence[Fleet], wanted: Wanted) -> list[str]:
    from shoal.planner.fleet import HEADROOM

    if not found:
        return ["No kind of GPU that was asked about keeps these targets, whatever their number."]
    best = found[0]
    lines = [
        f"{best.gpus} x {best.gpu.name} as {best.layout.dp} x {best.layout} is the smallest: a replica keeps the "
        f"targets up to {best.rate_per_replica:.3g} requests/s and is given at most {HEADROOM:.0%} of that.".replace(
            "%", " %"
        ),
        "Host memory: for a host tier that parks all that runs on a node's replicas, in pinned buffers, which torch "
        "rounds up to powers of two; beside what the system and the files take.",
    ]
    if wanted.load.context < wanted.context:
        lines.append(f"Every replica also holds a single sequence of {wanted.context:,} tokens.")
    return lines


def _cannot(found: Sequence[Fleet], kinds: Iterable[Gpu]) -> list[str]:
    can = {fleet.gpu.name for fleet in found}
    return [gpu.name for gpu in kinds if gpu.name not in can]


def fleets_document(
    model: Model,
    found: Sequence[Fleet],
    kinds: Iterable[Gpu],
    rate: float,
    wanted: Wanted,
    precision: Precision,
    kv_dtype: str,
) -> Document:
    return {
        "model": _model_document(model, precision, kv_dtype),
        "rate_per_s": rate,
        "wanted": _wanted_document(wanted),
        "fleets": [
            {
                "gpu": fleet.gpu.name,
                "gpus": fleet.gpus,
                "nodes": fleet.nodes,
                "tp": fleet.layout.tp,
                "pp": fleet.layout.pp,
                "replicas": fleet.layout.dp,
                "highest_rate_per_replica": fleet.rate_per_replica,
                "running_per_replica": fleet.forecast.running,
                "ttft_p99_s": fleet.forecast.ttft_s,
                "tpot_s": fleet.forecast.tpot_s,
                "kv_pool_bytes": fleet.memory.pool,
                "host_tier_bytes_per_node": fleet.host_bytes_per_node,
            }
            for fleet in found
        ],
        "cannot": _cannot(found, kinds),
        "reasons": _fleet_reasons(found, wanted),
    }


# -- what is known -----------------------------------------------------------------------------------------------------


def known() -> Group:
    models = _table("models", "name", "parameters", "source")
    for name, row in catalogue.models().items():
        models.add_row(name, count(row["parameters"]), row["source"])
    gpus = _table("GPUs: dense rates", "name", "GB", "TB/s", "16-bit TFLOP/s", "fp8 TFLOP/s", "link", "source")
    for gpu in catalogue.gpus().values():
        rates = gpu.flops_per_s
        plain, fp8 = rates.get("bfloat16", rates["float16"]), rates.get("fp8")
        speeds = (f"{gpu.bytes_per_s / 1e12:.3g}", f"{plain / 1e12:.0f}", f"{fp8 / 1e12:.0f}" if fp8 else "-")
        gpus.add_row(gpu.name, f"{gpu.memory_bytes / 1e9:.1f}", *speeds, gpu.link, gpu.source)
    links = _table("links: per GPU and direction", "name", "GB/s", "us", "what", "source")
    for link in catalogue.links().values():
        links.add_row(link.name, f"{link.bytes_per_s / 1e9:.3g}", f"{1e6 * link.latency_s:g}", link.title, link.source)
    return _stacked(models, gpus, links)


def known_document() -> Document:
    return {
        "models": catalogue.models(),
        "gpus": {name: _gpu_document(gpu) for name, gpu in catalogue.gpus().items()},
        "links": {
            name: {"title": link.title, "bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s, "url": link.url}
            for name, link in catalogue.links().items()
        },
    }


# -- a configuration ---------------------------------------------------------------------------------------------------


def configuration(plan: Plan, model_name: str) -> str:
    """YAML for `shoal serve --config` on each node. Raises ValueError where this version cannot start the layout."""
    from shoal import config

    option, wanted = plan.chosen, plan.wanted
    assert option is not None
    layout = option.layout
    if reason := _cannot_be_started(plan):
        raise ValueError(f"--emit: {reason}")
    engine: Document = {
        "device": "cuda",
        "dtype": plan.precision.dtype,
        "max_model_len": wanted.context,
        "max_num_seqs": wanted.batch.max_seqs,
        "max_num_batched_tokens": wanted.batch.max_tokens,
        "block_size": wanted.batch.block_tokens,
        "gpu_memory_utilization": wanted.utilization,
        "host_cache_bytes": choose.host_tier(plan, option),
    }
    engine |= {field: value for field, value in _ranks(plan).items() if value > 1}
    if layout.pp > 1:
        engine["steps_in_flight"] = layout.pp
    values = {
        "model": {"name": model_name},
        "engine": engine,
        "cluster": {"replicas": -(-layout.dp // plan.cluster.nodes)},
    }
    config.load(None, {f"{section}.{key}": value for section, keys in values.items() for key, value in keys.items()})
    return _yaml(plan, values)


def _ranks(plan: Plan) -> dict[str, int]:
    assert plan.chosen is not None
    layout = plan.chosen.layout
    return {
        "tensor_parallel_size": layout.tp,
        "pipeline_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
    }


def _cannot_be_started(plan: Plan) -> str:
    from shoal import config

    assert plan.chosen is not None
    layout, cluster, kind = plan.chosen.layout, plan.cluster, plan.precision.quantization
    if reason := _not_shoals(plan.model):
        return reason
    if kind is not None:
        return f"the weights are {kind.name}; on GPUs shoal's engine has bfloat16, float16 and float32"
    if plan.kv_dtype != plan.precision.dtype:
        return f"--kv-dtype is {plan.kv_dtype}; shoal's engine keeps keys and values as {plan.precision.dtype}"
    if layout.ranks > cluster.gpus_per_node:
        return f"{layout} is larger than a node; an engine's ranks are on one machine"
    known = {row.name for row in config.rows()}
    for field, value in _ranks(plan).items():
        if value > 1 and f"engine.{field}" not in known:
            return f"{layout} needs engine.{field}, which this version does not have"
    return ""


def _yaml(plan: Plan, values: Document) -> str:
    import yaml

    lines = [f"# Planned by `shoal plan` for {_where(plan)}:", f"# {_load(plan.wanted)}.", "#"]
    lines += [f"# {sentence}" for sentence in explain.reasons(plan)]
    if plan.cluster.nodes > 1:
        lines.append(f"# The same file on each of the {plan.cluster.nodes} nodes.")
    return "\n".join(lines) + "\n\n" + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


# -- tables ------------------------------------------------------------------------------------------------------------


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for number, column in enumerate(columns):
        words = number == 0 or column in ("", "source", "what", "replica", "link")
        table.add_column(column, justify="left" if words else "right", overflow="fold")
    return table


def _stacked(*parts: Any) -> Group:
    """With an empty line after each; a table's title is not folded to its width."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    shown: list[Any] = []
    for part in parts:
        if isinstance(part, Table):
            shown.append(Text(str(part.title), style="bold"))
            part.title = None
        shown += [part, ""]
    return Group(*shown)
