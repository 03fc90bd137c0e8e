"""Keys: who comes in, and that guessing is slow."""

from __future__ import annotations

import hmac

import pytest

from shoal.gateway.auth import FAILED_TRIES, MAX_GUESSERS, Keys, check_bind
from shoal.gateway.errors import ApiError
from shoal.gateway.http import origin


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
