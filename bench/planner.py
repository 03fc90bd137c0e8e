"""Does `shoal plan` predict what an engine here really takes, and how fast it is?

Memory: an engine's runner in a process of its own computes the largest step that its settings allow, for three settings
of the default model and for small random models with grouped, multi-query and plain attention.

    weights       what the process' own memory grew by while they were loaded, against planner.weights
    KV            bytes of the pool, and its blocks, against planner.memory
    activations   the most that torch's tensors held at once in the step, against planner.memory.activation_bytes
    with workspace  the most by which the process grew in the step, against that and cpu_workspace_bytes; malloc gives
                  everything large back at once there (MALLOC_MMAP_THRESHOLD_), since what it would keep is not used

Times: the machine's matrix rates and bandwidth are measured with one thread, with two, and with one thread in each of
two processes (bench/rates.py); what a step takes beside its arithmetic is measured on one layout, a process of one
thread, by five invented steps. From these alone the planner predicts the others: tokens/s and time per token of a
closed load, in its steady part, against what the engines then do. Rates, calibration and loads alternate; medians.

Fleet: the rate that the planner believes a replica can serve within its targets, against the same load simulated with
the live scheduler (shoal.sim) on steps that take what the same roofline says.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from common import Report, arguments
from shoal.planner import catalogue, kv, weights
from shoal.planner.catalogue import Link
from shoal.planner.cost import Machine, Net, Rates, pair_flops
from shoal.planner.layouts import Cluster, Layout
from shoal.planner.memory import Batch, activation_bytes, cpu_workspace_bytes
from shoal.planner.model import Model
from shoal.planner.predict import Limits, Load, forecast
from shoal.planner.weights import Precision

ROWS = (1, 4, 16, 64, 256)
MAX_LEN = 2048
PLAIN = Precision("float32")
PROMPT, OUTPUT = 128, 64
LIMIT_S = 600.0
WITHIN = 0.2


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
        return
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("memory", "times", "fleet"), help="one part alone")
    options = parser.parse_args()
    report = Report("planner", options)
    for name, part in (("memory", memory), ("times", times), ("fleet", fleet)):
        if options.only in (None, name):
            part(report)
            report.save()
    report.finish()


# -- memory ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    folder: Path
    batch: Batch


def memory(report: Report) -> None:
    rows = []
    worst = {"weights": 0.0, "activations": 0.0, "with workspace": 0.0}
    exact = True
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as made:
        for case in cases(Path(made), report.quick):
            found = run_child({"do": "memory", "folder": str(case.folder), "batch": batch_fields(case.batch)})
            planned = predicted(catalogue.model(str(case.folder)), case.batch)
            exact &= found["kv"] == planned["kv"] and found["blocks"] == planned["blocks"]
            cells: list[Any] = [case.name]
            for part in worst:
                worst[part] = max(worst[part], abs(found[part] / planned[part] - 1))
                cells += [planned[part] / 1e6, found[part] / 1e6]
            rows.append((*cells, found["kv"] / 1e6))
    columns = ["model, most tokens, most rows"]
    columns += [f"{part}: {what}" for part in worst for what in ("planned", "measured")]
    report.table("memory, MB (10^6 bytes)", (*columns, "KV"), rows)
    report.claim("weights: largest error", round(worst["weights"], 4), "<= 0.01", worst["weights"] <= 0.01)
    report.claim("KV pool: bytes and blocks are equal", exact, "True", exact)
    for part in ("activations", "with workspace"):
        report.claim(f"{part}: largest error", round(worst[part], 3), f"<= {WITHIN}", worst[part] <= WITHIN)


def cases(made: Path, quick: bool) -> list[Case]:
    from shoal import models

    default = models.pull(models.DEFAULT)
    settings = [(512, 16), (2048, 64), (1024, 256)][: 1 if quick else None]
    found = [Case(f"{models.DEFAULT}, {t}, {s}", default, Batch(max_tokens=t, max_seqs=s)) for t, s in settings]
    small = [("grouped", 8, 2), ("multi-query", 8, 1), ("plain", 8, 8)]
    for name, heads, kv_heads in small[: 1 if quick else None]:
        folder = random_model(made / name, heads, kv_heads)
        found.append(Case(f"random {name}, 1024, 32", folder, Batch(max_tokens=1024, max_seqs=32)))
    return found


def predicted(model: Model, batch: Batch) -> dict[str, float]:
    """Of an engine on a CPU, in float32, whose pool may take POOL_BYTES."""
    groups = kv.groups(model, "float32", block_tokens=batch.block_tokens)
    activations = activation_bytes(model, 4, batch)
    tokens = kv.capacity(groups, POOL_BYTES, block_tokens=batch.block_tokens)
    return {
        "weights": weights.total_bytes(weights.parts(model, PLAIN)),
        "activations": activations,
        "with workspace": activations + cpu_workspace_bytes(batch, MAX_LEN),
        "kv": kv.num_bytes(groups, tokens, block_tokens=batch.block_tokens),
        "blocks": tokens // batch.block_tokens,
    }


POOL_BYTES = 384 << 20
BIG = Batch(max_tokens=2048, max_seqs=256)  # of the fleets


def random_model(folder: Path, heads: int, kv_heads: int) -> Path:
    """A small Llama of random weights, bfloat16 on disk."""
    import torch
    from safetensors.torch import save_file

    hidden, inner, layers, vocabulary, dim = 512, 1408, 8, 16_384, 64
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": inner, "head_dim": dim,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary, "max_position_embeddings": MAX_LEN, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes = {"model.embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden), "model.norm": (hidden,)}
    for layer in range(layers):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.self_attn.q_proj": (heads * dim, hidden), f"{name}.self_attn.k_proj": (kv_heads * dim, hidden),
            f"{name}.self_attn.v_proj": (kv_heads * dim, hidden), f"{name}.self_attn.o_proj": (hidden, heads * dim),
            f"{name}.mlp.gate_proj": (inner, hidden), f"{name}.mlp.up_proj": (inner, hidden),
            f"{name}.mlp.down_proj": (hidden, inner), f"{name}.input_layernorm": (hidden,),
            f"{name}.post_attention_layernorm": (hidden,),
        }  # fmt: skip
    chance = torch.Generator().manual_seed(0)
    tensors = {f"{name}.weight": torch.randn(shape, generator=chance).bfloat16() for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


# -- times -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setup:
    """Engines that serve the load together."""

    name: str
    layout: Layout
    threads: int  # of each engine, all of its ranks
    rates: str  # which of the machine's rates it computes at


SETUPS = (
    Setup("1 process, 1 thread", Layout(), 1, "1 thread"),
    Setup("1 process, 2 threads", Layout(), 2, "2 threads"),
    Setup("DP=2", Layout(dp=2), 1, "2 x 1 thread"),
    Setup("TP=2", Layout(tp=2), 2, "2 x 1 thread"),
    Setup("PP=2", Layout(pp=2), 2, "2 x 1 thread"),
)
CALIBRATED = SETUPS[0].name


def times(report: Report) -> None:
    import models as bench_models

    folder = bench_models.halves()
    model = catalogue.model(str(folder))
    loads = (4,) if report.quick else (4, 16)
    setups = [setup for setup in SETUPS if can(setup)][: 3 if report.quick else None]
    rounds = []
    for _ in range(1 if report.quick else 2):
        rates = {name: measure_rates(folder, name, report.quick) for name in sorted({each.rates for each in setups})}
        beside = run_child({"do": "calibrate", "folder": str(folder)})
        link = measure_link(folder)
        served = {setup.name: serve(folder, setup, loads) for setup in setups}
        rounds.append((rates, beside, link, served))
    rows, errors = [], {}
    for setup in setups:
        for running in loads:
            cells = [compare(model, setup, running, *each) for each in rounds]
            predicted_tpot, tpot, predicted_rate, rate = (median(column) for column in zip(*cells, strict=True))
            off = (tpot and predicted_tpot / tpot - 1, predicted_rate / rate - 1)
            rows.append((setup.name, running, 1e3 * predicted_tpot, 1e3 * tpot, predicted_rate, rate, *off))
            if setup.name != CALIBRATED:
                errors[setup.name, running] = off
    columns = (
        "layout",
        "at once",
        "TPOT ms: planned",
        "measured",
        "tokens/s: planned",
        "measured ",
        "TPOT",
        "tokens/s",
    )
    report.table(f"prompts of {PROMPT}, answers of {OUTPUT}, float32; the last two: off by", columns, rows)
    show_rates(report, rounds)
    for name in dict.fromkeys(name for name, _ in errors):
        for index, what in enumerate(("TPOT", "tokens/s")):
            worst = max((abs(off[index]) for (setup, _), off in errors.items() if setup == name), default=0.0)
            report.claim(f"{name}: {what}, largest error", round(worst, 3), f"<= {WITHIN}", worst <= WITHIN)


def can(setup: Setup) -> bool:
    from shoal.engine.config import EngineConfig

    fields = EngineConfig.__dataclass_fields__
    return setup.layout.pp == 1 or "pipeline_parallel_size" in fields


def compare(
    model: Model, setup: Setup, running: int, rates: dict[str, Any], beside: Any, link: Any, served: dict[str, Any]
) -> tuple[float, float, float, float]:
    """TPOT and tokens/s, each predicted and measured."""
    layout = setup.layout
    machine = Machine(
        model=model,
        precision=PLAIN,
        kv_dtype="float32",
        rates=reached(model, rates, setup.rates, beside),
        net=Net(Link(name="shm", title="shared memory", efficiency=1.0, **link)),
        cluster=Cluster(2),
        layout=layout,
    )
    each = max(1, running // layout.dp)
    found = forecast(machine, Load(PROMPT, OUTPUT), each, Limits(2048, 1536))
    busy = min(layout.dp, running)
    mine = served[setup.name][str(running)]
    return found.tpot_s, mine["tpot_s"], busy * found.tokens_per_s(Load(PROMPT, OUTPUT)), mine["tokens_per_s"]


def reached(model: Model, rates: dict[str, Any], name: str, beside: dict[str, float]) -> Rates:
    """What a rank reaches: matrices and bandwidth as measured for its company, the rest as calibrated alone. Attention
    computes faster as products do, and what is beside them as copies are."""
    here, alone = rates[name], rates[SETUPS[0].rates]
    compute = dict(here["matrix"])[ROWS[-1]] / dict(alone["matrix"])[ROWS[-1]]
    copy = here["copy"] / alone["copy"]
    base = calibrated(model, alone, beside)
    return replace(
        base,
        bytes_per_s=here["read"],
        matrix=tuple((rows, rate) for rows, rate in here["matrix"]),
        attention_flops_per_s=base.attention_flops_per_s * compute,
        kv_bytes_per_s=base.kv_bytes_per_s * copy,
        token_s=base.token_s / copy,
    )


def calibrated(model: Model, alone: dict[str, Any], beside: dict[str, float]) -> Rates:
    """From five invented steps of one process with one thread."""
    plain = Rates(alone["read"], tuple(map(tuple, alone["matrix"])), 1e30, 1e30)
    bare = Machine(model, PLAIN, "float32", plain, Net(LINK_NONE), Cluster(1), Layout())

    def matrices(new: int, sampled: int) -> float:
        return bare.predict((1, new, 0, 1, 0), sampled)

    per_token = kv.token_bytes(kv.groups(model, "float32"))
    kv_rate = 16 * 960 * per_token / max(1e-9, beside["16 far"] - beside["16 near"])
    pairs = 256 * 1024
    pair_rate = pair_flops(model) * model.num_layers * pairs / max(1e-9, beside["256 late"] - beside["256 early"])
    own = 256 * 257 // 2 * pair_flops(model) * model.num_layers / pair_rate
    near = 64 * per_token / kv_rate
    sequence_s = max(0.0, (beside["16 near"] - beside["1 near"] - matrices(16, 16) + matrices(1, 1)) / 15 - near)
    step_s = max(0.0, beside["1 near"] - matrices(1, 1) - near - sequence_s) + beside["turn"]
    token_s = max(0.0, (beside["256 early"] - matrices(256, 1) - own - step_s + beside["turn"] - sequence_s) / 256)
    return replace(
        plain,
        attention_flops_per_s=pair_rate,
        kv_bytes_per_s=kv_rate,
        step_s=step_s,
        sequence_s=sequence_s,
        token_s=token_s,
    )


LINK_NONE = Link(name="none", title="none", bytes_per_s=1e30, efficiency=1.0, latency_s=0.0)


def measure_rates(folder: Path, name: str, quick: bool) -> dict[str, Any]:
    job = {"do": "rates", "folder": str(folder), "threads": 2 if name == "2 threads" else 1, "count": 3 if quick else 5}
    found = run_children([job] * (2 if name == "2 x 1 thread" else 1))
    matrix = [(rows, mean(rate for each in found for of, rate in each["matrix"] if of == rows)) for rows in ROWS]
    return {"matrix": matrix, **{what: mean(each[what] for each in found) for what in ("read", "copy")}}


def measure_link(folder: Path) -> dict[str, float]:
    return run_child({"do": "link", "folder": str(folder)})


def serve(folder: Path, setup: Setup, loads: Sequence[int]) -> dict[str, Any]:
    layout = setup.layout
    settings: dict[str, Any] = {"threads": setup.threads}
    if layout.tp > 1:
        settings["tensor_parallel_size"] = layout.tp
    if layout.pp > 1:
        settings |= {"pipeline_parallel_size": layout.pp, "steps_in_flight": layout.pp}
    job = {"do": "serve", "folder": str(folder), "settings": settings}
    found = run_children([{**job, "loads": [[n, max(1, n // layout.dp)] for n in loads]} for _ in range(layout.dp)])
    result = {}
    for running in map(str, loads):
        same = [each[running] for each in found[: min(layout.dp, int(running))]]
        result[running] = {
            "tpot_s": mean(each["tpot_s"] for each in same),
            "tokens_per_s": sum(each["tokens_per_s"] for each in same),
        }
    return result


def show_rates(report: Report, rounds: Sequence[Any]) -> None:
    names = list(rounds[0][0])
    rows = [
        (
            f"matrices, {count} rows: GFLOP/s",
            *(median(dict(each[0][name]["matrix"])[count] for each in rounds) / 1e9 for name in names),
        )
        for count in ROWS
    ]
    for what in ("read", "copy"):
        rows.append((f"{what}: GB/s", *(median(each[0][name][what] for each in rounds) / 1e9 for name in names)))
    report.table("rates of one process", ("what", *names), rows)
    link = {key: median(each[2][key] for each in rounds) for key in rounds[0][2]}
    report.table("between two ranks", ("us", "GB/s"), [(1e6 * link["latency_s"], link["bytes_per_s"] / 1e9)])
    steps = [(name, 1e3 * median(each[1][name] for each in rounds)) for name in rounds[0][1]]
    report.table("invented steps of the calibration", ("step", "ms"), steps)


# -- fleet -------------------------------------------------------------------------------------------------------------


def fleet(report: Report) -> None:
    """Each kind's fleet for a rate: does a replica, simulated at its share of the rate, keep the targets?"""
    from shoal.planner.choose import Wanted
    from shoal.planner.fleet import smallest_fleets

    rows, kept = [], True
    model = catalogue.model("llama-3.1-8b")
    kinds = [catalogue.gpu(name) for name in ("h100-80gb", "a100-80gb", "l40s-48gb", "l4-24gb")]
    wanted = Wanted(context=8192, load=Load(1024, 256), concurrency=1, ttft_s=1.0, tpot_s=0.05, batch=BIG)
    formats: dict[str, Any] = {"precision": Precision("bfloat16"), "kv_dtype": "bfloat16"}
    for found in smallest_fleets(model, kinds, 20.0, wanted, between=catalogue.link("100gbe"), **formats):
        ttft_s, tpot_s = simulated(model, found, 20.0 / found.layout.dp, wanted.load, 100 if report.quick else 400)
        kept &= ttft_s <= wanted.ttft_s and tpot_s <= wanted.tpot_s
        planned = (1e3 * found.forecast.ttft_s, 1e3 * found.forecast.tpot_s)
        name = f"{found.gpus} x {found.gpu.name}, {found.layout}"
        rows.append((name, 20.0 / found.layout.dp, planned[0], 1e3 * ttft_s, planned[1], 1e3 * tpot_s))
    columns = ("fleet", "requests/s a replica", "TTFT P99 ms: planned", "simulated", "TPOT ms: planned", "simulated ")
    report.table("Llama-3.1-8B, 20 requests/s of 1,024 + 256 tokens, TTFT 1,000 ms, TPOT 50 ms", columns, rows)
    report.claim("simulated fleets keep their targets", kept, "True", kept)


