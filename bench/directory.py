"""The gateway's directory of who holds which prefix blocks: how large, how fast?

It is filled by 16 replicas with conversations of 125 blocks (2,000 tokens), a fifth of which two or more replicas hold.

lookup   who holds the longest part of a prompt of 2,000 tokens: known to one replica, to all, to nobody
tell     blocks stored and dropped a second, as engines tell them: when there is room, and when each needs another's
forget   a replica is lost: one call, with as many sets of holders as there are; then all of them that may be
feed     the engine's side: a gateway connects to an engine of 100,000 blocks, and is told of them piece by piece
"""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable
from hashlib import blake2b

from common import Report, arguments
from shoal.core.kv.hashing import NO_KEY
from shoal.core.kv.news import DEVICE, HOST
from shoal.engine.holdings import Holdings
from shoal.fleet.directory import MAX_ENTRIES, Directory
from shoal.fleet.holders import MAX_SETS
from shoal.workload.latency import percentile

REPLICAS, BLOCKS = 16, 125
MAX_BYTES, LOOKUP_US = 256 << 20, 100.0
COMMON = 12  # of a conversation's blocks: one of 40 system prompts


def conversation(number: int) -> list[bytes]:
    return [_key(f"system {number % 40} {place}") for place in range(COMMON)] + [
        _key(f"{number} {place}") for place in range(COMMON, BLOCKS)
    ]


def _key(label: str) -> bytes:
    return blake2b(label.encode(), digest_size=16).digest()


def tell(directory: Directory, replica: int, keys: list[bytes], tiers: int = DEVICE) -> None:
    directory.tell(f"engine-{replica}", b"".join(keys), b"".join((NO_KEY, *keys[:-1])), bytes([tiers]) * len(keys))


def fill(directory: Directory, first: int, count: int, chance: random.Random) -> float:
    """Seconds inside the directory."""
    spent = 0.0
    for number in range(first, first + count):
        keys = conversation(number)
        others = chance.sample(range(REPLICAS), 2) if number % 5 == 0 else []
        begin = time.perf_counter()
        tell(directory, number % REPLICAS, keys)
        for replica in others:
            tell(directory, replica, keys, DEVICE | HOST)
        spent += time.perf_counter() - begin
    return spent


def microseconds(call: Callable[[], object], count: int) -> list[float]:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - begin))
    return times


def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    report = Report("directory", options)
    chance = random.Random(1)
    max_entries = 200_000 if options.quick else MAX_ENTRIES
    full = max_entries // (BLOCKS - COMMON) + 1

    tracemalloc.start()
    directory = Directory(max_entries)
    fill(directory, 0, full // 10, chance)
    measured = tracemalloc.get_traced_memory()[0]
    report.table("memory, a tenth full", ("entries", "MB told", "MB measured"), [_memory(directory, measured)])
    tracemalloc.stop()

    rows = []
    told, spent = 0, fill(directory, full // 10, full - full // 10, chance)
    told = int((full - full // 10) * 1.4 * BLOCKS)
    rows.append(("into free room", told, told / spent))
    report.table("memory, full", ("entries", "MB told", "bytes an entry"), [_size(directory)])
    num_entries, given_up = len(directory), directory.num_given_up
    spent = fill(directory, full, full // 4, chance)
    told = int(full // 4 * 1.4 * BLOCKS)
    rows.append(("into a full one", told, told / spent))
    replaced = directory.num_given_up - given_up
    num_left_out = directory.num_left_out

    lookups = {
        "one holder": conversation(full),
        "three holders": conversation(full - full % 5),
        "all": conversation(full + 1),
        "nobody": [_key(f"unknown {place}") for place in range(BLOCKS)],
    }
    for replica in range(REPLICAS):
        tell(directory, replica, lookups["all"])
    looked = []
    for name, keys in lookups.items():
        found = directory.holders(keys)
        times = microseconds(lambda keys=keys: directory.holders(keys), 300)
        looked.append((name, len(found), percentile(times, 50), percentile(times, 99)))
    report.table(f"holders() of {BLOCKS} blocks", ("prompt", "holders", "p50 us", "p99 us"), looked)
    report.table("tell()", ("blocks", "number", "a second"), rows)

    piece = conversation(full + 2)
    while len(piece) < 1900:
        piece += conversation(full + 3 + len(piece))
    (piece_us,) = microseconds(lambda: tell(directory, 3, piece), 1)
    num_sets = len(directory._sets)
    (forget_us,) = microseconds(lambda: directory.forget("engine-3"), 1)
    tidy_us = microseconds(directory.tidy, 20)
    most_us = _most_sets()
    take_us, follow_us, piece_of_all_us = _feed()
    report.table(
        "the longest calls",
        ("call", "ms"),
        [
            ("tell() of a piece of a snapshot, 64 KB", piece_us / 1e3),
            (f"forget() with {num_sets} sets of holders", forget_us / 1e3),
            (f"forget() with {MAX_SETS} sets of holders", most_us / 1e3),
            ("tidy(), longest of 20", max(tidy_us) / 1e3),
            ("engine: follow() with 100,000 blocks", follow_us / 1e3),
            ("engine: piece() of them, longest", piece_of_all_us / 1e3),
            ("engine: take() of 100 blocks, with four gateways", take_us / 1e3),
        ],
    )
    num_bytes = directory.num_bytes
    report.claim("MB when full", round(num_bytes / 2**20, 1), f"<= {MAX_BYTES >> 20}", num_bytes <= MAX_BYTES)
    report.claim("entries when full", num_entries, f">= {max_entries * 99 // 100}", num_entries >= max_entries * 0.99)
    slowest = max(p50 for _, _, p50, _ in looked)
    report.claim("lookup p50 us, slowest", round(slowest, 1), f"<= {LOOKUP_US:g}", slowest <= LOOKUP_US)
    report.claim("full: entries replaced", replaced, "> 0", replaced > 0)
    report.claim("hints left out", num_left_out, "<= 1 % of those replaced", num_left_out <= 0.01 * replaced)
    report.finish()


def _memory(directory: Directory, measured: int) -> tuple[int, float, float]:
    return len(directory), directory.num_bytes / 2**20, measured / 2**20


def _size(directory: Directory) -> tuple[int, float, float]:
    return len(directory), directory.num_bytes / 2**20, directory.num_bytes / len(directory)


def _most_sets() -> float:
    """Microseconds to forget a replica where nearly every block has holders of its own."""
    directory = Directory(MAX_SETS)
    for number in range(MAX_SETS - 1):
        for replica in range(17):
            if (number + 1) >> replica & 1:
                tell(directory, replica, [_key(str(number))])
    assert len(directory._sets) >= MAX_SETS - 100
    return microseconds(lambda: directory.forget("engine-0"), 1)[0]


def _feed() -> tuple[float, float, float]:
    """Microseconds, on the engine's event loop: news of 100 blocks, a gateway that comes, the longest of its pieces."""
    holdings = Holdings()
    keys = [_key(f"held {number}") for number in range(100_000)]
    holdings.take([(key, b"", DEVICE, True) for key in keys])
    feeds = []
    (follow_us,) = microseconds(lambda: feeds.append(holdings.follow()), 1)
    pieces = []
    while feeds[0]:
        pieces += microseconds(feeds[0].piece, 1)
    feeds += [holdings.follow() for _ in range(3)]
    news = [(_key(f"news {number}"), b"", DEVICE, True) for number in range(100)]
    (take_us,) = microseconds(lambda: holdings.take(news), 1)
    return take_us, follow_us, max(pieces)


if __name__ == "__main__":
    main()
