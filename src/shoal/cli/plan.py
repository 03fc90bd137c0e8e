"""`shoal plan`: what a model takes on which GPUs, which layout to take and why, or the smallest fleet for a rate."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from shoal.planner.catalogue import Gpu
    from shoal.planner.model import Model
    from shoal.planner.weights import Precision

DEFAULT_LINK = "100gbe"
COLUMNS = 160  # of a table that goes into a pipe or a file

Targets = dict[str, float]


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="a folder with config.json, or a well-known name: `shoal plan --list` shows them"
        ),
    ] = "",
    gpu: Annotated[
        str,
        typer.Option(metavar="NAME", help="a kind of GPU, or a JSON file with its figures; with --rate a list: a,b"),
    ] = "",
    gpus: Annotated[int, typer.Option(min=0, max=1024, help="GPUs of a node  [0: of a usual server]")] = 0,
    nodes: Annotated[int, typer.Option(min=1, max=256, help="nodes")] = 1,
    link: Annotated[str, typer.Option(metavar="NAME", help="between nodes")] = DEFAULT_LINK,
    node_link: Annotated[
        str, typer.Option("--node-link", metavar="NAME", help="between GPUs of a node  [default: the GPU's]")
    ] = "",
    context: Annotated[
        int,
        typer.Option(min=0, metavar="TOKENS", help="longest sequence  [0: 8192, or what prompt and output need]"),
    ] = 0,
    concurrency: Annotated[int, typer.Option(min=1, max=1 << 20, help="requests at once, on all replicas")] = 64,
    prompt: Annotated[int, typer.Option(min=1, metavar="TOKENS", help="usual length of a prompt")] = 1024,
    output: Annotated[int, typer.Option(min=2, metavar="TOKENS", help="usual length of an answer")] = 256,
    slo: Annotated[
        str, typer.Option(metavar="ttft=MS,tpot=MS", help="targets: to the first token, per further token")
    ] = "",
    rate: Annotated[
        float, typer.Option(min=0, metavar="R", help="requests/s: plan the smallest fleet of each kind of GPU")
    ] = 0,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16, float32")] = "auto",
    quantization: Annotated[str, typer.Option(help="auto: as the checkpoint; none, fp8, int8, int4")] = "auto",
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", help="auto: as --dtype; fp8, bfloat16, float16, float32")] = (
        "auto"
    ),
    tp: Annotated[int, typer.Option("--tp", min=0, help="only layouts with so many tensor-parallel ranks")] = 0,
    pp: Annotated[int, typer.Option("--pp", min=0, help="... pipeline stages")] = 0,
    cp: Annotated[int, typer.Option("--cp", min=0, help="... context-parallel ranks")] = 0,
    max_num_seqs: Annotated[int, typer.Option(min=1, max=4096, help="most requests in a step of a replica")] = 256,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=16, max=1 << 20, metavar="TOKENS", help="most tokens in a step")
    ] = 2048,
    block_size: Annotated[int, typer.Option(min=1, max=1024, metavar="TOKENS", help="tokens per KV block")] = 16,
    gpu_memory_utilization: Annotated[
        float, typer.Option(min=0.05, max=0.99, help="share of a GPU's memory for weights, activations and KV")
    ] = 0.9,
    kv_allocator: Annotated[
        str,
        typer.Option(
            help="pages: every layer keeps every block, as shoal does; windows: layers with a sliding window keep that"
        ),
    ] = "pages",
    all_layouts: Annotated[bool, typer.Option("--all", help="show every layout, those that do not fit too")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON, for programs; sizes in bytes")] = False,
    emit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write the plan as a configuration for `shoal serve`; -: print")
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="show the models, GPUs and links that are known")] = False,
) -> None:
    """Plan before buying: does a model fit, on which layout of GPUs, how fast, and what does it take?

    Without --gpu: what the model takes, and the fewest GPUs of each kind that hold it. With --gpu: layouts of tensor,
    pipeline and context parallelism and replicas over GPUs and nodes, their memory, their predicted TTFT, TPOT and
    tokens/s, and which one to take and why. With --rate: the smallest fleet of each kind of GPU that keeps the targets,
    and the main memory to buy for its host tier. GB are 10^9 bytes; times are estimates by a roofline.
    """
    from shoal.cli import plan_view
    from shoal.planner import catalogue, choose, fleet
    from shoal.planner.layouts import Cluster, Layout, why_not_tp
    from shoal.planner.memory import Batch
    from shoal.planner.predict import Load

    if show_list:
        _show(plan_view.known(), plan_view.known_document(), as_json)
        return
    if not model:
        raise typer.BadParameter("MODEL is missing: a folder with config.json, or a name that --list shows")
    try:
        found = catalogue.model(model)
        kinds = [catalogue.gpu(name) for name in gpu.split(",")] if gpu else []
        precision, kv_kind = _formats(found, dtype, quantization, kv_dtype, kinds)
        between = catalogue.link(link)
        within = catalogue.link(node_link) if node_link else None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    targets = _targets(slo)
    if kv_allocator not in ("pages", "windows"):
        raise typer.BadParameter(f"--kv-allocator is {kv_allocator!r}; allowed: pages, windows")
    longest = context or min(max(8192, prompt + output), max(found.max_context, prompt + output))
    if longest < prompt + output:
        raise typer.BadParameter(f"--context is {longest}; --prompt and --output need {prompt + output} tokens")
    if longest > found.max_context:
        raise typer.BadParameter(f"--context is {longest}; {found.name} has at most {found.max_context} tokens")
    if tp and (reason := why_not_tp(found, tp)):
        raise typer.BadParameter(f"--tp: {reason}")
    if pp > found.num_layers:
        raise typer.BadParameter(f"--pp is {pp}; {found.name} has {found.num_layers} layers")
    wanted = choose.Wanted(
        context=longest,
        load=Load(prompt, output),
        concurrency=concurrency,
        ttft_s=targets.get("ttft", 0.0) / 1e3,
        tpot_s=targets.get("tpot", 0.0) / 1e3,
        batch=Batch(max_tokens=max_num_batched_tokens, max_seqs=max_num_seqs, block_tokens=block_size),
        utilization=gpu_memory_utilization,
        allocator=kv_allocator,
    )
    if rate:
        if emit is not None:
            raise typer.BadParameter("--emit goes with --gpu, not with --rate: plan the layout of one kind first")
        every = kinds or list(catalogue.gpus().values())
        fleets = fleet.smallest_fleets(
            found, every, rate, wanted, precision=precision, kv_dtype=kv_kind, between=between
        )
        _show(
            plan_view.fleets(found, fleets, every, rate, wanted, precision, kv_kind),
            plan_view.fleets_document(found, fleets, every, rate, wanted, precision, kv_kind),
            as_json,
        )
        raise typer.Exit(0 if fleets else 1)
    if len(kinds) > 1:
        raise typer.BadParameter(f"--gpu is {gpu!r}; several kinds are compared with --rate")
    if not kinds:
        if emit is not None:
            raise typer.BadParameter("--emit needs --gpu")
        _show(
            plan_view.needs(found, wanted, precision, kv_kind),
            plan_view.needs_document(found, wanted, precision, kv_kind),
            as_json,
        )
        return
    made = choose.plan(
        found,
        kinds[0],
        Cluster(gpus or kinds[0].per_node, nodes),
        wanted,
        within=within,
        between=between,
        only=Layout(tp, pp, cp, 0),
        precision=precision,
        kv_dtype=kv_kind,
    )
    if emit is None or str(emit) != "-":
        _show(plan_view.layouts(made, show_all=all_layouts), plan_view.layouts_document(made), as_json)
    if made.chosen is None:
        raise typer.Exit(1)
    if emit is not None:
        _emit(emit, plan_view.configuration(made, _served_name(model)))


def _show(view: Any, document: Any, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else COLUMNS, highlight=False, soft_wrap=False).print(view)


def _emit(path: Path, text: str) -> None:
    if str(path) == "-":
        typer.echo(text, nl=False)
        return
    path.write_text(text, encoding="utf-8")
    typer.echo(f"written: {path}", err=True)


def _targets(text: str) -> Targets:
    """ "ttft=500,tpot=50" in milliseconds."""
    targets: Targets = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        name = name.strip().lower().removesuffix("_ms")
        try:
            number = float(value.strip().lower().removesuffix("ms"))
        except ValueError:
            number = 0.0
        if name not in ("ttft", "tpot") or not 0 < number < 1e9:
            raise typer.BadParameter(
                f"--slo has {part!r}; allowed: ttft=MS and tpot=MS, numbers above 0, with a comma between"
            )
        targets[name] = number
    return targets


def _formats(model: Model, dtype: str, quantization: str, kv_dtype: str, kinds: list[Gpu]) -> tuple[Precision, str]:
    """`auto`: as the checkpoint, in a format that all these GPUs compute in. Raises ValueError naming the option."""
    from shoal.planner.cost import gpu_rates
    from shoal.planner.model import DTYPE_BYTES, FORMATS, KV_BYTES
    from shoal.planner.weights import Precision

    kind = dtype if dtype != "auto" else "bfloat16" if model.dtype == "float32" else model.dtype
    if kind not in DTYPE_BYTES:
        raise ValueError(f"--dtype is {dtype!r}; allowed: auto, {', '.join(DTYPE_BYTES)}")
    if dtype == "auto" and not all(kind in gpu.flops_per_s for gpu in kinds):
        kind = "float16"
    for gpu in kinds:
        gpu_rates(gpu, Precision(kind))  # raises where it does not compute in that format
    if quantization not in ("auto", "none", *FORMATS):
        raise ValueError(f"--quantization is {quantization!r}; allowed: auto, none, {', '.join(FORMATS)}")
    kv_kind = kind if kv_dtype == "auto" else kv_dtype
    if kv_kind not in KV_BYTES:
        raise ValueError(f"--kv-dtype is {kv_dtype!r}; allowed: auto, {', '.join(KV_BYTES)}")
    stored = model.quantization if quantization == "auto" else FORMATS.get(quantization)
    return Precision(kind, stored), kv_kind


def _served_name(model: str) -> str:
    """What `shoal serve` takes: a hub id for a name of the catalogue, a folder as it is."""
    from shoal import models
    from shoal.planner import catalogue

    known = catalogue.models()
    if model.lower() in known and model not in models.KNOWN:
        return str(known[model.lower()]["source"]).removeprefix("https://huggingface.co/")
    return model
