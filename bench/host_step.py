"""What does a decode step cost besides the model: plan, batch, sampling, apply, updates, frame?

The engine's own loop, scheduler, request table and sampling, around a model that answers at once with logits as a real
one would give them (a few likely tokens, a long tail). Times are the medians of the parts of a step on one thread; the
frame is made on the I/O thread in an engine, and counted here too since both share the machine's cores.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from statistics import median
from typing import Any

import torch

from common import Report, arguments
from shoal.core.limits import Limits
from shoal.core.request import RequestSpec, Sampling
from shoal.core.scheduler import Scheduler
from shoal.engine import runner as runner_module
from shoal.engine.config import EngineConfig
from shoal.engine.device import choose
from shoal.engine.loop import StepLoop, Turn
from shoal.engine.metrics import StepMetrics
from shoal.engine.model.config import ModelConfig, Rope
from shoal.engine.process import calm_collector
from shoal.engine.runner import Runner
from shoal.telemetry.metrics import new_registry
from shoal.wire import codec
from shoal.wire.messages import Frame

BLOCK, PROMPT, MAX_SEQS = 16, 160, 64
TARGET_MS = 0.7  # 5 % of a step of 14 ms
SAMPLED_MS = {16: 1.0, 64: 4.0}
SETTINGS = {"greedy": Sampling(temperature=0), "sampled": Sampling(temperature=0.8, top_p=0.9)}
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49_152,
    hidden_size=576,
    num_layers=1,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    norm_eps=1e-5,
    rope=Rope(),
    max_context=8192,
    tied=True,
)


class Parts:
    """Milliseconds per step of each part; a part within another counts only in the inner one."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._now: defaultdict[str, float] = defaultdict(float)
        self._inner = [0.0]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.thread_time()
        self._inner.append(0.0)
        try:
            yield
        finally:
            took = 1e3 * (time.thread_time() - began)
            self._now[name] += took - self._inner.pop()
            self._inner[-1] += took

    def wrap(self, owner: Any, name: str, part: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **named: Any) -> Any:
            with self.part(part):
                return call(*args, **named)

        setattr(owner, name, timed)

    def end_step(self) -> None:
        self.steps.append(dict(self._now))
        self._now.clear()


class Model:
    """Answers at once."""

    config = MODEL

    def __init__(self) -> None:
        chance = torch.Generator().manual_seed(1)
        noise_RV = torch.randn((MAX_SEQS, MODEL.vocab_size), generator=chance)
        self._logits_RV = noise_RV * torch.linspace(1.5, 3.5, MAX_SEQS).unsqueeze(1)  # narrow and wide nuclei

    def hidden(self, tokens_T: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.zeros((len(tokens_T), MODEL.hidden_size))

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        return self._logits_RV[: len(hidden_RE)]


def measure(num_seqs: int, sampling: Sampling, num_steps: int) -> list[dict[str, float]]:
    device = choose(EngineConfig(device="cpu"))
    runner = Runner(
        Model(),  # type: ignore[arg-type]
        device,
        num_blocks=4096,
        block_tokens=BLOCK,
        max_model_len=MODEL.max_context,
        digest="bench",
    )
    limits = Limits(
        num_blocks=4096,
        block_tokens=BLOCK,
        max_model_len=MODEL.max_context,
        vocab_size=MODEL.vocab_size,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=64 * 256,
        max_step_ns=10**12,
    )
    scheduler = Scheduler(limits, hash_root=runner.hash_root)
    metrics = StepMetrics(new_registry())
    parts = Parts()
    restore = runner_module.sample
    parts.wrap(runner_module, "sample", "sample")
    for owner, name, part in (
        (scheduler, "plan", "plan"),
        (scheduler, "apply", "apply"),
        (scheduler, "view", "view"),
        (runner, "launch", "launch, other"),
        (runner, "_forward", "prepare"),
        (runner, "collect", "collect"),
        (runner._table, "build", "batch"),
        (runner._table, "store_sampled", "store"),
        (runner._model, "hidden", "(model)"),
        (runner._model, "logits", "(model)"),
    ):
        parts.wrap(owner, name, part)

    def publish(turn: Turn) -> None:
        with parts.part("frame"):
            if turn.step is not None:
                metrics.observe(turn.step)
            for updates in turn.updates.values():
                codec.encode(Frame(view=turn.view, updates=updates))

    loop = StepLoop(
        scheduler,
        runner,
        publish=publish,
        announce=lambda predicted_ns: None,
        failed=lambda error: None,
        steps_in_flight=1,
    )
    chance = Random(1)
    specs = [
        RequestSpec(
            id=f"chatcmpl-{number:032x}",
            prompt=tuple(chance.choices(range(MODEL.vocab_size), k=PROMPT - number % BLOCK)),
            max_tokens=num_steps + 40,
            sampling=sampling,
        )
        for number in range(num_seqs)
    ]
    loop.submit(1, specs)
    try:
        for _ in range(num_steps + 20):
            with parts.part("loop"):
                loop._wait_for_work()
                loop._turn()
            parts.end_step()
    finally:
        runner_module.sample = restore
    return parts.steps[20:]


def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    report = Report("host_step", options)
    calm_collector()
    num_steps = 200 if options.quick else 1000
    whole: dict[tuple[int, str], float] = {}
    drawn: dict[tuple[int, str], float] = {}
    rows: dict[str, dict[str, float]] = defaultdict(dict)
    for num_seqs in (1, 16, 64):
        for name, sampling in SETTINGS.items():
            steps = measure(num_seqs, sampling, num_steps)
            column = f"{num_seqs} {name}"
            for part in {part for step in steps for part in step}:
                rows[part][column] = median(step.get(part, 0.0) for step in steps)
            drawn[num_seqs, name] = rows["sample"][column]
            rows["all"][column] = median(sum(step.values()) - step["(model)"] for step in steps)
            whole[num_seqs, name] = rows["all"][column] - drawn[num_seqs, name]
    columns = list(rows["all"])
    order = sorted(rows, key=lambda part: (part == "all", -rows[part]["16 greedy"]))
    report.table(
        "ms per step, median", ("part", *columns), [(part, *(rows[part][c] for c in columns)) for part in order]
    )
    greedy = whole[16, "greedy"] + drawn[16, "greedy"]
    report.claim("16 greedy, all parts, ms", round(greedy, 3), f"<= {TARGET_MS:g}", greedy <= TARGET_MS)
    for num_seqs, limit in SAMPLED_MS.items():
        took = drawn[num_seqs, "sampled"]
        report.claim(f"{num_seqs} rows drawn (0.8, top-p 0.9), ms", round(took, 3), f"<= {limit:g}", took <= limit)
    report.finish()


if __name__ == "__main__":
    main()