def simulated(model: Model, found: Any, rate: float, load: Load, count: int) -> tuple[float, float]:
    """P99 of the TTFT and mean of the TPOT, s: the live scheduler on steps as long as the roofline says."""
    from random import Random

    from shoal.core.limits import Limits as CoreLimits
    from shoal.core.stepcost import StepCost, fit
    from shoal.planner.cost import gpu_rates
    from shoal.sim.load import simulate
    from shoal.workload import trace
    from shoal.workload.arrivals import OpenLoop
    from shoal.workload.lengths import Mix, Uniform

    layout = replace(found.layout, dp=1)
    net = Net(catalogue.link(found.gpu.link), None)
    rates = gpu_rates(found.gpu, Precision("bfloat16"))
    machine = Machine(model, Precision("bfloat16"), "bfloat16", rates, net, Cluster(found.gpu.per_node), layout)
    chance = Random(1)
    samples = []
    for _ in range(400):
        decodes, new = chance.randrange(0, 128), chance.choice((0, 0, 1024, 2000))
        context = decodes * 1150 + new
        features = (1, decodes + new, context + new * new // 2, decodes + bool(new), context)
        if decodes or new:
            samples.append((features, int(1e9 * machine.predict(features, decodes + bool(new)))))
    limits = CoreLimits(
        num_blocks=min(100_000, found.memory.pool_tokens // 16), block_tokens=16, max_num_seqs=256,
        max_num_batched_tokens=2048, max_prefill_chunk=0, max_model_len=8192, vocab_size=1000,
        max_step_ns=500_000_000, prefix_caching=False,
    )  # fmt: skip
    mix = Mix(Uniform(load.prompt), Uniform(load.output))
    rows = trace.make(OpenLoop(rate), mix, count, seed=1)
    report = simulate(rows, limits, StepCost(fit(samples)), seed=1)
    assert report.ttft_ns is not None and report.tpot_ns is not None
    return report.ttft_ns.p99 / 1e9, report.tpot_ns.mean / 1e9


# -- processes of their own --------------------------------------------------------------------------------------------


def run_child(job: dict[str, Any]) -> Any:
    return run_children([job])[0]


def run_children(jobs: Sequence[dict[str, Any]]) -> list[Any]:
    """They load, and begin together."""
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"} if jobs[0]["do"] == "memory" else dict(os.environ)
    command = [sys.executable, __file__, "--child"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen([*command, json.dumps(job)], env=env, **pipes) for job in jobs]  # type: ignore[call-overload]
    try:
        for child_ in children:
            if child_.stdout.readline().strip() != "ready":
                raise RuntimeError("a process of the bench ended before it was ready")
        for child_ in children:
            child_.stdin.write("go\n")
            child_.stdin.flush()
        return [json.loads(child_.communicate(timeout=LIMIT_S)[0].splitlines()[-1]) for child_ in children]
    finally:
        for child_ in children:
            child_.kill()
            child_.wait()


def child(job: dict[str, Any]) -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    run = {"memory": Memory, "rates": RatesJob, "calibrate": Calibrate, "serve": Serve, "link": LinkJob}[job["do"]](job)
    print("ready", flush=True)
    sys.stdin.readline()
    result = run()
    print(json.dumps(result), flush=True)


def batch_fields(batch: Batch) -> dict[str, int]:
    return {"max_tokens": batch.max_tokens, "max_seqs": batch.max_seqs, "block_tokens": batch.block_tokens}


class Memory:
    """What an engine's runner takes; see this file's beginning."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._folder, self._batch = Path(job["folder"]), Batch(**job["batch"])

    def __call__(self) -> dict[str, float]:
        import torch

        from shoal.engine.config import EngineConfig
        from shoal.engine.device import choose, kv_pool_bytes
        from shoal.engine.kvstore import block_bytes
        from shoal.engine.model.llama import Llama
        from shoal.engine.model.load import load_weights
        from shoal.engine.model.registry import read_config
        from shoal.engine.runner import Runner

        config = EngineConfig(dtype="float32", device="cpu", threads=1, kv_cache_bytes=POOL_BYTES)
        device = choose(config)
        torch.ones(64, 64) @ torch.ones(64, 64)
        settings = read_config(self._folder)
        before = status("RssAnon")
        model = Llama(settings, load_weights(self._folder, settings, device))
        loaded = status("RssAnon")
        block = self._batch.block_tokens
        num_blocks = kv_pool_bytes(config, device, 0) // block_bytes(settings, device.dtype, block)
        runner = Runner(model, device, num_blocks=num_blocks, block_tokens=block, max_model_len=MAX_LEN, digest="bench")
        runner.blocks._device_NBX.zero_()  # the pool is there
        runner.compute(self._step(1, 16, 2))
        runner.forget_all()
        at_rest = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the high-water mark begins anew
        runner.compute(self._step(2, self._batch.max_tokens, self._batch.max_seqs))
        peak = status("VmHWM")
        runner.forget_all()
        live = torch_peak(lambda: runner.compute(self._step(3, self._batch.max_tokens, self._batch.max_seqs)))
        kept = sum(buffer.nbytes for buffer in device._buffers.values())
        return {
            "weights": loaded - before,
            "kv": runner.blocks._device_NBX.numel(),
            "blocks": runner.num_blocks,
            "activations": live + kept,
            "with workspace": peak - at_rest,
        }

    def _step(self, step: int, num_tokens: int, num_rows: int) -> Any:
        """One chunk, and decodes of so many other requests; all tables name the pool's first blocks."""
        from shoal.core.plan import Admit, Slice, StepPlan
        from shoal.core.request import Sampling

        sizes = [(0, num_tokens - num_rows + 1)] + [(MAX_LEN // 2, 1)] * (num_rows - 1)
        admits, slices = [], []
        for index, (start, count) in enumerate(sizes):
            name = f"{step} {index}"
            blocks = tuple(range(-(-(start + count) // self._batch.block_tokens)))
            known = start + count
            admits.append(Admit(name, (0,) * known, known, start, blocks, Sampling(temperature=0), 0, 0, ()))
            slices.append(Slice(name, start, count, (), -1, True))
        return StepPlan(step, [], admits, slices, num_tokens, 0)


def status(field: str) -> int:
    """Bytes, of /proc/self/status."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return int(found.group(1)) * 1024


def torch_peak(work: Any) -> int:
    """The most that tensors made in the meantime held at once."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    now = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


class RatesJob:
    """Matrix rates at several numbers of rows, as the engine multiplies in float32, and bandwidth."""

    def __init__(self, job: dict[str, Any]) -> None:
        import torch

        import rates
        from shoal.engine.model.registry import read_config

        self._count = job["count"]
        self._rates = rates
        self._config = read_config(Path(job["folder"]))
        self._products = rates.Products(self._config, "float32")
        torch.set_num_threads(job["threads"])
        self._products.measure("torch", 16, 1)

    def __call__(self) -> dict[str, Any]:
        matrix = []
        for rows in ROWS:
            found = self._products.measure("torch", rows, self._count)
            both = found.layer_weights + found.head_weights
            matrix.append((rows, 2 * rows * both / (found.layers_s + found.head_s)))
        num_bytes = 4 * self._rates.layer_weights(self._config)
        return {"matrix": matrix, **self._rates.memory(num_bytes, self._count)}


class Calibrate:
    """Invented steps of a process with one thread, ns of the device, and what a turn of the loop takes beside them."""

    def __init__(self, job: dict[str, Any]) -> None:
        from engine import Engine

        self._engine = Engine(Path(job["folder"]), dtype="float32", device="cpu", threads=1)

    def __call__(self) -> dict[str, float]:
        near, far = [(63, 1)] * 16, [(1023, 1)] * 16
        steps = {
            "1 near": near[:1], "16 near": near, "16 far": far, "256 early": [(0, 256)], "256 late": [(1024, 256)],
        }  # fmt: skip
        found = {name: median(self._busy_s(name, sizes) for _ in range(7)) for name, sizes in steps.items()}
        turns = []
        for _ in range(2):
            run = self._engine.serve(closed(2, 6), seed=1)
            busy_s = sum(step.busy_ns for step in run.steps) / 1e9
            turns.append((run.seconds - busy_s) / len(run.steps))
        self._engine.close()
        return {**found, "turn": min(turns)}

    def _busy_s(self, name: str, sizes: Sequence[tuple[int, int]]) -> float:
        from shoal.core.plan import Admit, Slice, StepPlan
        from shoal.core.request import Sampling

        runner = self._engine.runner
        admits, slices, first = [], [], 0
        for index, (start, count) in enumerate(sizes):
            known = start + count
            blocks = tuple(range(first, first + -(-known // runner.block_tokens)))
            first += len(blocks)
            request = f"{name} {index}"
            admits.append(Admit(request, (1,) * known, known, start, blocks, Sampling(temperature=0), 0, 0, ()))
            slices.append(Slice(request, start, count, (), -1, True))
        plan = StepPlan(1, [], admits, slices, sum(count for _, count in sizes), 0)
        runner._write_history(plan)
        busy_ns = runner.compute(plan).busy_ns
        runner.forget_all()
        return busy_ns / 1e9


def closed(running: int, count: int) -> Any:
    """Answers of different lengths, so that they do not all end in one step."""
    from shoal.workload import trace
    from shoal.workload.arrivals import ClosedLoop
    from shoal.workload.lengths import Mix, Uniform

    return trace.make(ClosedLoop(running), Mix(Uniform(PROMPT, 0.25), Uniform(OUTPUT, 0.25)), count, seed=1)


class Serve:
    def __init__(self, job: dict[str, Any]) -> None:
        from engine import Engine

        self._loads = job["loads"]
        self._engine = Engine(Path(job["folder"]), dtype="float32", device="cpu", **job["settings"])
        self._engine.serve(closed(2, 2), seed=2)

    def __call__(self) -> dict[str, Any]:
        found = {str(name): self._measured(running) for name, running in self._loads}
        self._engine.close()
        return found

    def _measured(self, running: int) -> dict[str, float]:
        """In the steady part: from the first ending until nothing is left to send."""
        count = running * 4 if running > 2 else 5
        watch = Watch(count - running)
        self._engine.serve(closed(running, count), seed=1, on_turn=watch)
        return {"tpot_s": watch.tpot_s(), "tokens_per_s": watch.tokens_per_s()}


class Watch:
    """Times the tokens of each request as a load runs."""

    def __init__(self, num_sent_later: int) -> None:
        self._num_sent_later = num_sent_later
        self._times: dict[str, list[float]] = {}
        self._turns: list[tuple[float, int]] = []  # time, tokens
        self._ends: list[float] = []

    def __call__(self, turn: Any) -> None:
        now = time.perf_counter()
        num_tokens = 0
        for updates in turn.updates.values():
            for update in updates:
                if update.tokens:
                    self._times.setdefault(update.id, []).extend([now] * len(update.tokens))
                    num_tokens += len(update.tokens)
                if update.ending is not None:
                    self._ends.append(now)
        if num_tokens:
            self._turns.append((now, num_tokens))

    def _steady(self) -> tuple[float, float]:
        return self._ends[0], self._ends[self._num_sent_later - 1]

    def tokens_per_s(self) -> float:
        began, ended = self._steady()
        return sum(count for at, count in self._turns if began < at <= ended) / (ended - began)

    def tpot_s(self) -> float:
        began, ended = self._steady()
        middle = [times for times in self._times.values() if len(times) > 1 and began <= times[0] <= ended]
        return mean((times[-1] - times[0]) / (len(times) - 1) for times in middle)


class LinkJob:
    """All-reduces of two ranks of one host, as two threads: what a small one takes, and the rate of a large one."""

    def __init__(self, job: dict[str, Any]) -> None:
        import torch

        torch.set_num_threads(1)

    def __call__(self) -> dict[str, float]:
        from concurrent.futures import ThreadPoolExecutor

        import torch

        from shoal.engine.kernels.library import Kernels
        from shoal.engine.parallel.layout import Layout as Ranks
        from shoal.engine.parallel.shared import Memory as Shared

        kernels = Kernels(1)
        first = Shared(Ranks(tp=2))
        both = [first, Shared(Ranks(tp=2), tuple(map(os.dup, first.fds)))]
        comms = [memory.comms(rank, kernels).layer for rank, memory in enumerate(both)]

        def seconds(numbers: int, count: int) -> float:
            def one(comm: Any) -> float:
                x = torch.ones(numbers)
                began = time.perf_counter()
                for _ in range(count):
                    comm.all_reduce(x)
                return (time.perf_counter() - began) / count

            with ThreadPoolExecutor(2) as pool:
                return max(pool.map(one, comms))

        seconds(1000, 100)
        small, large = seconds(576, 500), seconds(576 * 512, 50)
        for memory in both:
            memory.close()
        bytes_per_s = 4 * 576 * 511 / max(1e-9, large - small)  # 2 (p - 1) / p of the bytes is once them
        return {"latency_s": max(0.0, small - 4 * 576 / bytes_per_s) / 2, "bytes_per_s": bytes_per_s}


if __name__ == "__main__":
    main()
