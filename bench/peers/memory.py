"""What a server's processes take of the machine's memory together, with its KV pool apart.

PSS (proportional set size) counts each page once over all processes that share it, so sums of it are meaningful. The
pools are of one size by configuration, but a page of a pool is taken when it is first written, and the two servers
write theirs at different times. What is subtracted is therefore what of the pool is resident, read from the mapping
that holds it: a private anonymous one of about a pool's size or larger. The kernel may have joined such a mapping with
its neighbours; then it is unknown which pages are the pool's, and both bounds are given.

Servers that run at once from one environment share the pages of its libraries, so each one's sum is a little smaller
than it would be alone: vLLM's by about 5 % where it runs eager and compiled, shoal's by the load driver's few MB.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

POOL_SHARE = 0.99  # of the configured size: a pool is a whole number of blocks

HEADER = re.compile(r"^[0-9a-f]+-[0-9a-f]+ (?P<flags>\S+) \S+ \S+ (?P<inode>\d+)\s*(?P<name>.*)$")


class Mapping(NamedTuple):
    anonymous: bool
    size_bytes: int
    resident_bytes: int
    pss_bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    processes: int
    pss_bytes: int  # pool included
    least_pool_bytes: int  # resident in the pool, at least
    most_pool_bytes: int

    @property
    def least_apart_bytes(self) -> int:
        """Without the pool."""
        return self.pss_bytes - self.most_pool_bytes

    @property
    def most_apart_bytes(self) -> int:
        return self.pss_bytes - self.least_pool_bytes


def weigh(pids: Iterable[int], pool_bytes: int) -> Memory:
    """`pool_bytes` is the pool's configured size. A process that has ended meanwhile counts nothing."""
    processes, pss, least, most = 0, 0, 0, 0
    for pid in pids:
        with contextlib.suppress(OSError):
            mappings = list(parse(Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="replace")))
            processes += 1
            pss += sum(mapping.pss_bytes for mapping in mappings)
            low, high = resident_in_pool(mappings, pool_bytes)
            least, most = least + low, most + high
    return Memory(processes, pss, least, most)


def parse(smaps: str) -> Iterator[Mapping]:
    """The mappings in the text of /proc/PID/smaps; sizes there are in KiB."""
    anonymous, fields = False, dict[str, int]()
    for line in (*smaps.splitlines(), "0-0 ---p 0 0:0 0"):
        if header := HEADER.match(line):
            if fields:
                kib = (fields.get(name, 0) for name in ("Size", "Rss", "Pss"))
                yield Mapping(anonymous, *(1024 * value for value in kib))
            anonymous = header["inode"] == "0" and header["name"] in ("", "[heap]") and header["flags"].endswith("p")
            fields = {}
        else:
            name, _, value = line.partition(":")
            if value.endswith(" kB"):
                fields[name] = int(value.removesuffix(" kB"))


def resident_in_pool(mappings: Iterable[Mapping], pool_bytes: int) -> tuple[int, int]:
    """At least and at most so many bytes of a pool are resident.

    A mapping of `size` holds the pool and size − pool bytes of something else, which are resident or not.
    """
    least = most = 0
    for mapping in mappings:
        if mapping.anonymous and mapping.size_bytes >= POOL_SHARE * pool_bytes:
            others = max(0, mapping.size_bytes - pool_bytes)
            least += max(0, mapping.resident_bytes - others)
            most += min(mapping.resident_bytes, pool_bytes)
    return least, most
