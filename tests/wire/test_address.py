"""Which addresses there are, and what other hosts take: to be written down, a good secret, a number or a name."""

from __future__ import annotations

import re
import socket

import pytest

from shoal.engine import main as engine_main
from shoal.engine.config import EngineConfig
from shoal.wire import address as addresses
from shoal.wire.address import MIN_SECRET_BYTES, TcpAddress, configured, parse
from shoal.wire.connection import UNACKNOWLEDGED_S
from shoal.wire.listener import listen
from tests.support.wires import connect, listening, swallow

GOOD = b"s" * MIN_SECRET_BYTES
SHORT = GOOD[1:]


@pytest.mark.parametrize(
    ("text", "host", "others_reach"),
    [
        ("tcp:127.0.0.1:8010", "127.0.0.1", False),
        ("tcp:127.9.9.9:8010", "127.9.9.9", False),
        ("tcp:localhost:8010", "localhost", False),
        ("tcp:[::1]:8010", "::1", False),
        ("tcp:[::ffff:127.0.0.1]:8010", "::ffff:127.0.0.1", False),
        ("tcp:10.1.2.3:8010", "10.1.2.3", True),
        ("tcp:[fd00::2]:8010", "fd00::2", True),
        ("tcp:[::ffff:10.1.2.3]:8010", "::ffff:10.1.2.3", True),
        ("tcp:engine-0:8010", "engine-0", True),
        ("tcp:4c01db0b339c:8010", "4c01db0b339c", True),  # as containers are called
        ("tcp:shoal_engine.example.org:8010", "shoal_engine.example.org", True),
        ("tcp:127.0.0.1.example.org:8010", "127.0.0.1.example.org", True),
        ("tcp:localhost.example.org:8010", "localhost.example.org", True),
    ],
)
def test_an_address_has_one_spelling(text: str, host: str, others_reach: bool) -> None:
    assert parse(text) == TcpAddress(host, 8010)
    assert str(parse(text)) == text
    assert addresses.other_hosts_reach(parse(text)) is others_reach


@pytest.mark.parametrize(
    "text",
    [
        *("tcp::8010", "tcp:10.1.2.3", "tcp:10.1.2.3:", "tcp:10.1.2.3:99999", "tcp:10.1.2.3:-1", "tcp:10.1.2.3:0x50"),
        *("tcp:::1:8010", "tcp:fd00::2:8010", "tcp:[::1:8010", "tcp:::1]:8010", "tcp:[]:8010"),  # brackets are missing
        *("tcp:[10.1.2.3]:8010", "tcp:[engine-0]:8010", "tcp:[[::1]]:8010"),
        *("tcp:[fe80::1%eth0]:8010", "tcp:fe80::1%eth0:8010"),  # its zone means nothing to others
        *("tcp:0:8010", "tcp:1:8010", "tcp:127.1:8010", "tcp:0x7f000001:8010", "tcp:0177.0.0.1:8010"),  # inet_aton's
        *("tcp:../../x:8010", "tcp:a b:8010", "tcp:a\n:8010", "tcp:a..b:8010", "tcp:.a:8010", "tcp:ä:8010"),
        *("tcp:" + "a" * 64 + ":8010", "tcp:" + "a." * 127 + "a:8010"),
        *("http://127.0.0.1", "10.1.2.3:8010", "unix:", ""),
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{text!r} is neither unix:/path nor tcp:host:port")):
        parse(text)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "[0::0]", "[::ffff:0.0.0.0]"])
def test_all_addresses_of_a_host_are_none_that_others_could_dial(host: str) -> None:
    with pytest.raises(ValueError, match="allowed: one that others can dial"):
        parse(f"tcp:{host}:8010")


@pytest.mark.parametrize("address", ["tcp:192.0.2.1:1", "tcp:[2001:db8::1]:1", "tcp:engine.invalid:1"])
@pytest.mark.parametrize("secret", [b"", b"x", SHORT])
async def test_other_hosts_take_a_secret_that_cannot_be_guessed(address: str, secret: bytes) -> None:
    """To listen as to dial: whoever is dialled sees a proof, too."""
    why = f"{re.escape(address)}.*" + ("an empty shared secret" if not secret else f"has {len(secret)} bytes; allowed")
    with pytest.raises(ValueError, match=why):
        await connect(address, secret=secret)
    with pytest.raises(ValueError, match=why):
        await listen(address, secret=secret, incarnation="i", welcome=lambda: None, handler=swallow)
    with pytest.raises(ValueError, match=f"--listen is {why}"):
        configured("--listen", address, secret)
    assert str(configured("--listen", address, GOOD)) == address


