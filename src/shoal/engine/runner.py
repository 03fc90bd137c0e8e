"""Computes steps. `launch` hands a plan to the device, `collect` returns the oldest result; `load` builds it all.

On a CPU `launch` returns when the step is done. On a CUDA device it returns when the work is queued, and `collect`
waits for the few numbers that the host needs; nothing else in a step waits for the device.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.kv.hashing import root_key
from shoal.core.plan import Logprobs, Slice, StepPlan, StepResult
from shoal.core.stepcost import Features, StepCost
from shoal.engine import invariance
from shoal.engine.batch import Batch, RequestTable
from shoal.engine.config import EngineConfig
from shoal.engine.device import Device, choose, kv_pool_bytes
from shoal.engine.kvstore import KVStore, block_bytes
from shoal.engine.model.attention import Attention, make_attention
from shoal.engine.model.layers import make_layers
from shoal.engine.model.llama import Llama
from shoal.engine.model.load import load_weights, model_digest
from shoal.engine.model.registry import read_config
from shoal.engine.model.spans import WHOLE, Shard
from shoal.engine.parallel.member import ALONE, Rank, Room
from shoal.engine.sample import Scores, sample, score
from shoal.engine.transfer.host import HostBlocks
from shoal.engine.transfer.wire_form import WireForm
from shoal.engine.warmup import largest_step, sweep

WARM_UP_NS = 2_000_000_000
_SCORED_ROWS = 128  # prompt positions scored at once: bounds the memory of rows x vocabulary in float32

log = logging.getLogger("shoal.engine")


@dataclass(slots=True)
class Launched:
    step: int
    began_ns: int
    start: Any  # mark of the device; None: nothing to compute
    end: Any = None
    tokens: Tensor | None = None
    scored_ids: list[str] = field(default_factory=list)  # requests with logprobs, in the order of `scores`
    num_tops: list[int] = field(default_factory=list)
    scores: Scores | None = None
    prompt_scores: dict[str, Scores] = field(default_factory=dict)


class Runner:
    """Implements the Runner protocol of loop.py. `leaves`, `admits` and slices of a plan are applied at launch."""

    def __init__(
        self,
        model: Llama,
        device: Device,
        *,
        num_blocks: int,
        block_tokens: int,
        max_model_len: int,
        digest: str,
        num_host_blocks: int = 0,
        shard: Shard = WHOLE,
    ) -> None:
        """`block_tokens`: of a sequence; of these, `shard` says which are kept here."""
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.vocab_size = model.config.vocab_size
        self.max_model_len = max_model_len
        self.model_digest = digest
        self._model = model
        self._device = device
        self._store = KVStore(model.config, device, num_blocks, block_tokens // shard.count)
        self.host = HostBlocks(self._store, device, num_host_blocks) if num_host_blocks else None
        self.blocks = WireForm(self._store, device)
        self.block_bytes = self.blocks.block_bytes  # over all ranks
        self._attention = self._make_attention(shard)
        self._layers = make_layers(model.weights.layers, self._attention, device)
        dtype = str(device.dtype).removeprefix("torch.")
        self.hash_root = root_key(digest, dtype, self._attention.kv_format, block_tokens)
        self._table = RequestTable(device, block_tokens, self.vocab_size)
        self._launched: deque[Launched] = deque()
        self._seams: dict[str, Scores] = {}  # score of a chunk's next token, which belongs to the next chunk

    def launch(self, plan: StepPlan) -> None:
        launched = Launched(plan.step, time.perf_counter_ns(), self._device.mark() if plan.slices else None)
        for request in plan.leaves:
            self._seams.pop(request, None)
        fresh = self._table.take_in(plan)
        if self._attention.reads_stale_values and fresh:
            self._store.clear(self._device.tensor(np.array(fresh, np.int64)))
        if plan.slices:
            self._compute(plan, launched)
        self._launched.append(launched)

    def collect(self) -> StepResult:
        launched = self._launched.popleft()
        result = StepResult(launched.step, [] if launched.tokens is None else launched.tokens.tolist())
        if launched.start is None:
            return result
        if launched.scores is not None:
            entries = _logprobs(launched.scores, launched.num_tops)
            result.logprobs = dict(zip(launched.scored_ids, entries, strict=True))
        result.prompt_logprobs = {
            request: _logprobs(scores, [scores.top_ids_MA.shape[1]] * len(scores.logprob_M))
            for request, scores in launched.prompt_scores.items()
        }
        result.busy_ns = self._device.elapsed_ns(launched.start, launched.end)
        result.latency_ns = time.perf_counter_ns() - launched.began_ns
        return result

    def compute(self, plan: StepPlan) -> StepResult:
        """`launch` and `collect` in one, with nothing else in flight."""
        self.launch(plan)
        return self.collect()

    def warm_up(self) -> list[tuple[Features, int]]:
        """Times invented steps for at most about 2 s: pairs of stepcost features and nanoseconds.

        Only before the first real step.
        """
        measured: list[tuple[Features, int]] = []
        cost = StepCost()
        ends_ns = time.perf_counter_ns() + WARM_UP_NS
        for plan in sweep(self.num_blocks, self.block_tokens, self.vocab_size, self.max_model_len):
            features = StepCost.features(plan.slices)
            if plan.step > 1 and time.perf_counter_ns() + cost.predict(features) > ends_ns:
                break
            self._write_history(plan)
            busy_ns = self.compute(plan).busy_ns
            if plan.step > 1:  # the first pays for what is set up once
                cost.update(features, busy_ns)
                measured.append((features, busy_ns))
        self.forget_all()
        return measured

    def _write_history(self, plan: StepPlan) -> None:
        """Blocks that an invented request has from before. Memory that was never written costs less to read."""
        blocks = [block for admit in plan.admits for block in admit.blocks[: -(-admit.computed // self.block_tokens)]]
        if blocks:
            self.clear(blocks)

    def clear(self, blocks: list[int]) -> None:
        """Zeros. Nothing in flight may use them."""
        self._store.clear(self._device.tensor(np.array(blocks, np.int64)))

    def forget_all(self) -> None:
        """Leaves nothing of earlier requests, as a new scheduler expects it. Nothing may be in flight."""
        assert not self._launched
        self.compute(StepPlan(0, list(self._table.rows), [], [], 0, 0))

    # -- a step --------------------------------------------------------------------------------------------------------

    def _make_attention(self, shard: Shard) -> Attention:
        return make_attention(self._model.config, self._device, self._store, self._model.head_norms, shard)

    def _build(self, plan: StepPlan) -> Batch:
        return self._table.build(plan)

    def _compute(self, plan: StepPlan, launched: Launched) -> None:
        batch = self._build(plan)
        prepared = self._attention.prepare(batch.spans)
        self._leave(plan, batch, self._layers(self._enter(batch, launched), prepared), launched)
        launched.end = self._device.mark()

    def _enter(self, batch: Batch, launched: Launched) -> Tensor:
        """What the first layer here gets, [T, E]."""
        return self._model.embed(batch.tokens_T)

    def _leave(self, plan: StepPlan, batch: Batch, hidden_TE: Tensor, launched: Launched) -> None:
        """What becomes of the last layer's results."""
        first = 0
        for piece in plan.slices:
            if (scores := self._score_prompt(piece, hidden_TE, first)) is not None:
                launched.prompt_scores[piece.id] = scores
            first += piece.count
        if batch.sampled:
            self._sample(plan.step, batch, hidden_TE, launched)

    def _sample(self, step: int, batch: Batch, hidden_TE: Tensor, launched: Launched) -> None:
        assert batch.sampling is not None
        if len(batch.sampled) < batch.num_tokens:
            last_row_R = self._device.tensor(np.array(batch.last_rows_R, np.int64))
            hidden_TE = hidden_TE.index_select(0, last_row_R)
        logits_RV = self._model.logits(hidden_TE)
        wanted = []  # rows of R whose request asked for logprobs
        for index, request in enumerate(batch.sampled):
            if request.sampling.logprobs is not None:
                wanted.append(index)
                launched.scored_ids.append(request.id)
                launched.num_tops.append(request.sampling.logprobs)
        if wanted:  # before sampling changes the logits
            rows = torch.tensor(wanted, dtype=torch.int64, device=logits_RV.device)
            logprobs_MV = logits_RV.index_select(0, rows).log_softmax(-1)
        tokens_R = launched.tokens = sample(logits_RV, batch.sampling, self._device)
        self._table.store_sampled(step, batch, tokens_R)
        if wanted:
            launched.scores = score(logprobs_MV, tokens_R.index_select(0, rows), max(launched.num_tops))

    def _score_prompt(self, piece: Slice, hidden_TE: Tensor, row: int) -> Scores | None:
        """Scores of the prompt tokens max(start, 1) .. start + count, where the request asked for them.

        `row` of the step is the slice's first.
        The logits at position p score token p + 1. So a chunk's last row scores the first token of the next chunk: it
        waits in `_seams`. The last prompt token's own row scores nothing: what follows it is sampled.
        """
        request = self._table.rows[piece.id]
        num_top = request.sampling.prompt_logprobs
        if num_top is None or piece.start >= request.num_prompt:
            return None
        # Positions [start, end) score tokens [start + 1, end + 1).
        end = min(piece.start + piece.count, request.num_prompt - 1)
        targets_M = self._table.tokens(piece.id, piece.start + 1, end + 1)
        parts = []
        if piece.start > 0:
            parts.append(self._seams.pop(piece.id))
        for first in range(0, len(targets_M), _SCORED_ROWS):
            targets = targets_M[first : first + _SCORED_ROWS]
            logits = self._model.logits(hidden_TE[row + first : row + first + len(targets)])
            parts.append(score(logits.log_softmax(-1), targets, num_top))
        if not parts:
            return None
        scores = Scores(*(torch.cat(columns) for columns in zip(*map(_columns, parts), strict=True)))
        if piece.start + piece.count < request.num_prompt:
            self._seams[piece.id] = Scores(*(column[-1:] for column in _columns(scores)))
            scores = Scores(*(column[:-1] for column in _columns(scores)))
        return scores if len(scores.logprob_M) else None


