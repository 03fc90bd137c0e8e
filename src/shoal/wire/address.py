"""Where a process listens: for other processes `unix:/path` or `tcp:host:port`, loopback only; for clients HTTP."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

_MAX_PATH_BYTES = 107  # sockaddr_un


@dataclass(frozen=True, slots=True)
class UnixAddress:
    path: Path

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp:{self.host}:{self.port}"


def parse(text: str) -> UnixAddress | TcpAddress:
    """Raises ValueError that names what is wrong: also an address that is not on this machine, to listen or to dial."""
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and rest:
        if len(os.fsencode(rest)) > _MAX_PATH_BYTES:
            raise ValueError(f"socket path {rest!r} is longer than {_MAX_PATH_BYTES} bytes")
        return UnixAddress(Path(rest))
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        if host and port.isascii() and port.isdigit() and int(port) <= 65535:
            _check_loopback(host, text)
            return TcpAddress(host, int(port))
    raise ValueError(f"address {text!r} is neither unix:/path nor tcp:host:port")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_loopback(host: str, address: str) -> None:
    if not is_loopback(host):
        raise ValueError(f"{address}: processes speak to each other over loopback or Unix sockets only")


def bind(address: UnixAddress | TcpAddress) -> socket.socket:
    """A bound socket, not yet listening. Raises ValueError for an address that others could reach, OSError if taken."""
    if isinstance(address, TcpAddress):
        _check_loopback(address.host, str(address))
        return bind_tcp(address.host, address.port)
    return _bind_unix(address.path)


def bind_tcp(host: str, port: int, *, option: str = "") -> socket.socket:
    """A bound socket, not yet listening; port 0: any free one. Raises OSError that names both, and the option that
    chooses another port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio: else no TCP_NODELAY
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError as e:
        sock.close()
        raise OSError(
            e.errno, f"{e.strerror}: {host}:{port}{f' ({option} chooses another port)' * bool(option)}"
        ) from None
    return sock


def http_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bind_unix(path: Path) -> socket.socket:
    """A socket file of mode 0600; its folder must be closed to others, which covers the moment before the chmod."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = path.parent.stat()
    if folder.st_mode & 0o077 or folder.st_uid != os.geteuid():
        raise ValueError(
            f"{path.parent} is open to other users: a socket's folder must be one's own and have mode 0700"
        )
    if path.exists() and stat.S_ISSOCK(path.lstat().st_mode):
        path.unlink()  # left by a process that was killed
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(path))
        path.chmod(0o600)
    except OSError:
        sock.close()
        raise
    return sock
