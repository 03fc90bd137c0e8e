"""Bytes between two engines on this machine: GB/s and processor time per GB, by transport and by the block service.

    reads     one window read again and again, in pieces of a size, three of them asked for at a time
    service   blocks of the default model from one KV store into another: pinned, copied out, digests made and checked,
              copied in; with the default pieces

Owner and reader are two processes. NIXL is told to use TCP, which is what it has between hosts without RDMA. What a
transfer does to the steps beside it is another bench's question.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

from common import Report, arguments

os.environ.setdefault("UCX_TLS", "tcp")

from shoal.engine.transfer.fetch import Fetched, Fetcher, Order
from shoal.engine.transfer.lend import Lender
from shoal.engine.transfer.nixl import Nixl
from shoal.engine.transfer.shm import Shm
from shoal.engine.transfer.tcp import Tcp
from shoal.engine.transfer.transport import WINDOW_BYTES, Memory, Transport
from shoal.wire.messages import EngineInfo

SIZES = [64 << 10, 256 << 10, 1 << 20, 2 << 20]
ASKED = 3  # reads on their way
NUM_LAYERS, LAYER_BYTES = 30, 12_288  # of the default model in bfloat16
NUM_BLOCKS = 128
SECRET = b"of the bench"
INFO = EngineInfo(
    model="m", model_digest="d", hash_root=b"root", hash_block_tokens=16, max_model_len=1 << 15, vocab_size=1000
)
LIMIT_S = 60.0
TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "shm": Shm,
    "tcp": Tcp,
    "nixl": lambda: Nixl(f"process {os.getpid()}"),
}


class Owner:
    """The other process. It answers each line with one of JSON."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, word: str) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextmanager
def owner(kind: str, what: str):  # type: ignore[no-untyped-def]
    command = [sys.executable, __file__, "--own", kind, what]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Owner(process)
        finally:
            process.kill()


def timed(owner: Owner, move: Callable[[], int]) -> tuple[float, float, float]:
    """GB/s, and processor seconds per GB of the reader and of the owner."""
    theirs, ours, began = owner.ask("cpu"), time.process_time(), time.perf_counter()
    gb = move() / 1e9
    wall, ours, theirs = time.perf_counter() - began, time.process_time() - ours, owner.ask("cpu") - theirs
    return gb / wall, ours / gb, theirs / gb


def reads(kind: str, total_bytes: int) -> list[tuple[Any, ...]]:
    rows = []
    transport, target = TRANSPORTS[kind](), Memory()
    with owner(kind, "window") as other:
        reader = transport.open(bytes.fromhex(other.ask("door")), target, LIMIT_S)

        def move(size: int, num_bytes: int) -> int:
            num_reads = num_bytes // size
            for number in range(num_reads + ASKED):
                if number < num_reads:
                    reader.read(number * size % WINDOW_BYTES, size)
                if number >= ASKED:
                    while not reader.poll():
                        pass
            return num_reads * size

        for size in SIZES:
            move(size, WINDOW_BYTES)
            rows.append((kind, size >> 10, *timed(other, lambda size=size: move(size, total_bytes))))
        reader.close()
        assert all(target.view[place] == place % 251 for place in range(0, WINDOW_BYTES, 4099))
    transport.close()
    return rows


# -- the service -------------------------------------------------------------------------------------------------------


def new_form(seed: int):  # type: ignore[no-untyped-def]
    """A KV store like the default model's, full of random bytes if there is a seed."""
    import torch

    from shoal.engine.config import EngineConfig
    from shoal.engine.device import choose
    from shoal.engine.kvstore import KVStore
    from shoal.engine.model.config import ModelConfig, Rope
    from shoal.engine.transfer.wire_form import WireForm

    config = ModelConfig(
        architecture="",
        vocab_size=1,
        hidden_size=1,
        intermediate_size=1,
        num_layers=NUM_LAYERS,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        norm_eps=1e-5,
        rope=Rope(theta=1e4),
        max_context=8192,
        tied=True,
    )
    device = choose(EngineConfig(dtype="bfloat16", threads=1))
    store = KVStore(config, device, NUM_BLOCKS, 16)
    if seed:
        store.bytes_NBX.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    return store, WireForm(store, device)


