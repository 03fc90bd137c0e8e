"""Keys: who comes in, and that guessing is slow."""

from __future__ import annotations

import hmac

import pytest

from shoal.gateway.auth import FAILED_TRIES, MAX_GUESSERS, Grant, Keys, check_bind, digest, single
from shoal.gateway.errors import ApiError
from shoal.gateway.http import origin
from shoal.gateway.tenants import TenantLimits


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"Bearer right", None),
        (b"bearer right", None),  # the scheme's case means nothing (RFC 7235)
        (b"Bearer  right ", None),
        (b"Bearer other", None),
        (None, "no_api_key"),
        (b"", "no_api_key"),
        (b"Bearer", "no_api_key"),
        (b"Bearer ", "no_api_key"),
        (b"Basic right", "no_api_key"),
        (b"right", "no_api_key"),
        (b"Bearer wrong", "invalid_api_key"),
        (b"Bearer righ", "invalid_api_key"),
        (b"Bearer \xff", "invalid_api_key"),
    ],
)
def test_check(header: bytes | None, reason: str | None) -> None:
    keys = Keys(["right", "other"])
    if reason is None:
        keys.check(header, "a", 0.0)
        return
    with pytest.raises(ApiError) as caught:
        keys.check(header, "a", 0.0)
    assert caught.value.reason == reason and caught.value.shape.status == 401


def test_without_keys_everybody_comes_in() -> None:
    Keys([]).check(None, "a", 0.0)


def wrong(keys: Keys, now_s: float, origin: str = "a") -> str:
    with pytest.raises(ApiError) as caught:
        keys.check(b"Bearer wrong", origin, now_s)
    return str(caught.value.reason)


def test_guessing_is_limited_and_the_right_key_is_never_held_up() -> None:
    keys = Keys(["right"])

    assert {wrong(keys, 0.0) for _ in range(FAILED_TRIES)} == {"invalid_api_key"}
    assert wrong(keys, 0.0) == "too_many_failed_keys"
    keys.check(b"Bearer right", "a", 0.0)
    assert wrong(keys, 0.5) == "too_many_failed_keys"
    assert wrong(keys, 2.5) == "invalid_api_key"  # two were forgiven, one of them by the try before


def test_who_guesses_holds_up_nobody_elsewhere() -> None:
    keys = Keys(["right"])
    assert [wrong(keys, 0.0) for _ in range(FAILED_TRIES + 1)][-1] == "too_many_failed_keys"
    assert wrong(keys, 0.0, "b") == "invalid_api_key"
    assert wrong(keys, 0.0) == "too_many_failed_keys"


def test_guessers_from_everywhere_take_no_memory() -> None:
    keys = Keys(["right"])
    for number in range(2 * MAX_GUESSERS):
        wrong(keys, 0.0, str(number))
    assert len(keys._failed) == MAX_GUESSERS


def test_every_digest_is_compared_whatever_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    keys = Keys(["first", "second", "third"])
    keys.check(b"Bearer first", "a", 0.0)
    wrong(keys, 0.0)
    assert len(compared) == 6 and {len(side) for pair in compared for side in pair} == {32}


