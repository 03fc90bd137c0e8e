"""Who may come in: API keys, kept as digests, and a limit on guessing."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable

from shoal.gateway.errors import ApiError, Reason
from shoal.wire.address import is_loopback

FAILED_TRIES = 20  # wrong keys in a row after which guesses are answered unread ...
FORGIVEN_PER_S = 1.0  # ... until enough of them are forgiven
MAX_GUESSERS = 4096  # addresses that are remembered, the latest ones


class Keys:
    """The accepted API keys. With none, everybody may come in (allowed on loopback only, see `check_bind`)."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]
        self._failed: dict[str, tuple[float, float]] = {}  # by origin: wrong keys not forgiven, and when that was

    @property
    def required(self) -> bool:
        return bool(self._digests)

    def check(self, authorization: bytes | None, origin: str, now_s: float) -> None:
        """Raises ApiError unless the header carries an accepted key. `now_s` is monotonic.

        Every digest is compared, in constant time, whatever the outcome. A right key is never held up by the wrong
        ones of others: only a wrong key counts against, and falls under, the limit of its origin.
        """
        if not self._digests:
            return
        scheme, _, key = (authorization or b"").partition(b" ")
        key = key.strip()
        if scheme.lower() != b"bearer" or not key:
            raise ApiError(Reason.NO_KEY, "an API key is required: Authorization: Bearer KEY")
        digest = _digest(key)
        accepted = False
        for known in self._digests:
            accepted |= hmac.compare_digest(digest, known)
        if accepted:
            return
        failed, since_s = self._failed.pop(origin, (0.0, now_s))
        failed = max(0.0, failed - (now_s - since_s) * FORGIVEN_PER_S) + 1.0
        self._failed[origin] = (min(failed, FAILED_TRIES), now_s)
        if len(self._failed) > MAX_GUESSERS:
            del self._failed[next(iter(self._failed))]
        if failed > FAILED_TRIES:
            raise ApiError(Reason.TOO_MANY_KEYS, "too many wrong API keys; try again later")
        raise ApiError(Reason.WRONG_KEY, "the API key is not accepted")


def keys_from_environment() -> Keys:
    """SHOAL_API_KEY: one key, or several with commas between them."""
    return Keys(key for key in os.environ.get("SHOAL_API_KEY", "").split(",") if key)


def check_bind(host: str, keys: Keys) -> None:
    """Raises ValueError where a bind would let anybody in from outside."""
    if not keys.required and not is_loopback(host):
        raise ValueError(f"host {host} is reachable from outside, so an API key is needed: set SHOAL_API_KEY")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
