"""With `batch_invariant` a request's logits are equal to the bit, whatever shares its steps, however it is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.core.plan import StepPlan, StepResult
from shoal.core.request import RequestSpec, Sampling
from shoal.engine.config import EngineConfig
from shoal.engine.device import choose
from shoal.engine.model.linear import TorchLinear
from tests.support.default_model import default_model
from tests.support.drive import make_scheduler, run_requests
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.torch

MIN_SHAPES = 200  # different steps, by the slices' starts and lengths, that each kind of engine must have gone through
MAX_ROUNDS = 100
ANSWER = 6
KINDS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16", "threads": 2},
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "bfloat16, torch": {"dtype": "bfloat16", "kernels": "off"},
    "float32, torch": {"dtype": "float32", "kernels": "off"},
    "int8, torch": {"dtype": "bfloat16", "quantization": "int8", "kernels": "off"},
}


@dataclass
class Watched:
    """A runner whose logits are kept by request and position, and whose steps' shapes are counted."""

    runner: Any
    logits: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    shapes: set[tuple[tuple[int, int], ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._real = self.runner._model.logits
        self.num_blocks, self.block_tokens = self.runner.num_blocks, self.runner.block_tokens
        self.max_model_len, self.vocab_size = self.runner.max_model_len, self.runner.vocab_size
        self.hash_root, self.forget_all = self.runner.hash_root, self.runner.forget_all
        self.host = self.runner.host

    def launch(self, plan: StepPlan) -> None:
        places = [(piece.id, piece.start + piece.count) for piece in plan.slices if piece.sample]
        self.shapes.add(tuple((piece.start, piece.count) for piece in plan.slices))

        def logits(hidden_RE: Tensor) -> Tensor:
            found_RV = self._real(hidden_RE)
            for place, row_V in zip(places, found_RV.clone(), strict=True):
                self.logits.setdefault(place, []).append(row_V)
            return found_RV

        self.runner._model.logits = logits
        try:
            self.runner.launch(plan)
        finally:
            self.runner._model.logits = self._real

    def collect(self) -> StepResult:
        return self.runner.collect()


class Company:
    """Probes among others that come, go and are preempted, in steps cut at odd places."""

    def __init__(self, runner: Any, seed: int, longest: int) -> None:
        self.watched = Watched(runner)
        self.chance = Random(seed)
        self.longest = longest
        lengths = (1, 2, 17, longest // 3, longest // 2 + 1, longest)
        self.probes = {f"probe {n}": self.tokens(n) for n in lengths}
        for name in self.probes:  # each alone and whole
            run_requests(self.watched, make_scheduler(self.watched, max_prefill_chunk=0), [self.probe(name)])
        self.expected = self.watched.logits
        self.num_compared = self.num_preempted = self.num_cached = 0

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.chance.choices(range(self.watched.vocab_size), k=count))

    def probe(self, name: str, priority: int = 0) -> RequestSpec:
        number = len(self.probes[name])
        sampling = Sampling(temperature=0.8, top_p=0.9, seed=number) if number % 2 else Sampling(temperature=0)
        return RequestSpec(id=name, prompt=self.probes[name], max_tokens=ANSWER, sampling=sampling, priority=priority)

    def other(self, number: int) -> RequestSpec:
        """Sometimes it begins as a probe does, so that a probe finds blocks that somebody else computed."""
        begin = self.chance.choice([(), (), *self.probes.values()])
        prompt = (*begin, *self.tokens(self.chance.randint(1, self.longest // 2)))
        return RequestSpec(
            id=f"other {number}",
            prompt=prompt[: self.longest],
            max_tokens=self.chance.randint(1, 2 * ANSWER),
            sampling=Sampling(temperature=self.chance.choice((0, 1)), seed=number),
            priority=self.chance.choice((-1, -1, 0, 1)),
        )

    def round(self) -> None:
        chance = self.chance
        names = chance.sample(sorted(self.probes), chance.randint(1, 4))
        specs = [self.probe(name, chance.randint(0, 1)) for name in names] + [
            self.other(number) for number in range(chance.randint(0, 8))
        ]
        chance.shuffle(specs)
        specs.sort(key=lambda spec: spec.id != names[0])  # long enough for the others to arrive in time
        first = chance.randint(1, len(specs))
        later = {chance.randint(1, 2): specs[first:]} if specs[first:] else {}
        self.watched.logits = {}
        scheduler = make_scheduler(
            self.watched,
            max_prefill_chunk=chance.choice((0, 1 + self.longest // 10, 7, 16, 33, 100)),
            max_num_batched_tokens=chance.choice((16, 37, 128, 512)),
            max_num_seqs=chance.choice((2, 5, 16)),
            num_blocks=chance.choice((2 + 2 * self.longest // self.watched.block_tokens, self.watched.num_blocks)),
            max_steps_in_flight=chance.choice((1, 2)),
            prefix_caching=chance.random() < 0.7,
        )
        outcomes = run_requests(self.watched, scheduler, specs[:first], later=later)
        self.num_preempted += sum(outcomes[name].preemptions for name in names)
        self.num_cached += sum(outcomes[name].ended.cached_tokens > 0 for name in names)
        for (name, place), found in self.watched.logits.items():
            for row in found if name in self.probes else ():
                assert torch.equal(row, self.expected[name, place][0]), f"{name} at {place} of {sorted(outcomes)}"
                self.num_compared += 1

    def run(self) -> None:
        for _ in range(MAX_ROUNDS):
            self.round()
            if len(self.watched.shapes) >= MIN_SHAPES and self.num_preempted and self.num_cached:
                return
        raise AssertionError(f"{len(self.watched.shapes)} shapes, {self.num_preempted}, {self.num_cached}")


@pytest.mark.parametrize(
    ("architecture", "kind"), [*(("llama", kind) for kind in KINDS), ("qwen3", "bfloat16"), ("qwen3", "float32, torch")]
)
def test_logits_are_equal_to_the_bit_in_200_batch_shapes(
    tmp_path: Path, new_runner: Callable[..., Any], kind: str, architecture: str
) -> None:
    shape = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 32, "tied": architecture == "llama"}
    folder = make_tiny_model(tmp_path / "model", architecture, **shape)
    longest = 150 if "torch" in kind else 400  # two of the chunks that the attention kernel cuts a context into
    Company(new_runner(folder, **KINDS[kind], batch_invariant=True), seed=len(kind), longest=longest).run()


@pytest.mark.parametrize("kind", KINDS)
def test_so_are_those_of_the_default_model(
    new_runner: Callable[..., Any], kind: str, pytestconfig: pytest.Config
) -> None:
    if not pytestconfig.getoption("--full"):
        pytest.skip("takes minutes: --full")
    settings = KINDS[kind] | {"threads": 2, "batch_invariant": True, "kv_cache_bytes": 256 << 20}
    Company(new_runner(default_model(), **settings), seed=1, longest=300 if "torch" in kind else 600).run()


def test_a_machine_that_does_not_keep_the_promise_is_refused(
    tiny: Path, new_runner: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TorchLinear._multiply

    def places_matter(self: TorchLinear, x_MK: Tensor) -> Tensor:
        return real(self, x_MK) * (1 + torch.arange(len(x_MK)).unsqueeze(1) * 1e-6)

    monkeypatch.setattr(TorchLinear, "_multiply", places_matter)
    assert new_runner(tiny, kernels="off").num_blocks
    with pytest.raises(ValueError, match=r"engine\.batch_invariant is true; .* needs shoal's own kernels"):
        new_runner(tiny, kernels="off", batch_invariant=True)


@pytest.mark.parametrize("setting", [{"batch_invariant": True}, {"quantization": "int8"}])
def test_what_is_for_cpus_is_refused_elsewhere(setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=rf"engine\.{next(iter(setting))} is .*; it needs a CPU"):
        choose(EngineConfig(device="cuda", dtype="float32", **setting))