@pytest.mark.parametrize(
    ("address", "counts_as"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),  # as a dual-stack socket names it
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_what_counts_as_one_address(address: str, counts_as: str) -> None:
    assert origin((address, 1)) == counts_as


def test_the_key_is_kept_as_a_digest_only() -> None:
    assert "a-secret-key" not in repr(vars(Keys(["a-secret-key"])))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    check_bind(host, Keys([]))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.org", ""])
def test_any_other_bind_needs_one(host: str) -> None:
    with pytest.raises(ValueError, match="SHOAL_API_KEY"):
        check_bind(host, Keys([]))
    check_bind(host, Keys(["k"]))


# -- keys with a grant -------------------------------------------------------------------------------------------------

ACME = Grant(tenant="acme", classes=("batch",), limits=TenantLimits(max_in_flight=1))
PROXY = Grant(tenant="portal", classes=("standard",), limits=TenantLimits(max_in_flight=9), proxy=True)
LISTED = {digest(b"k-acme"): ACME, digest(b"k-proxy"): PROXY}


def test_a_key_brings_its_grant() -> None:
    keys = Keys(["own"], LISTED)
    assert keys.check(b"Bearer k-acme", "a", 0.0) == ACME
    assert keys.check(b"Bearer own", "a", 0.0) == Grant()
    assert wrong(keys, 0.0) == "invalid_api_key"
    assert Keys([]).check(None, "a", 0.0) == Grant()


def test_what_the_file_says_of_a_key_holds_where_the_environment_has_it_too() -> None:
    assert Keys(["k-acme"], LISTED).check(b"Bearer k-acme", "a", 0.0) == ACME


def test_a_key_file_is_enough_for_a_bind_that_others_can_reach() -> None:
    check_bind("0.0.0.0", Keys([], LISTED))
    check_bind("0.0.0.0", Keys([], {}))  # nobody comes in at all


def test_the_digest_is_no_key() -> None:
    for shown in (digest(b"k-acme").hex(), f"sha256:{digest(b'k-acme').hex()}"):
        with pytest.raises(ApiError, match="not accepted"):
            Keys([], LISTED).check(f"Bearer {shown}".encode(), "a", 0.0)


def test_guessing_is_limited_for_listed_keys_too_and_across_a_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    keys = Keys(["own"], LISTED)
    assert [wrong(keys, 0.0) for _ in range(FAILED_TRIES)] == ["invalid_api_key"] * FAILED_TRIES
    assert len(compared) == FAILED_TRIES * 3, "each is compared, whatever the outcome"
    keys.replace(LISTED)
    assert wrong(keys, 0.0) == "too_many_failed_keys"
    assert keys.check(b"Bearer k-acme", "a", 0.0) == ACME


def acting(key: bytes, *headers: tuple[bytes, bytes]) -> Grant:
    keys = Keys([], LISTED)
    return keys.on_behalf(keys.check(b"Bearer " + key, "a", 0.0), headers)


def test_a_proxy_says_for_whom_it_asks() -> None:
    assert acting(b"k-proxy", (b"x-tenant-id", b"globex")) == Grant(
        tenant="globex", classes=PROXY.classes, limits=PROXY.limits, proxy=True
    )
    assert acting(b"k-proxy") == PROXY
    assert acting(b"k-proxy", (b"x-tenant-id", b"acme")).limits == ACME.limits, "a tenant of the file has its own"
    assert acting(b"k-proxy", (b"x_tenant_id", b"globex"), (b"x-shoal-tenant", b"globex")) == PROXY


@pytest.mark.parametrize("name", [b"", b" ", b"a b", b"a,b", b"a\x00", b"\xff", b"-a", b"a" * 129, b"../a"])
def test_a_name_that_is_none_is_refused(name: bytes) -> None:
    with pytest.raises(ApiError, match="x-tenant-id is") as caught:
        acting(b"k-proxy", (b"x-tenant-id", name))
    assert caught.value.shape.status == 400


def test_two_names_are_refused_also_where_they_are_the_same() -> None:
    with pytest.raises(ApiError, match="x-tenant-id is there 2 times"):
        acting(b"k-proxy", (b"x-tenant-id", b"a"), (b"x-tenant-id", b"a"))


@pytest.mark.parametrize("names", [[b"globex"], [b"portal"], [b""], [b"a b"], [b"a", b"b"]])
def test_what_others_say_of_tenants_is_not_read(names: list[bytes]) -> None:
    headers = [(b"x-tenant-id", name) for name in names]
    assert acting(b"k-acme", *headers) == ACME
    assert Keys([]).on_behalf(Grant(), headers) == Grant()
    assert Keys(["own"]).on_behalf(Grant(), headers) == Grant()


def test_a_single_header() -> None:
    assert single([(b"a", b"1"), (b"b", b"2")], b"b") == b"2"
    assert single([], b"b") is None
