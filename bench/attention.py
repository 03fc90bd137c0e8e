"""How long attention takes in one layer: our kernel against torch's gather and fused attention, at the same shapes.

The default model's heads. Both backends run in turn, over the keys and values of many layers, so that these come from
memory as they do in a step. Medians, in microseconds; "memory" is what reading keys and values once would take at the
bandwidth of a sum measured in the same run.
"""

from __future__ import annotations

import dataclasses
import statistics
import time

import numpy as np
import torch

from common import Report, arguments
from shoal.engine.config import EngineConfig
from shoal.engine.device import Device, choose
from shoal.engine.kvstore import KVStore
from shoal.engine.model.attention import Attention, make_attention
from shoal.engine.model.config import ModelConfig, Rope
from shoal.engine.model.spans import Spans

BLOCK_TOKENS = 16
CASES = {  # sequences, tokens before, new tokens of each, layers
    "1 decode at 160": (1, 159, 1, 30),
    "16 decodes at 160": (16, 159, 1, 30),
    "64 decodes at 160": (64, 159, 1, 20),
    "1 decode at 2,000": (1, 1999, 1, 30),
    "chunk of 512 at 0": (1, 0, 512, 6),
    "chunk of 512 at 1,024": (1, 1024, 512, 6),
}


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    report = Report("attention", options)
    device = choose(EngineConfig())
    if device.attention != "paged":
        raise SystemExit("our kernels cannot be had on this machine: nothing to compare")
    bandwidth = read_bytes_per_s()
    rows = []
    with torch.inference_mode():
        for name, case in CASES.items():
            paged_us, torch_us = times(device, *case, rounds=3 if options.quick else 15)
            sequences, before, new, _ = case
            memory_us = sequences * (before + new) * 2 * 3 * 64 * device.dtype.itemsize / bandwidth * 1e6
            rows.append((name, paged_us, torch_us, torch_us / paged_us, memory_us))
    report.table("attention of a layer", ("step", "kernel us", "torch us", "torch / kernel", "memory us"), rows)
    report.claim("slowest case, torch / kernel", min(row[3] for row in rows), ">= 1", min(row[3] for row in rows) >= 1)
    report.finish()


def times(device: Device, sequences: int, before: int, new: int, layers: int, *, rounds: int) -> tuple[float, float]:
    config = ModelConfig(
        architecture="",
        vocab_size=1,
        hidden_size=576,
        intermediate_size=1,
        num_layers=layers,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        norm_eps=1e-5,
        rope=Rope(),
        max_context=8192,
        tied=True,
    )
    blocks = -(-(before + new) // BLOCK_TOKENS)
    order = np.random.default_rng(0).permutation(sequences * blocks).astype(np.int32)
    row_S = np.arange(sequences, dtype=np.int32) * new
    spans = Spans(row_S, np.full_like(row_S, before), np.full_like(row_S, new), order.reshape(sequences, blocks))
    qkv_TP = torch.randn(sequences * new, 15 * 64).to(device.dtype)
    backends: list[Attention] = []
    for name in ("paged", "sdpa"):
        store = KVStore(config, device, len(order), BLOCK_TOKENS)
        for layer in range(layers):
            store.layer(layer).normal_()
        backends.append(
            make_attention(config, dataclasses.replace(device, attention=name), store, [(None, None)] * layers)
        )
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        for backend, seconds in zip(backends, found, strict=True):
            prepared = backend.prepare(spans)
            began = time.perf_counter()
            for layer in range(layers):
                backend.attend(layer, qkv_TP, prepared)
            seconds.append((time.perf_counter() - began) / layers)
    kernel_s, torch_s = (statistics.median(seconds[1:]) for seconds in found)  # the first round warms up
    return kernel_s * 1e6, torch_s * 1e6


def read_bytes_per_s() -> float:
    """Bytes read, of the fastest of ten reads of 256 MiB."""
    data = torch.ones(256 << 18)
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        data.sum()
        seconds.append(time.perf_counter() - began)
    return data.nbytes / min(seconds)


if __name__ == "__main__":
    main()