def _columns(scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
    return scores.logprob_M, scores.top_ids_MA, scores.top_logprobs_MA


def _logprobs(scores: Scores, num_tops: Sequence[int]) -> list[Logprobs]:
    columns = (column.tolist() for column in _columns(scores))
    return [
        Logprobs(logprob, tuple(zip(ids[:num_top], values[:num_top], strict=True)))
        for logprob, ids, values, num_top in zip(*columns, num_tops, strict=True)
    ]


# -- building ----------------------------------------------------------------------------------------------------------


def load(model_dir: Path, config: EngineConfig, rank: Rank = ALONE) -> Runner:
    """The whole engine's, or that of one of its ranks, with its share of model and memory.

    Raises ValueError naming what cannot be served: a field of config.json, a tensor, a setting.
    """
    device = choose(config)
    settings = read_config(model_dir)
    rank.layout.check(settings)
    max_model_len = config.max_model_len or settings.max_context
    if max_model_len > settings.max_context:
        raise ValueError(
            f"engine.max_model_len is {max_model_len}; the model's context is {settings.max_context} tokens"
        )
    comms, share = rank.join(device), rank.share(settings)
    model = Llama(share.config(settings), load_weights(model_dir, settings, device, share, comms.layer))
    block_tokens = config.block_size * rank.layout.cp
    build = functools.partial(
        Runner if rank.make_runner is None else functools.partial(rank.make_runner, comms=comms),
        model,
        device,
        block_tokens=block_tokens,
        shard=Shard(share.context.size, share.context.rank),
        digest="" if rank.number else model_digest(model_dir, config.quantization),  # rank 0 speaks for all
    )
    peak_bytes = device.peak_bytes(
        lambda: build(num_blocks=1, max_model_len=max_model_len).compute(largest_step(config, max_model_len))
    )
    one, num_ranks = block_bytes(model.config, device.dtype, config.block_size), rank.layout.size
    num_blocks, num_host_blocks = rank.agree(
        Room(kv_pool_bytes(config, device, peak_bytes, num_ranks) // one, config.host_cache_bytes // num_ranks // one)
    )
    if num_blocks < 1:
        raise ValueError(f"engine.kv_cache_bytes is {config.kv_cache_bytes}; one block takes {one * num_ranks} bytes")
    if config.host_cache_bytes and not num_host_blocks:
        taken = one * num_ranks
        raise ValueError(f"engine.host_cache_bytes is {config.host_cache_bytes}; one block takes {taken} bytes")
    held = num_blocks * block_tokens
    if config.max_model_len > held:
        raise ValueError(
            f"engine.max_model_len is {config.max_model_len}; the KV pool holds {held} tokens, at {one * num_ranks} "
            f"bytes per {block_tokens}: allowed: at most {held}, or a larger engine.kv_cache_bytes"
        )
    max_model_len = min(max_model_len, held)  # where nobody asked for so much
    log.info(
        "model.loaded",
        {
            "dtype": str(device.dtype),
            "device": str(device.torch_device),
            "blocks": num_blocks,
            "host_blocks": num_host_blocks,
        },
    )
    runner: Runner = build(
        num_blocks=num_blocks, num_host_blocks=num_host_blocks, max_model_len=max_model_len, **rank.leads
    )
    ranks_of_layer = rank.layout.tp * rank.layout.cp
    runner.block_bytes = one // model.config.num_layers * settings.num_layers * ranks_of_layer
    if config.batch_invariant and not invariance.kept(runner):
        raise ValueError(
            "engine.batch_invariant is true; torch's products on this machine give a row other numbers beside other "
            "rows: it needs shoal's own kernels (engine.kernels: auto, and a C++ compiler), or another machine"
        )
    return runner
