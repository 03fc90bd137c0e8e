"""Where processes listen for each other: `unix:/path` or `tcp:host:port`; and for clients, HTTP.

Unix sockets and loopback are this machine's. Any other host is there because somebody wrote it down, and takes a secret
that cannot be guessed: whoever overhears a handshake can try secrets against it for as long as he likes. Names are
looked up where they are bound or dialled, each time anew (docs/decisions/0017-other-hosts.md).
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

MIN_SECRET_BYTES = 32  # where other hosts are: 128 random bits, written in hexadecimal

_MAX_PATH_BYTES = 107  # sockaddr_un
_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*", re.ASCII)


@dataclass(frozen=True, slots=True)
class UnixAddress:
    path: Path

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TcpAddress:
    host: str  # a name or a number; IPv6 without brackets
    port: int

    def __str__(self) -> str:
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"


def parse(text: str) -> UnixAddress | TcpAddress:
    """Raises ValueError that names what is wrong: also an address that stands for all of a host's at once, which
    nobody else could dial."""
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and rest:
        if len(os.fsencode(rest)) > _MAX_PATH_BYTES:
            raise ValueError(f"socket path {rest!r} is longer than {_MAX_PATH_BYTES} bytes")
        return UnixAddress(Path(rest))
    if scheme == "tcp":
        host, _, port = rest.rpartition(":")
        if _is_host(host) and port.isascii() and port.isdigit() and int(port) <= 65535:
            host = host.strip("[]")
            if _is_wildcard(host):
                raise ValueError(f"address {text!r} is all addresses of a host; allowed: one that others can dial")
            return TcpAddress(host, int(port))
    raise ValueError(f"address {text!r} is neither unix:/path nor tcp:host:port (IPv6: tcp:[address]:port)")


def configured(field: str, text: str, secret: bytes) -> UnixAddress | TcpAddress:
    """What a user wrote, to listen at or to dial. Raises ValueError that names field, value and what is allowed."""
    try:
        where = parse(text)
    except ValueError as e:
        raise ValueError(f"{field}: {e}") from None
    check(where, secret, field)
    return where


def check(where: UnixAddress | TcpAddress, secret: bytes, field: str = "address") -> None:
    """Raises ValueError where nobody, or whoever guesses well, would be authenticated."""
    if not secret:
        raise ValueError(f"{field} is {where}, where an empty shared secret protects nothing: set SHOAL_SECRET")
    if other_hosts_reach(where) and len(secret) < MIN_SECRET_BYTES:
        raise ValueError(
            f"{field} is {where}, which is not on this machine alone, and SHOAL_SECRET has {len(secret)} bytes; "
            f"allowed: at least {MIN_SECRET_BYTES} (`openssl rand -hex 32`), or tcp:127.0.0.1:PORT or unix:/PATH"
        )


def other_hosts_reach(where: UnixAddress | TcpAddress) -> TypeGuard[TcpAddress]:
    """A name counts as another host's, whatever it stands for today."""
    return isinstance(where, TcpAddress) and not is_loopback(where.host)


def is_loopback(host: str) -> bool:
    number = _number(host)
    return host == "localhost" or (number is not None and number.is_loopback)


def is_number(host: str) -> bool:
    """Dialling it looks up no name."""
    return _number(host) is not None


def _is_host(text: str) -> bool:
    if text.startswith("["):
        return text.endswith("]") and ":" in text and "%" not in text and _number(text[1:-1]) is not None
    if _number(text) is not None:
        return ":" not in text  # an IPv6 address has its brackets
    try:
        socket.inet_aton(text)
    except OSError:
        return _NAME.fullmatch(text) is not None
    return False  # "0", "127.1", "0x7f000001": numbers that look like names


def _is_wildcard(host: str) -> bool:
    number = _number(host)
    return number is not None and number.is_unspecified


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
    return mapped or number


def bind(address: UnixAddress | TcpAddress) -> socket.socket:
    """A bound socket, not yet listening. Raises OSError for what is taken, not of this machine or no name, ValueError
    for a name that others would look up to another address."""
    if isinstance(address, TcpAddress):
        return bind_tcp(_own_number(address.host), address.port)
    return _bind_unix(address.path)


def _own_number(host: str) -> str:
    """What a name stands for; IPv4 where it has both."""
    if host == "localhost" or is_number(host):
        return host
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as e:
        raise OSError(e.errno, f"{e.strerror}: {host}") from None
    number = str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])
    if is_loopback(number) or _is_wildcard(number):
        raise ValueError(f"{host} is {number} on this machine, which is none that others dial; write the number of one")
    return number


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
