"""What it costs to give every moved block a digest: XXH3 of 128 bits, and others beside it.

Hot: one block again and again. Cold: blocks of a pool far larger than the processor's caches, each once, as when they
come from elsewhere; what counts. Share: of one core's time, where blocks move at 200 MB/s and each is digested once;
steps share with it no lock and, with one core left to copies, no core.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
import zlib
from collections.abc import Callable
from statistics import median

import numpy as np
from numpy.typing import NDArray

from common import Report, arguments
from shoal.engine.transfer.digest import digest

BLOCK_BYTES = 368_640  # of the default model: 16 tokens in 30 layers
MOVED_BYTES_PER_S = 200e6  # about 8,700 tokens of KV
MOST_SHARE = 0.02
POOL_BYTES = 1 << 29

Digest = Callable[[NDArray[np.uint8]], object]

_into = np.empty(BLOCK_BYTES, np.uint8)
WAYS: tuple[tuple[str, int, Digest], ...] = (
    ("XXH3, the engine's", 128, digest),
    ("BLAKE2b", 128, lambda block: hashlib.blake2b(block, digest_size=16).digest()),
    ("SHA-256", 256, lambda block: hashlib.sha256(block).digest()),
    ("CRC-32", 32, lambda block: zlib.crc32(block)),
    ("a copy, for comparison", 0, lambda block: np.copyto(_into, block[: len(_into)])),
)


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    report = Report("digests", options)
    pool_PX = np.random.default_rng(0).integers(0, 256, (POOL_BYTES // BLOCK_BYTES, BLOCK_BYTES), np.uint8)
    rounds = 3 if options.quick else 9
    rows, shares = [], {}
    for name, bits, call in WAYS:
        hot = rate(call, [pool_PX[0]] * 100, rounds)
        cold = rate(call, list(pool_PX[: 300 if bits in (0, 128, 32) else 100]), rounds)
        shares[name] = MOVED_BYTES_PER_S / cold
        lock = f"{ran_meanwhile(call, pool_PX):.2f}"
        rows.append((name, bits, hot / 1e9, cold / 1e9, BLOCK_BYTES / cold * 1e6, 100 * shares[name], lock))
    columns = ("way", "bits", "hot GB/s", "cold GB/s", "us a block, cold", "share at 200 MB/s, %", "others ran")
    report.table("digests of a block of 368,640 bytes, one thread", columns, rows)
    share = shares[WAYS[0][0]]
    report.claim(
        "share of a core's time for digests at 200 MB/s", round(share, 4), f"<= {MOST_SHARE:g}", share <= MOST_SHARE
    )
    ran = float(rows[0][-1])
    report.claim("share of the time in which another thread ran Python", ran, ">= 0.5", ran >= 0.5)
    report.finish()


def rate(call: Digest, blocks: list[NDArray[np.uint8]], rounds: int) -> float:
    """Bytes per second, the median of some rounds."""
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        for block in blocks:
            call(block)
        took.append(time.perf_counter() - began)
    return len(blocks) * BLOCK_BYTES / median(took)


def ran_meanwhile(call: Digest, pool_PX: NDArray[np.uint8]) -> float:
    """Share of the time of calls on 4 MB in which another thread could run Python, which is never forced to yield."""
    data = pool_PX.reshape(-1)[: 4 << 20]
    before = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    try:
        ran = total = 0.0
        for _ in range(20):
            began, spans = threading.Event(), []

            def work(began: threading.Event = began, spans: list[float] = spans) -> None:
                began.set()
                start = time.perf_counter()
                call(data)
                spans += (start, time.perf_counter())

            thread = threading.Thread(target=work)
            thread.start()
            began.wait()
            now = time.perf_counter()
            thread.join()
            total += spans[1] - spans[0]
            ran += max(0.0, spans[1] - max(now, spans[0]))
        return ran / total
    finally:
        sys.setswitchinterval(before)


if __name__ == "__main__":
    main()
