"""Sampling: the noise, the distribution it gives, the filters and penalties against naive versions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.core.plan import Admit, Slice, StepPlan
from shoal.core.request import Sampling
from shoal.engine.batch import RequestTable
from shoal.engine.config import EngineConfig
from shoal.engine.device import choose
from shoal.engine.sample import SamplingBatch, gumbel, noise_keys, sample

pytestmark = pytest.mark.torch

DEVICE = choose(EngineConfig(device="cpu", dtype="float32", threads=1))
NUM_DRAWS = 120_000
NONE = np.empty(0, np.int64)


def make_batch(num_rows: int, **columns: Any) -> SamplingBatch:
    """One setting for all rows, or an array; seeds 0, 1, 2 … unless given."""
    neutral = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition": 1, "presence": 0, "frequency": 0}
    neutral |= {"seed": np.arange(num_rows), "choice": 0, "position": 7}
    integers = ("top_k", "seed", "choice", "position")
    arrays = {
        f"{name}_R": np.broadcast_to(np.asarray(value, np.int64 if name in integers else np.float32), num_rows).copy()
        for name, value in (neutral | columns).items()
    }
    return SamplingBatch(**arrays, bias=(NONE, NONE, NONE.astype(np.float32)), banned=(NONE, NONE), history=None)


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Of Pearson's chi-square; cells of fewer than 5 expected are merged. Impossible ones must be empty."""
    expected = probabilities / probabilities.sum() * counts.sum()
    assert counts[expected == 0].sum() == 0
    rare = (expected < 5) & (expected > 0)
    cells = [*zip(counts[expected >= 5], expected[expected >= 5], strict=True)]
    if expected[rare].sum() >= 5:
        cells.append((counts[rare].sum(), expected[rare].sum()))
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in cells)
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2), torch.tensor(statistic / 2)))


# -- noise -------------------------------------------------------------------------------------------------------------


def naive_uniform(seed: int, choice: int, position: int, token: int) -> float:
    """The formula of sample.py in Python's integers."""
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    key = mix((mix((mix(seed & mask) + choice) & mask) + position) & mask)
    return ((mix((key + token * 0x9E3779B97F4A7C15) & mask) >> 11) + 0.5) / 2**53


def keys_of(seed: Any, choice: Any = 0, position: Any = 0) -> Tensor:
    return noise_keys(*(torch.as_tensor(value, dtype=torch.int64) for value in (seed, choice, position)))


def uniform_of(noise: Tensor) -> Tensor:
    return -torch.expm1(-torch.exp(-noise.double()))


@pytest.mark.parametrize("seed", [0, 1, 42, -1, 2**63 - 1, -(2**63)])
def test_noise_is_the_documented_hash(seed: int) -> None:
    tokens = torch.tensor([0, 1, 2, 49151, 151_935])
    for choice, position in ((0, 0), (0, 1), (3, 100_000)):
        noise = gumbel(keys_of([seed], [choice], [position]), tokens)[0]
        expected = [-math.log(-math.log1p(-naive_uniform(seed, choice, position, int(token)))) for token in tokens]
        assert noise.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_noise_never_changes_between_versions() -> None:
    """Streams are continued by other replicas: these numbers are part of the protocol."""
    noise = gumbel(keys_of([42, 42, 42, 43], [0, 0, 1, 0], [7, 8, 7, 7]), torch.tensor([0, 1000]))
    frozen = [[1.54617, 1.67405], [0.51518, 1.4715], [2.37312, -1.08223], [1.38227, 0.12779]]
    assert noise.tolist() == [pytest.approx(row, abs=1e-4) for row in frozen]


def test_noise_is_the_same_for_a_list_of_candidates_as_for_the_whole_vocabulary() -> None:
    keys = keys_of([5, 6], [0, 0], [1, 2])
    ids = torch.tensor([[9, 3, 77], [0, 99, 50]])
    assert torch.equal(gumbel(keys, ids), gumbel(keys, torch.arange(100)).gather(1, ids))


@pytest.mark.parametrize("varied", ["token", "position", "choice", "seed"])
def test_noise_is_uniform_along_each_of_its_arguments(varied: str) -> None:
    line = torch.arange(200_000)
    if varied == "token":
        noise = gumbel(keys_of([3]), line)[0]
    else:
        noise = gumbel(
            keys_of(*(line if name == varied else 3 + 0 * line for name in ("seed", "choice", "position"))),
            torch.tensor([11]),
        )[:, 0]
    uniform = uniform_of(noise)
    counts = torch.histc(uniform.float(), 1000, 0, 1).numpy()
    assert p_value(counts, np.full(1000, 1e-3)) > 1e-3
    neighbours = torch.corrcoef(torch.stack((uniform[:-1], uniform[1:])))[0, 1]
    assert abs(float(neighbours)) < 4 / math.sqrt(len(line))


