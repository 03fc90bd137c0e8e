"""The file of API keys (`gateway.key_file`): a list of digests, each with its tenant, classes and limits.

It is read anew when it changes and on SIGHUP. What is wrong with it stops a start; later, the keys of before stay.
Nothing of its content is repeated in messages but names: a key may stand in a wrong place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import stat
from collections.abc import Collection
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta

from shoal.gateway.auth import Grant, Keys, digest, keys_from_environment
from shoal.gateway.tenants import NAME, TenantLimits
from shoal.gateway.violations import explain

MAX_FILE_BYTES = 1 << 20
MAX_KEYS = 4096  # each is compared with each request's
CHECK_S = 1.0

Amount = Annotated[int, Meta(ge=1, le=1 << 53)]

log = logging.getLogger("shoal.gateway")


class KeyFileError(ValueError):
    """Names the file, and the entry and field that are wrong."""


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One key. The limits are its tenant's: all keys of a tenant give the same."""

    digest: Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]
    tenant: Annotated[str, Meta(pattern=rf"^{NAME.pattern}\Z")]
    classes: Annotated[tuple[str, ...], Meta(min_length=1)]  # the first is the default
    max_in_flight: Amount | None = None
    max_queued: Amount | None = None
    tokens_per_minute: Amount | None = None
    proxy: bool = False

    @property
    def limits(self) -> TenantLimits:
        return TenantLimits(
            max_in_flight=self.max_in_flight, max_queued=self.max_queued, tokens_per_minute=self.tokens_per_minute
        )


def new_key(tenant: str, **fields: Any) -> tuple[str, Entry]:
    """A random key and its entry. Raises KeyFileError for a field that no file may have."""
    key = f"sk-shoal-{secrets.token_urlsafe(32)}"
    return key, _entry({"digest": f"sha256:{digest(key.encode()).hex()}", "tenant": tenant, **fields}, "")


class KeyFile:
    def __init__(self, path: str, classes: Collection[str]) -> None:
        """`classes`: the names of those there are."""
        self._path = os.path.expanduser(path)
        self._classes = classes
        self._seen: tuple[int, ...] | None = None  # the file's state when it was read last; None: it was not there
        self._asked = asyncio.Event()

    def read(self) -> dict[bytes, Grant]:
        """What the file allows, by digest. Raises KeyFileError."""
        self._seen = self._state()  # before it is opened: what changes from here on is seen as a change
        try:
            content = self._content()
            if self._state() != self._seen:
                raise KeyFileError("it changed while it was read")
            return _grants(_entries(content), self._classes)
        except KeyFileError as error:
            raise KeyFileError(f"gateway.key_file: {self._path}: {error}") from None

    def reread(self) -> None:
        """Now, whether it has changed or not."""
        self._asked.set()

    async def watch(self, keys: Keys) -> None:
        """Bring the keys up to date whenever the file changes. Ends by cancellation.

        A file that is still changing is left alone: half of it could allow more than the whole.
        """
        before = self._seen
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await self._asked.wait()
            state = self._state()
            settled, before = state == before, state
            if not self._asked.is_set() and (state == self._seen or not settled):
                continue
            self._asked.clear()
            try:
                listed = await asyncio.to_thread(self.read)
            except KeyFileError as error:
                log.error("keys.not_reloaded", {"detail": str(error)})
            else:
                keys.replace(listed)
                log.info("keys.reloaded", {"keys": len(listed)})

    def _state(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def _content(self) -> bytes:
        try:
            with open(self._path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
                mode = os.fstat(file.fileno()).st_mode
                if not stat.S_ISREG(mode):
                    raise KeyFileError("it is no regular file")
                if mode & (stat.S_IROTH | stat.S_IWOTH):
                    raise KeyFileError(f"everybody may read or write it (mode {mode & 0o777:o}); chmod 600 it")
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise KeyFileError(error.strerror or "it cannot be read") from None
        if len(content) > MAX_FILE_BYTES:
            raise KeyFileError(f"it is larger than {MAX_FILE_BYTES} bytes")
        return content


def _entries(content: bytes) -> list[Entry]:
    try:
        document = yaml.safe_load(content)
    except yaml.MarkedYAMLError as error:
        where = "" if error.problem_mark is None else f" (line {error.problem_mark.line + 1})"
        raise KeyFileError(f"it is not YAML{where}") from None
    except (yaml.YAMLError, UnicodeError, ValueError, RecursionError):
        raise KeyFileError("it is not YAML") from None
    if not isinstance(document, list):  # a file that was cut off is no list; one without keys is []
        raise KeyFileError("expected a list of keys, each with its digest and tenant")
    if len(document) > MAX_KEYS:
        raise KeyFileError(f"{len(document)} keys; at most {MAX_KEYS} are allowed")
    return [_entry(value, f"entry {number}: ") for number, value in enumerate(document, 1)]


def _entry(value: Any, where: str) -> Entry:
    if not isinstance(value, dict):
        raise KeyFileError(f"{where}expected digest, tenant and classes")
    try:
        return msgspec.convert(value, Entry)
    except msgspec.ValidationError as error:
        raise KeyFileError(f"{where}{explain(error, Entry).message}") from None


def _grants(entries: list[Entry], classes: Collection[str]) -> dict[bytes, Grant]:
    grants: dict[bytes, Grant] = {}
    limits: dict[str, TenantLimits] = {}
    for number, entry in enumerate(entries, 1):
        for name in entry.classes:
            if name not in classes:
                raise KeyFileError(f"entry {number}: there is no class {name[:64]!r}; known: {', '.join(classes)}")
        if limits.setdefault(entry.tenant, entry.limits) != entry.limits:
            raise KeyFileError(f"entry {number}: limits are a tenant's, and {entry.tenant!r} has others further up")
        key = bytes.fromhex(entry.digest.removeprefix("sha256:"))
        if key in grants:
            raise KeyFileError(f"entry {number}: its digest is there already")
        grants[key] = Grant(tenant=entry.tenant, classes=entry.classes, limits=entry.limits, proxy=entry.proxy)
    return grants


def load(path: str, classes: Collection[str]) -> tuple[Keys, KeyFile | None]:
    """The keys of the environment and of the file, if there is one. Raises KeyFileError."""
    file = KeyFile(path, classes) if path else None
    return keys_from_environment(None if file is None else file.read()), file