class Lent:
    """A Store of lend.py: block n has key n."""

    num_layers = NUM_LAYERS
    block_bytes = NUM_LAYERS * LAYER_BYTES

    def __init__(self, take: Callable[[int, int, memoryview], None]) -> None:
        self.take = take

    def pin(self, lease: int, keys: Sequence[bytes], tell: Callable[[Sequence[int]], None]) -> None:
        tell([int.from_bytes(key, "big") for key in keys])

    def unpin(self, lease: int) -> None:
        pass


async def service(kind: str, repeats: int) -> tuple[Any, ...]:
    store, form = new_form(0)
    transport = TRANSPORTS[kind]()
    fetcher = Fetcher(
        [transport],
        name="reader",
        incarnation="r",
        secret=SECRET,
        hash_root=INFO.hash_root,
        num_layers=form.num_layers,
        block_bytes=form.block_bytes,
    )
    keys = tuple(block.to_bytes(16, "big") for block in range(NUM_BLOCKS))
    with owner(kind, "blocks") as other:
        address = await asyncio.to_thread(other.ask, "address")

        async def fetch() -> Fetched:
            told: asyncio.Future[Fetched] = asyncio.get_running_loop().create_future()
            order = Order(number=1, address=address, incarnation="o", keys=keys)
            fetcher.start(order, form.put, LIMIT_S, told.set_result)
            return await told

        first = await fetch()
        assert first.num_good == NUM_BLOCKS, first
        theirs, ours, began = await asyncio.to_thread(other.ask, "cpu"), time.process_time(), time.perf_counter()
        for _ in range(repeats):
            assert (await fetch()).num_good == NUM_BLOCKS
        wall, ours = time.perf_counter() - began, time.process_time() - ours
        theirs = await asyncio.to_thread(other.ask, "cpu") - theirs
        digest = await asyncio.to_thread(other.ask, "sum")
    assert await fetcher.close(LIMIT_S)
    transport.close()
    gb = repeats * NUM_BLOCKS * form.block_bytes / 1e9
    return kind, gb / wall, ours / gb, theirs / gb, first.busy_ns / 1e6, digest == checksum(store)


def checksum(store: Any) -> int:
    return int(store.bytes_NBX.sum(dtype=__import__("torch").int64))


# -- the owner's process -----------------------------------------------------------------------------------------------


def own_window(kind: str) -> None:
    transport, memory = TRANSPORTS[kind](), Memory()
    memory.view[:] = bytes(place % 251 for place in range(WINDOW_BYTES))
    for line in sys.stdin:
        answer: Any = time.process_time() if line == "cpu\n" else transport.register(memory).hex()
        print(json.dumps(answer), flush=True)


async def own_blocks(kind: str) -> None:
    store, form = new_form(1)
    lender = Lender(Lent(form.take), [TRANSPORTS[kind]()])
    await lender.listen("tcp:127.0.0.1:0", secret=SECRET, incarnation="o", info=INFO)
    while line := await asyncio.to_thread(sys.stdin.readline):
        answers: dict[str, Callable[[], Any]] = {
            "cpu": time.process_time,
            "address": lambda: lender.listener.address,
            "sum": lambda: checksum(store),
        }
        print(json.dumps(answers[line.strip()]()), flush=True)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--own", nargs=2, metavar=("TRANSPORT", "WHAT"), help="be the other process")
    options = parser.parse_args()
    if options.own:
        kind, what = options.own
        if what == "window":
            own_window(kind)
        else:
            asyncio.run(own_blocks(kind))
        return
    report = Report("transports", options)
    kinds = [kind for kind in TRANSPORTS if kind != "nixl" or importlib.util.find_spec("nixl_cu13")]
    read_rows = [row for kind in kinds for row in reads(kind, (1 if options.quick else 8) << 28)]
    report.table("reads", ("transport", "KiB", "GB/s", "reader s/GB", "owner s/GB"), read_rows)
    rows = [asyncio.run(service(kind, 3 if options.quick else 20)) for kind in kinds]
    columns = ("transport", "GB/s", "reader s/GB", "owner s/GB", f"first {NUM_BLOCKS} blocks ms", "exact")
    report.table("service", columns, rows)
    for row in rows:
        report.claim(f"{row[0]} service GB/s", row[1], ">= 0.2", row[1] >= 0.2)
        report.claim(f"{row[0]} service exact", row[5], "True", row[5])
    report.finish()


if __name__ == "__main__":
    main()