def test_the_upper_tail_which_decides_who_wins_is_exact() -> None:
    noise = gumbel(keys_of(torch.arange(64), torch.zeros(64), torch.zeros(64)), torch.arange(1 << 17)).flatten()
    for distance in (8.0, 11.0, 13.0):  # P(noise > d) = 1 - exp(-exp(-d))
        expected = -math.expm1(-math.exp(-distance)) * len(noise)
        assert abs(int((noise > distance).sum()) - expected) < 4 * math.sqrt(expected)
    assert noise.isfinite().all()
    winners = noise.view(64, -1).max(-1).values
    assert len(set(winners.tolist())) == 64


# -- distribution ------------------------------------------------------------------------------------------------------


def allowed(probabilities: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Min-p, then top-k, then top-p of those k; what equals the last that stays, stays too."""
    kept = np.where(probabilities >= min_p * probabilities.max(), probabilities, 0)
    order = np.sort(kept)[::-1][: top_k or None]
    before = np.cumsum(order) - order
    threshold = order[np.flatnonzero((before < top_p * order.sum()) & (order > 0))[-1]]
    return np.where(kept >= threshold, kept, 0)


FILTERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.5},
    {"top_k": 10},
    {"top_k": 1},
    {"top_p": 0.7},
    {"min_p": 0.05},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
]


@pytest.mark.parametrize("setting", FILTERS, ids=str)
def test_draws_follow_the_exact_probabilities(setting: dict[str, Any]) -> None:
    logits = torch.randn(60, generator=torch.Generator().manual_seed(1)) * 2
    tokens = sample(logits.repeat(NUM_DRAWS, 1), make_batch(NUM_DRAWS, **setting), DEVICE)
    probabilities = torch.softmax(logits.double() / setting.get("temperature", 1), 0).numpy()
    exact = allowed(probabilities, setting.get("top_k", 0), setting.get("top_p", 1), setting.get("min_p", 0))
    counts = np.bincount(tokens.numpy(), minlength=60)
    assert setting == {"top_k": 1} or p_value(counts, exact) > 1e-3
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(exact))


def test_draws_along_the_positions_of_one_request_follow_them_too() -> None:
    logits = torch.randn(60, generator=torch.Generator().manual_seed(2)) * 2
    batch = make_batch(NUM_DRAWS, seed=1234, position=np.arange(NUM_DRAWS))
    counts = np.bincount(sample(logits.repeat(NUM_DRAWS, 1), batch, DEVICE).numpy(), minlength=60)
    assert p_value(counts, torch.softmax(logits.double(), 0).numpy()) > 1e-3


def test_a_vocabulary_of_real_size_is_drawn_from_evenly() -> None:
    """Low and high ids alike: ties from coarse noise would favour the low ones."""
    vocab_size, num_draws, counts = 49_152, 2048, np.zeros(64)
    for first in range(0, num_draws, 256):
        batch = make_batch(256, seed=np.arange(first, first + 256))
        tokens = sample(torch.zeros(256, vocab_size), batch, DEVICE)
        counts += np.bincount(tokens.numpy() * 64 // vocab_size, minlength=64)
    assert p_value(counts, np.full(64, 1 / 64)) > 1e-3


# -- filters -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [50, 3000])
@pytest.mark.parametrize("tied", [False, True])
def test_filters_leave_what_a_naive_version_leaves(vocab_size: int, tied: bool) -> None:
    """3,000 tokens are more than the candidates looked at first; wide filters over them take the second look."""
    rng = np.random.default_rng(5)
    rows, expected, settings = [], [], []
    for seed in range(150):
        logits = rng.standard_normal(vocab_size).astype(np.float32) * rng.choice([0.5, 3.0])
        logits = np.round(logits * 4) / 4 if tied else logits
        setting = {
            "temperature": float(rng.choice([0.5, 1.0])),
            "top_k": int(rng.choice([0, 0, 1, 5, 40, 1024, 2000])),
            "top_p": float(rng.choice([1.0, 0.1, 0.531, 0.951, 0.9991])),
            "min_p": float(rng.choice([0.0, 0.0, 0.101])),
        }
        scaled = logits / np.float32(setting["temperature"])
        probabilities = torch.softmax(torch.from_numpy(scaled).double(), 0).numpy()
        kept = allowed(probabilities, setting["top_k"], setting["top_p"], setting["min_p"])
        noise = gumbel(keys_of([seed], [0], [7]), torch.arange(vocab_size))[0].numpy()
        rows.append(logits)
        expected.append(int(np.where(kept > 0, scaled + noise, -np.inf).argmax()))
        settings.append(setting)
    columns = {name: [setting[name] for setting in settings] for name in settings[0]}
    tokens = sample(torch.from_numpy(np.stack(rows)), make_batch(len(rows), **columns), DEVICE)
    assert tokens.tolist() == expected


def test_a_row_does_not_care_about_its_neighbours() -> None:
    rng = np.random.default_rng(6)
    logits = torch.from_numpy(rng.standard_normal((40, 500)).astype(np.float32) * 3)
    columns = {
        "temperature": rng.choice([0, 0.7, 1], 40),
        "top_k": rng.choice([0, 20, 499], 40),
        "top_p": rng.choice([1, 0.8], 40),
        "min_p": rng.choice([0, 0.02], 40),
        "seed": rng.integers(-(2**63), 2**63 - 1, 40),
        "position": rng.integers(0, 1000, 40),
    }
    together = sample(logits.clone(), make_batch(40, **columns), DEVICE)
    order = rng.permutation(40)
    shuffled = sample(logits[order].clone(), make_batch(40, **{k: v[order] for k, v in columns.items()}), DEVICE)
    alone = [
        sample(logits[i : i + 1].clone(), make_batch(1, **{k: v[i] for k, v in columns.items()}), DEVICE)
        for i in range(40)
    ]
    assert together.tolist() == torch.cat(alone).tolist()
    assert together[torch.from_numpy(order)].tolist() == shuffled.tolist()


# -- bias, min_tokens, penalties: through the request table ------------------------------------------------------------

VOCAB = 30


def adjusted_argmax(logits: Tensor, requests: list[dict[str, Any]]) -> list[int]:
    """Greedy tokens of requests that each stand before their next token."""
    table = RequestTable(DEVICE, 16, VOCAB)
    plan = StepPlan(1, [], [], [], 0, 0)
    for index, request in enumerate(requests):
        prompt, output = request.get("prompt", (1,)), request.get("output", ())
        sampling = Sampling(temperature=0, **request.get("sampling", {}))
        tokens, blocks = (*prompt, *output), tuple(range(4))
        stops, least = request.get("stops", ()), request.get("min_tokens", 0)
        plan.admits.append(Admit(str(index), tokens, len(prompt), 0, blocks, sampling, 0, least, stops))
        plan.slices.append(Slice(str(index), 0, len(tokens), (), -1, True))
    table.take_in(plan)
    batch = table.build(plan)
    assert batch.sampling is not None
    return sample(logits.clone(), batch.sampling, DEVICE).tolist()


def test_logit_bias_is_added() -> None:
    logits = torch.arange(VOCAB).float().repeat(4, 1)
    requests = [
        {"sampling": {"logit_bias": ((3, 100.0),)}},
        {"sampling": {"logit_bias": ((VOCAB - 1, -100.0), (VOCAB - 2, -1.5))}},
        {},
        {"sampling": {"logit_bias": ((-1, 100.0), (VOCAB, 100.0))}},  # no such tokens: nothing to favour
    ]
    assert adjusted_argmax(logits, requests) == [3, VOCAB - 3, VOCAB - 1, VOCAB - 1]


def test_stop_tokens_wait_for_min_tokens() -> None:
    logits = torch.arange(VOCAB).float().repeat(4, 1)
    stops = (VOCAB - 1, VOCAB - 2, VOCAB + 5)
    requests = [
        {"min_tokens": 2, "stops": stops},
        {"min_tokens": 2, "stops": stops, "output": (4,)},
        {"min_tokens": 2, "stops": stops, "output": (4, 4)},
        {"stops": stops},
    ]
    assert adjusted_argmax(logits, requests) == [VOCAB - 3, VOCAB - 3, VOCAB - 1, VOCAB - 1]


def naive_penalties(logits: np.ndarray, prompt: tuple, output: tuple, sampling: dict[str, float]) -> np.ndarray:
    logits = logits.copy()
    for token in set(prompt) | set(output):
        penalty = sampling.get("repetition_penalty", 1.0)
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(output):
        logits[token] -= sampling.get("frequency_penalty", 0) * output.count(token)
        logits[token] -= sampling.get("presence_penalty", 0)
    return logits


def test_penalties_equal_a_naive_version() -> None:
    rng = np.random.default_rng(7)
    rows, requests, expected = [], [], []
    for index in range(60):
        logits = rng.standard_normal(VOCAB).astype(np.float32)
        prompt = tuple(rng.integers(0, VOCAB, rng.integers(1, 20)).tolist())
        output = tuple(rng.integers(0, VOCAB, rng.integers(0, 20)).tolist())
        sampling = {
            "repetition_penalty": float(rng.choice([1.0, 1.3, 0.8])),
            "frequency_penalty": float(rng.choice([0, 0.4, -0.3])),
            "presence_penalty": float(rng.choice([0, 0.9, -0.5])),
        }
        if index % 5 == 0:
            sampling = {}
        rows.append(torch.from_numpy(logits))
        requests.append({"prompt": prompt, "output": output, "sampling": sampling})
        expected.append(int(naive_penalties(logits, prompt, output, sampling).argmax()))
    assert adjusted_argmax(torch.stack(rows), requests) == expected
