"""Hosts in miniature: each a namespace of its own for network, processes and mounts, all on one bridge.

Nothing has a name that could stay behind: a host ends with the process that holds it, that one with its standard input,
and so at the latest with the test's process, however that ended.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
_UNSHARE = ("unshare", "--net", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child")


class Host:
    """Its addresses: `ipv4` and, where the kernel has it, `ipv6`, else that is empty."""

    def __init__(self, number: int) -> None:
        self.ipv4 = f"10.77.0.{number}"
        self.ipv6 = f"fd77::{number}" if Path("/proc/net/if_inet6").exists() else ""
        self._holder = subprocess.Popen([*_UNSHARE, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._holder.stdin is not None and self._holder.stdout is not None
        self._holder.stdin.write(b"there?\n")
        self._holder.stdin.flush()
        assert self._holder.stdout.readline() == b"there?\n"
        self.pid = psutil.Process(self._holder.pid).children()[0].pid  # the first of its processes

    def command(self, *command: str) -> list[str]:
        """Runs it there, as a child."""
        return ["nsenter", "--target", str(self.pid), "--net", "--pid", "--mount", *command]

    def ip(self, *lines: str) -> None:
        """Lines of ip(8). Process ids are the test's."""
        command = ["nsenter", "--target", str(self.pid), "--net", "ip", "-batch", "-"]
        done = subprocess.run(command, input="\n".join(lines), text=True, capture_output=True, timeout=10)
        assert not done.returncode, (lines, done.stderr)

    def inside(self, call: Callable[[], T]) -> T:
        """What is called, and the threads that it starts, have this host's network."""
        with ThreadPoolExecutor(1, initializer=self._enter) as pool:
            return pool.submit(call).result()

    def received_bytes(self) -> int:
        """From other hosts."""
        lines = Path(f"/proc/{self.pid}/net/dev").read_text(encoding="ascii").splitlines()
        counts = {line.partition(":")[0].strip(): line.partition(":")[2].split() for line in lines}
        return int(counts["eth0"][0])

    def listening(self) -> set[str]:
        """The addresses at which anybody listens there for TCP, without ports; IPv6 in brackets."""
        command = self.command("ss", "--no-header", "--listening", "--tcp", "--numeric")
        lines = subprocess.run(command, text=True, check=True, capture_output=True, timeout=10).stdout.splitlines()
        return {line.split()[3].rpartition(":")[0] for line in lines}

    def close(self) -> None:
        """With everything that runs there."""
        assert self._holder.stdin is not None and self._holder.stdout is not None
        self._holder.stdin.close()  # its first process ends, and with that all others
        self._holder.stdout.close()
        try:
            self._holder.wait(10.0)
        finally:
            self._holder.kill()

    def _enter(self) -> None:
        namespace = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(namespace)


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many that reach each other, and one more, the last: where the test looks at them from."""
    with ExitStack() as stack:
        made = []
        for number in range(1, count + 2):
            made.append(Host(number))
            stack.callback(made[-1].close)
        *others, hub = made
        hub.ip("link set lo up", "link add eth0 type bridge", *_addresses(hub))
        for number, host in enumerate(others):
            hub.ip(
                f"link add port{number} type veth peer name eth0 netns {host.pid}",
                f"link set port{number} master eth0 up",
            )
            host.ip("link set lo up", *_addresses(host))
        yield made


def _addresses(host: Host) -> list[str]:
    ipv6 = [f"addr add {host.ipv6}/64 dev eth0 nodad"] if host.ipv6 else []  # nodad: of use at once
    return [f"addr add {host.ipv4}/24 dev eth0", *ipv6, "link set eth0 up"]


def why_none() -> str:
    """Why there can be no hosts here; empty: there can."""
    for tool, package in (("unshare", "util-linux"), ("nsenter", "util-linux"), ("ip", "iproute2"), ("ss", "iproute2")):
        if shutil.which(tool) is None:
            return f"network namespaces need the command {tool} ({package})"
    tried = subprocess.run(
        [*_UNSHARE, "sh", "-c", "ip link add left type bridge && ip link add right type veth peer name far"],
        capture_output=True,
        text=True,
        timeout=10,
    )
    return f"no network namespaces here: {tried.stderr.strip()}" if tried.returncode else ""
