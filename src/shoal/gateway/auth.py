"""Who may come in: API keys, kept as digests, what each of them allows, and a limit on guessing."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shoal.gateway.errors import ApiError, Reason, invalid
from shoal.gateway.tenants import NAME, TenantLimits
from shoal.wire.address import is_loopback

FAILED_TRIES = 20  # wrong keys in a row after which guesses are answered unread ...
FORGIVEN_PER_S = 1.0  # ... until enough of them are forgiven
MAX_GUESSERS = 4096  # addresses that are remembered, the latest ones

Headers = Sequence[tuple[bytes, bytes]]  # names in lower case


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What a key allows. The defaults are those of a key from the environment, and of a gateway without keys."""

    tenant: str = ""
    classes: tuple[str, ...] = ()  # the first is the default; (): all there are, "standard" by default
    limits: TenantLimits = field(default_factory=TenantLimits)
    proxy: bool = False  # its holder says for whom it asks (x-tenant-id), and is believed


class Keys:
    """The accepted API keys. With none, everybody may come in (allowed on loopback only, see `check_bind`)."""

    def __init__(self, keys: Iterable[str], listed: Mapping[bytes, Grant] | None = None) -> None:
        """`listed`: what the key file says, by digest; None: there is no such file, which is not the same as an empty
        one."""
        self._given = {digest(key.encode()): Grant() for key in keys}
        self._failed: dict[str, tuple[float, float]] = {}  # by origin: wrong keys not forgiven, and when that was
        self._listed = False
        self._accepted = self._given
        self._limits: dict[str, TenantLimits] = {}
        if listed is not None:
            self.replace(listed)

    def replace(self, listed: Mapping[bytes, Grant]) -> None:
        """The key file has changed. Requests that were let in before go on."""
        self._listed = True
        self._accepted = {**self._given, **listed}  # what the file says of a key holds
        self._limits = {grant.tenant: grant.limits for grant in listed.values()}

    @property
    def required(self) -> bool:
        return self._listed or bool(self._given)

    def check(self, authorization: bytes | None, origin: str, now_s: float) -> Grant:
        """Raises ApiError unless the header carries an accepted key. `now_s` is monotonic.

        Every digest is compared, in constant time, whatever the outcome. A right key is never held up by the wrong
        ones of others: only a wrong key counts against, and falls under, the limit of its origin.
        """
        if not self.required:
            return Grant()
        scheme, _, key = (authorization or b"").partition(b" ")
        key = key.strip()
        if scheme.lower() != b"bearer" or not key:
            raise ApiError(Reason.NO_KEY, "an API key is required: Authorization: Bearer KEY")
        shown = digest(key)
        accepted = None
        for known, grant in self._accepted.items():
            if hmac.compare_digest(shown, known):
                accepted = grant
        if accepted is not None:
            return accepted
        failed, since_s = self._failed.pop(origin, (0.0, now_s))
        failed = max(0.0, failed - (now_s - since_s) * FORGIVEN_PER_S) + 1.0
        self._failed[origin] = (min(failed, FAILED_TRIES), now_s)
        if len(self._failed) > MAX_GUESSERS:
            del self._failed[next(iter(self._failed))]
        if failed > FAILED_TRIES:
            raise ApiError(Reason.TOO_MANY_KEYS, "too many wrong API keys; try again later")
        raise ApiError(Reason.WRONG_KEY, "the API key is not accepted")

    def on_behalf(self, grant: Grant, headers: Headers) -> Grant:
        """The grant for the tenant that a proxy asks for; what others say of tenants is not read.

        A tenant with keys of its own has its own limits; for another one those of the proxy's key hold, for each apart.
        Raises ApiError for a name that is none.
        """
        if not grant.proxy or (name := single(headers, b"x-tenant-id")) is None:
            return grant
        tenant = name.decode("latin-1")
        if not NAME.fullmatch(tenant):
            raise invalid(f"x-tenant-id is {tenant[:64]!r}; allowed: 1 to 128 of A-Z a-z 0-9 . _ : @ -", "x-tenant-id")
        return replace(grant, tenant=tenant, limits=self._limits.get(tenant, grant.limits))


def single(headers: Headers, name: bytes) -> bytes | None:
    """A header's value. Raises ApiError where it comes twice: who forwarded the request may have read the other one."""
    values = [value for given, value in headers if given == name]
    if len(values) > 1:
        raise invalid(f"the header {name.decode()} is there {len(values)} times", name.decode())
    return values[0] if values else None


def keys_from_environment(listed: Mapping[bytes, Grant] | None = None) -> Keys:
    """SHOAL_API_KEY: one key, or several with commas between them. `listed` as for `Keys`."""
    return Keys((key for key in os.environ.get("SHOAL_API_KEY", "").split(",") if key), listed)


def check_bind(host: str, keys: Keys) -> None:
    """Raises ValueError where a bind would let anybody in from outside."""
    if not keys.required and not is_loopback(host):
        raise ValueError(
            f"host {host} is reachable from outside, so an API key is needed: set SHOAL_API_KEY, or a key file"
        )


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
