"""The disk tier's store by itself: how fast blocks are written and found, and what a call costs whoever asks.

Writes end in the page cache, as the store leaves them; `cold` reads come from the device, after its pages were dropped.
Beside it, one file for each block: what the store does not do.
"""

from __future__ import annotations

import os
import queue
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from common import Report, arguments
from shoal.core.kv.hashing import chain, root_key, scope_key
from shoal.engine.transfer.disk import DiskBlocks
from shoal.engine.transfer.diskjobs import Outcome

BLOCK_BYTES, BLOCK_TOKENS = 368_640, 16  # of the default model
AT_ONCE = 16  # calls whose outcome is awaited
MOST_CALL_US = 100.0  # p99; a step takes some milliseconds
LEAST_BYTES_PER_S = 200e6  # of a read from the page cache: as a peer transfer

ROOT = root_key("bench", "bfloat16", "none", BLOCK_TOKENS)
SCOPE = scope_key(ROOT)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; default: the one for temporary files")
    options = parser.parse_args()
    report = Report("disk", options)
    num_blocks = 200 if options.quick else 2000
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows, calls = store(Path(folder) / "kv", num_blocks)
        rows += files(Path(folder) / "files", num_blocks)
    report.table("blocks of 368,640 bytes", ("what", "MB/s", "p50 us", "p99 us"), rows)
    call_us = float(np.percentile(calls, 99))
    report.table("what a call takes its caller", ("p50 us", "p99 us", "max us"),
                 [(float(np.percentile(calls, 50)), call_us, float(max(calls)))])  # fmt: skip
    report.claim("a call takes its caller, p99 us", round(call_us, 1), f"<= {MOST_CALL_US:g}", call_us <= MOST_CALL_US)
    warm = next(row[1] for row in rows if row[0] == "store: read, in the page cache")
    report.claim("MB/s of reads from the page cache", round(warm), f">= {LEAST_BYTES_PER_S / 1e6:g}",
                 warm >= LEAST_BYTES_PER_S / 1e6)  # fmt: skip
    report.finish()


def store(folder: Path, num_blocks: int) -> tuple[list[tuple[Any, ...]], list[float]]:
    rng = np.random.default_rng(0)
    blocks_HX = rng.integers(0, 256, (AT_ONCE, BLOCK_BYTES), np.uint8)
    ids = rng.integers(0, 49152, num_blocks * BLOCK_TOKENS).tolist()
    keys = chain(SCOPE, ids, BLOCK_TOKENS)
    tokens = [tuple(ids[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS]) for i in range(num_blocks)]
    parents = [SCOPE, *keys[:-1]]

    def opened() -> DiskBlocks:
        capacity_bytes = num_blocks * (BLOCK_BYTES + 512) + (1 << 20)
        return DiskBlocks(folder, root=ROOT, block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES,
                          capacity_bytes=capacity_bytes, dropped=lambda keys: None)  # fmt: skip

    def write(disk: DiskBlocks) -> Call:
        return lambda i, tell: disk.write(keys[i], tokens[i], parents[i], blocks_HX[i % AT_ONCE], tell)

    def read(disk: DiskBlocks) -> Call:
        return lambda i, tell: disk.read(keys[i], blocks_HX[i % AT_ONCE], tell)

    calls: list[float] = []
    disk = opened()
    rows = [timed("store: write, file grows", write(disk), num_blocks, calls)]
    told: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    disk.forget(keys, told.put)
    for _ in keys:
        told.get(timeout=60)
    rows.append(timed("store: write, file as large as it gets", write(disk), num_blocks, calls))
    rows.append(timed("store: read, in the page cache", read(disk), num_blocks, calls))
    assert disk.close(60)
    drop_pages(folder / "blocks")
    began = time.perf_counter()
    disk = opened()
    rows.append((f"store: start with {num_blocks} blocks, cold", None, (time.perf_counter() - began) * 1e6, None))
    assert disk.num_blocks == num_blocks
    rows.append(timed("store: read, cold", read(disk), num_blocks, calls))
    assert disk.close(60) and not any(disk.errors.values())
    return rows, calls


Call = Callable[[int, Callable[[Outcome], None]], None]


def timed(name: str, call: Call, num_blocks: int, calls: list[float]) -> tuple[Any, ...]:
    """A row. Some calls at once; each time is from the call to its outcome, waiting in line included."""
    told: queue.SimpleQueue[tuple[int, str, float]] = queue.SimpleQueue()
    asked_s = [0.0] * num_blocks
    took = []

    def ask(i: int) -> None:
        asked_s[i] = time.perf_counter()
        call(i, lambda outcome: told.put((i, outcome.reason, time.perf_counter())))
        calls.append((time.perf_counter() - asked_s[i]) * 1e6)

    began = time.perf_counter()
    for i in range(min(AT_ONCE, num_blocks)):
        ask(i)
    for done in range(num_blocks):
        i, reason, at_s = told.get(timeout=60)
        assert not reason, reason
        took.append((at_s - asked_s[i]) * 1e6)
        if done + AT_ONCE < num_blocks:
            ask(done + AT_ONCE)
    rate = num_blocks * BLOCK_BYTES / (time.perf_counter() - began) / 1e6
    return name, rate, float(np.percentile(took, 50)), float(np.percentile(took, 99))


def files(folder: Path, num_blocks: int) -> list[tuple[Any, ...]]:
    """A file for each block, written under another name first; one after the other, without digests."""
    folder.mkdir()
    block = np.random.default_rng(0).integers(0, 256, BLOCK_BYTES, np.uint8)

    def write(i: int) -> None:
        temporary = folder / secrets.token_hex(8)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.pwritev(fd, [block], 0)
        os.close(fd)
        os.rename(temporary, folder / f"{i:032x}")

    def read(i: int) -> None:
        fd = os.open(folder / f"{i:032x}", os.O_RDONLY)
        os.preadv(fd, [block], 0)
        os.close(fd)

    rows = []
    for name, call in (
        ("write", write),
        ("write over one that is there", write),
        ("read, in the page cache", read),
        ("remove", lambda i: os.unlink(folder / f"{i:032x}")),
    ):
        took = []
        for i in range(num_blocks):
            began = time.perf_counter()
            call(i)
            took.append((time.perf_counter() - began) * 1e6)
        row = float(np.percentile(took, 50)), float(np.percentile(took, 99))
        rows.append((f"a file each: {name}", num_blocks * BLOCK_BYTES / sum(took), *row))
    return rows


def drop_pages(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