def test_this_machine_takes_some_secret() -> None:
    for address in ("tcp:127.0.0.1:1", "tcp:[::1]:1", "unix:/run/shoal/x.sock"):
        assert str(configured("--listen", address, b"x")) == address
        with pytest.raises(ValueError, match=f"--listen is {re.escape(address)}, where an empty shared secret"):
            configured("--listen", address, b"")


def test_what_is_no_address_is_told_with_its_field() -> None:
    with pytest.raises(ValueError, match=r"^engine\.peer_address: address 'tcp:x' is neither"):
        configured("engine.peer_address", "tcp:x", GOOD)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
async def test_both_sides_meet_at_names_and_numbers(host: str) -> None:
    if host == "[::1]" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    async with listening(swallow, f"tcp:{host}:0") as listener:
        assert re.fullmatch(rf"tcp:{re.escape(host)}:\d+", listener.address) and not listener.address.endswith(":0")
        connection = await connect(listener.address)
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == UNACKNOWLEDGED_S * 1000
        connection.close()


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


def look_up(monkeypatch: pytest.MonkeyPatch, *numbers: str) -> None:
    """Whatever is asked for stands for these."""

    def found(host: str, port: int | None, **settings: object) -> list[tuple[object, ...]]:
        families = [socket.AF_INET6 if ":" in number else socket.AF_INET for number in numbers]
        return [(family, 1, 6, "", (number, 0)) for family, number in zip(families, numbers, strict=True)]

    monkeypatch.setattr("shoal.wire.address.socket.getaddrinfo", found)


@pytest.mark.parametrize("numbers", [["127.0.1.1"], ["::1"], ["0.0.0.0"], ["2001:db8::1", "127.0.0.1"]])
async def test_a_name_that_means_this_machine_only_here_is_not_listened_at(
    numbers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the own name does in many an /etc/hosts: others would look up another address, where nobody listens."""
    look_up(monkeypatch, *numbers)
    with pytest.raises(ValueError, match=f"engine-0 is {re.escape(numbers[-1])} on this machine"):
        await listen("tcp:engine-0:0", secret=GOOD, incarnation="i", welcome=lambda: None, handler=swallow)


def test_an_address_of_another_machine_is_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up(monkeypatch, "2001:db8::1", "192.0.2.1")  # IPv4 first
    with pytest.raises(OSError, match=r"192\.0\.2\.1:0"):
        addresses.bind(parse("tcp:engine-0:0"))
    monkeypatch.undo()
    with pytest.raises(OSError, match=r"engine\.invalid"):
        addresses.bind(parse("tcp:engine.invalid:0"))


@pytest.mark.parametrize(
    ("listen_at", "controller", "peer", "why"),
    [
        ("tcp:10.1.2.3:1", "tcp:10.1.2.4:1", "tcp:10.1.2.3:0", ""),
        ("tcp:10.1.2.3:1", "", "", ""),
        ("unix:/run/e.sock", "", "tcp:127.0.0.1:0", ""),
        ("unix:/run/e.sock", "tcp:10.1.2.4:1", "tcp:10.1.2.3:0", ""),
        ("tcp:0.0.0.0:1", "", "tcp:10.1.2.3:0", "^--listen: address 'tcp:0.0.0.0:1' is all"),
        ("unix:/run/e.sock", "10.1.2.4", "", "^--controller: address"),
        ("unix:/run/e.sock", "", "tcp:[::]:0", r"^engine\.peer_address: address 'tcp:\[::\]:0' is all"),
        (
            *("tcp:[fd00::2]:1", "", "tcp:127.0.0.1:0"),
            r"engine\.peer_address is tcp:127\.0\.0\.1:0.*; allowed: .*tcp:\[fd00::2\]:0, or empty",
        ),
        ("tcp:engine-0:1", "", "unix:/run/p.sock", "engine.peer_address is unix:/run/p.sock.*tcp:engine-0:0"),
    ],
)
def test_what_an_engine_says_of_its_addresses(listen_at: str, controller: str, peer: str, why: str) -> None:
    if not why:
        engine_main._check_addresses(listen_at, controller, peer, GOOD)
        return
    with pytest.raises(ValueError, match=why):
        engine_main._check_addresses(listen_at, controller, peer, GOOD)


def test_by_default_an_engine_lends_on_its_own_machine_only() -> None:
    engine_main._check_addresses("tcp:127.0.0.1:8010", "", EngineConfig().peer_address, b"x")
    assert not addresses.other_hosts_reach(parse(EngineConfig().peer_address))
