"""Keys: who comes in, and that guessing is slow."""

from __future__ import annotations

import pytest

from shoal.gateway.auth import FAILED_TRIES, Keys, check_bind
from shoal.gateway.errors import ApiError


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
        keys.check(header, 0.0)
        return
    with pytest.raises(ApiError) as caught:
        keys.check(header, 0.0)
    assert caught.value.reason == reason and caught.value.shape.status == 401


def test_without_keys_everybody_comes_in() -> None:
    Keys([]).check(None, 0.0)


def test_guessing_is_limited_and_the_right_key_is_never_held_up() -> None:
    keys = Keys(["right"])

    def answer(now_s: float) -> str:
        with pytest.raises(ApiError) as caught:
            keys.check(b"Bearer wrong", now_s)
        return str(caught.value.reason)

    assert {answer(0.0) for _ in range(FAILED_TRIES)} == {"invalid_api_key"}
    assert answer(0.0) == "too_many_failed_keys"
    keys.check(b"Bearer right", 0.0)
    assert answer(0.5) == "too_many_failed_keys"
    assert answer(2.5) == "invalid_api_key"  # two were forgiven, one of them by the try before


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
