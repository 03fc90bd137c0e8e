"""Which user of this machine is at the other end of a loopback connection, as the kernel says (Linux: proc(5))."""

from __future__ import annotations

import ipaddress
import sys
from pathlib import Path

_ESTABLISHED = "01"  # a connection that was closed since is listed without its owner, as uid 0


def uid_of(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """None: there is no such connection now. Host and port of both ends, numeric."""
    table = Path("/proc/net/tcp6" if ":" in client[0] else "/proc/net/tcp")
    ends = [_spelled(*client), _spelled(*server), _ESTABLISHED]
    for line in table.read_text("ascii").splitlines()[1:]:
        fields = line.split()
        if fields[1:4] == ends:
            return int(fields[7])
    return None


def _spelled(host: str, port: int) -> str:
    """Words of 32 bits in the machine's byte order."""
    packed = ipaddress.ip_address(host).packed
    words = [int.from_bytes(packed[i : i + 4], sys.byteorder) for i in range(0, len(packed), 4)]
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
