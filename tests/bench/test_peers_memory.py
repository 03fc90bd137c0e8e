"""What processes take, from texts of /proc and from a process that is there."""

from __future__ import annotations

import sys
from subprocess import PIPE, Popen

import psutil
import pytest

from peers.memory import Mapping, parse, resident_in_pool, weigh

KIB, MIB = 1 << 10, 1 << 20

SMAPS = """\
55d0c0000000-55d0c0100000 rw-p 00000000 00:00 0                          [heap]
Size:               1024 kB
KernelPageSize:        4 kB
Rss:                 512 kB
Pss:                 256 kB
Pss_Dirty:           100 kB
VmFlags: rd wr mr mw me ac sd
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
Size:               4096 kB
Rss:                2048 kB
Pss:                2048 kB
VmFlags: rd wr mr mw me ac sd
7f0010000000-7f0010400000 rw-s 00000000 00:1b 83                         /dev/shm/psm_bed82866 (deleted)
Size:               4096 kB
Rss:                4000 kB
Pss:                2000 kB
7f0020000000-7f0020100000 r-xp 00001000 fe:00 16123748                   /usr/lib/a name with spaces.so
Size:               1024 kB
Rss:                 100 kB
Pss:                  10 kB
"""


def test_mappings_are_read_with_their_kind() -> None:
    assert list(parse(SMAPS)) == [
        Mapping(True, MIB, 512 * KIB, 256 * KIB),
        Mapping(True, 4 * MIB, 2 * MIB, 2 * MIB),
        Mapping(False, 4 * MIB, 4000 * KIB, 2000 * KIB),
        Mapping(False, MIB, 100 * KIB, 10 * KIB),
    ]
    assert list(parse("")) == []


@pytest.mark.parametrize(
    ("size", "resident", "bounds"),
    [
        (1000, 300, (300, 300)),  # the pool alone
        (995, 995, (995, 995)),  # a whole number of blocks
        (1200, 300, (100, 300)),  # joined with 200 of something else
        (1200, 150, (0, 150)),
        (1200, 1200, (1000, 1000)),
        (900, 900, (0, 0)),  # too small to be one
    ],
)
def test_what_of_a_pool_of_1000_is_resident(size: int, resident: int, bounds: tuple[int, int]) -> None:
    other = Mapping(True, 10, 10, 10)
    file = Mapping(False, 5000, 5000, 5000)
    assert resident_in_pool([other, Mapping(True, size, resident, resident), file], 1000) == bounds


POOL = """
import mmap, sys
with mmap.mmap(-1, 512 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pool:
    pool[: 8 << 20] = b"x" * (8 << 20)
    print("touched", flush=True)
    sys.stdin.read()
"""


def test_a_pool_of_a_process_is_found_and_its_pss_is_the_kernels() -> None:
    pool_bytes, touched = 512 * MIB, 8 * MIB
    with Popen([sys.executable, "-c", POOL], stdin=PIPE, stdout=PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"touched\n"
        found = weigh([process.pid, 2**22 + 1], pool_bytes)  # the second is above the kernel's greatest pid
        pss_bytes = psutil.Process(process.pid).memory_full_info().pss
        process.communicate()
    assert found.processes == 1
    assert found.least_pool_bytes <= touched <= found.most_pool_bytes
    assert found.pss_bytes == pytest.approx(pss_bytes, rel=0.1)
    assert found.least_apart_bytes <= found.most_apart_bytes < found.pss_bytes + 1
