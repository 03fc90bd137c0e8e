"""Several ranks make the tokens that one makes, whatever the scheduler does with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from shoal.core.plan import StepPlan
from shoal.core.request import RequestSpec, Sampling
from shoal.engine import main
from shoal.engine.config import EngineConfig
from shoal.engine.loop import Runner
from shoal.engine.model import load as loading
from shoal.engine.model.registry import read_config
from shoal.engine.parallel.layout import Share, Split
from shoal.sim.agreement import agree
from shoal.sim.replay import replay
from shoal.telemetry import journal
from shoal.telemetry.journal import Submitted
from tests.sim.test_proofs import PARKING, Client, kinds
from tests.support.default_model import default_model
from tests.support.drive import make_scheduler, run_requests
from tests.support.ranks import ranks
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.torch, pytest.mark.processes]

HEADS = {"num_heads": 8, "num_kv_heads": 4}
FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "llama, biases everywhere": (2, {"attention_bias": True, "mlp_bias": True, **HEADS}),
    "mistral, one key head for two ranks": (2, {"architecture": "mistral", "num_heads": 8, "num_kv_heads": 1}),
    "qwen2, untied, three ranks, uneven inner size": (
        3,
        {"architecture": "qwen2", "tied": False, "num_heads": 6, "num_kv_heads": 3, "intermediate_size": 130},
    ),
    "qwen3, head norms, wide heads": (2, {"architecture": "qwen3", "head_dim": 32, **HEADS}),
}
PARITY = Path(__file__).parents[2] / "data" / "parity_prompts.jsonl"


def requests() -> list[RequestSpec]:
    """Greedy and sampled, with scores and without, two with one beginning; the longest in several chunks."""
    prompts = [tuple((37 * row + 11 * place) % 269 for place in range(n)) for row, n in enumerate((1, 3, 17, 100, 200))]
    prompts += [(*prompts[4][:128], 5), prompts[3]]
    kinds = (Sampling(temperature=0, logprobs=2), Sampling(seed=1), Sampling(seed=2, top_p=0.8, prompt_logprobs=1))
    return [
        RequestSpec(id=f"{row}", prompt=prompt, max_tokens=24, sampling=kinds[row % 3])
        for row, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(("tp", "variation"), FAMILIES.values(), ids=FAMILIES)
def test_every_family_makes_the_same_tokens_with_several_ranks(
    tp: int, variation: dict[str, Any], tmp_path: Path, new_runner: Callable[..., Any]
) -> None:
    folder = make_tiny_model(tmp_path / "model", **variation)
    one = new_runner(folder)
    expected = run_requests(one, make_scheduler(one, max_prefill_chunk=61), requests())
    with ranks(folder, tensor_parallel_size=tp) as several:
        found = run_requests(several, make_scheduler(several, max_prefill_chunk=61), requests())
        assert several.moved_bytes > 0
    for id, outcome in expected.items():
        assert found[id].tokens == outcome.tokens, id
        for one_score, other in zip(outcome.prompt_logprobs, found[id].prompt_logprobs, strict=True):
            assert other.logprob == pytest.approx(one_score.logprob, abs=1e-3)


def test_int8_weights_are_those_of_one_rank(tiny: Path, new_runner: Callable[..., Any]) -> None:
    """A matrix that is split by columns has the scales of its whole rows."""
    one = new_runner(tiny, quantization="int8")
    expected = run_requests(one, make_scheduler(one), requests())
    plain = run_requests(plain_runner := new_runner(tiny), make_scheduler(plain_runner), requests())
    with ranks(tiny, tensor_parallel_size=2, quantization="int8") as two:
        found = run_requests(two, make_scheduler(two), requests())
    assert {id: outcome.tokens for id, outcome in found.items()} == {id: o.tokens for id, o in expected.items()}
    assert any(plain[id].tokens != outcome.tokens for id, outcome in found.items())


def test_without_kernels_ranks_talk_by_torch_distributed(tiny: Path, new_runner: Callable[..., Any]) -> None:
    one = new_runner(tiny, kernels="off")
    expected = run_requests(one, make_scheduler(one, max_prefill_chunk=61), requests())
    with ranks(tiny, tensor_parallel_size=2, kernels="off") as two:
        found = run_requests(two, make_scheduler(two, max_prefill_chunk=61), requests())
    assert {id: outcome.tokens for id, outcome in found.items()} == {id: o.tokens for id, o in expected.items()}


@pytest.mark.parametrize(
    ("axis", "in_flight", "parks"),
    [
        ("tensor", 1, True),
        ("tensor", 2, False),
        ("pipeline", 3, True),
        ("context", 1, True),
    ],
)
def test_dis_02_preempted_parked_and_aborted_streams_keep_their_tokens_and_the_journal_its_proofs(
    tmp_path: Path,
    new_runner: Callable[..., Any],
    request: pytest.FixtureRequest,
    axis: str,
    in_flight: int,
    parks: bool,
) -> None:
    """The pool holds a third of what is needed. Who is aborted is the moment's matter; what they had made is not."""
    folder, path = make_tiny_model(tmp_path / "model", **HEADS), tmp_path / "journal"
    one = new_runner(folder)
    num_bytes = 16 * 2 * 2 * 16 * 4 * 16 * 4
    memory = {"kv_cache_bytes": num_bytes, "host_cache_bytes": num_bytes * 3 // 2 * parks}
    with ranks(folder, **{f"{axis}_parallel_size": 2}, **memory) as two:
        num_blocks, block_tokens = (8, 32) if axis == "context" else (16, 16)
        assert (two.num_blocks, two.block_tokens) == (num_blocks, block_tokens)
        copier = two.copier if parks else None
        changes = {"num_blocks": num_blocks, "block_tokens": block_tokens} | (PARKING if parks else {})
        changes["num_stages"] = 2 if axis == "pipeline" else 1
        if parks:
            changes["num_host_blocks"] = two.host.num_blocks
        num_requests = 500 if request.config.getoption("--full") else 20
        Client(two, in_flight, path, seed=in_flight, num_requests=num_requests, copier=copier, **changes)
        assert two.group.failure is None
    seen = kinds(path)
    assert seen["parked" if parks else "preempted"] > 0 and seen["token"] > 300
    assert replay(path) == sum(1 for _ in journal.read(path))
    assert agree(path) > 100

    records = [record for _, record in journal.read(path)]
    specs = [record.spec for record in records if isinstance(record, Submitted)]
    expected = run_requests(one, make_scheduler(one), specs)
    made: dict[str, list[int]] = {spec.id: [] for spec in specs}
    for record in records:
        for event in getattr(record, "events", ()):
            if event[0] == "token":
                made[event[1]].append(event[3])
    assert any(len(tokens) < len(expected[id].tokens) for id, tokens in made.items()), "nobody was aborted"
    for id, tokens in made.items():
        assert tokens == expected[id].tokens[: len(tokens)], id


@pytest.mark.parametrize(("tp", "cp", "pp"), [(3, 1, 1), (1, 2, 1), (3, 1, 2), (1, 1, 2), (1, 1, 3), (3, 2, 1)])
def test_ranks_answer_as_the_default_model_does(request: pytest.FixtureRequest, tp: int, cp: int, pp: int) -> None:
    """In float32, with prefix hits and chunks. The last three with --full: they are tried with tiny models too."""
    if (tp, cp, pp) in ((1, 1, 2), (1, 1, 3), (3, 2, 1)) and not request.config.getoption("--full"):
        pytest.skip("with --full")
    folder = default_model()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = [json.loads(line) for line in PARITY.read_text(encoding="utf-8").splitlines()]
    longest, most = (4000, 99) if request.config.getoption("--full") else (100, 10)
    rows = [row for row in rows if row["num_prompt_tokens"] <= longest][-most:]
    assert len(rows) > 3
    specs, answers = [], {}
    for number, row in enumerate(rows + rows[:2]):
        prompt = tuple(tokenizer.encode(row["text"], add_special_tokens=False).ids)
        greedy = Sampling(temperature=0)
        specs.append(RequestSpec(id=str(number), prompt=prompt, max_tokens=len(row["tokens"]), sampling=greedy))
        answers[str(number)] = row["tokens"]
    layout = {"tensor_parallel_size": tp, "context_parallel_size": cp, "pipeline_parallel_size": pp}
    with ranks(folder, **layout, kv_cache_bytes=200 << 20, max_model_len=2048) as several:
        limits = {"max_prefill_chunk": 64, "num_stages": pp, "max_steps_in_flight": pp}
        outcomes = run_requests(several, make_scheduler(several, **limits), specs)
    assert {id: outcome.tokens for id, outcome in outcomes.items()} == answers


def test_a_rank_reads_its_share_of_the_weights_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.engine.device import choose

    folder = make_tiny_model(tmp_path / "model", num_heads=8, num_kv_heads=4, tied=False)
    config, device = read_config(folder), choose(EngineConfig(dtype="float32", threads=1))
    real, num_bytes = loading.Checkpoint.copy, 0

    def copy(self: Any, name: str, target: Any, parts: Any) -> None:
        nonlocal num_bytes
        num_bytes += target.nbytes
        assert list(target.shape) == [part.size for part in parts]
        real(self, name, target, parts)

    monkeypatch.setattr(loading.Checkpoint, "copy", copy)

    def read(rank: int, size: int) -> int:
        nonlocal num_bytes
        num_bytes = 0
        loading.load_weights(folder, config, device, Share(Split(rank, size)))
        return num_bytes

    norms = (2 * config.num_layers + 1) * config.hidden_size * 4
    assert read(0, 1) == (folder / "model.safetensors").stat().st_size - _header_bytes(folder)
    assert {read(rank, 4) - norms for rank in range(4)} == {(read(0, 1) - norms) // 4}


def _header_bytes(folder: Path) -> int:
    with (folder / "model.safetensors").open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tensor_parallel_size": 3}, "engine.tensor_parallel_size is 3; .* allowed: 1, 2, 4"),
        (
            {"tensor_parallel_size": 2, "kv_disk_folder": "/tmp/x", "kv_disk_bytes": 1, "host_cache_bytes": 1 << 20},
            "engine.kv_disk_folder is '/tmp/x'; with tp=2",
        ),
        (
            {"tensor_parallel_size": 2, "peer_address": "tcp:127.0.0.1:7000"},
            "engine.peer_address is 'tcp:127.0.0.1:7000'; with tp=2",
        ),
        ({"tensor_parallel_size": 2, "kv_cache_bytes": 100}, "engine.kv_cache_bytes is 100; one block takes 8192"),
    ],
)
def test_what_cannot_be_had_is_refused_before_anything_is_served(
    tiny: Path, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        main.build(tiny, EngineConfig(dtype="float32", **settings), "tiny")


def test_rank_0_tells_the_others_nothing_of_copies_within_a_plan(tiny: Path) -> None:
    """They come by themselves; told twice, a rank would copy twice."""
    with ranks(tiny, tensor_parallel_size=2) as two:
        told: list[Any] = []
        real = two.runner._tell
        two.runner._tell = lambda message: (told.append(message), real(message))
        plan = StepPlan(1, [], [], [], 0, 0, ops=[object()], fetches=[object()])  # type: ignore[list-item]
        two.launch(plan)
        two.collect()
    assert [(step.plan.ops, step.plan.fetches) for step in told] == [([], [])]


def test_the_runner_of_one_rank_is_the_plain_one(tiny_runner: Runner) -> None:
    from shoal.engine import runner

    assert type(tiny_runner) is runner.Runner
