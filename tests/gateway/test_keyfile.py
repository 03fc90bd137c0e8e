"""The key file: what it may say, what is wrong with it, and how it changes under a running gateway."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import yaml

from shoal.core.classes import DEFAULT_CLASSES
from shoal.gateway import keyfile
from shoal.gateway.auth import Grant, Keys, digest
from shoal.gateway.errors import ApiError
from shoal.gateway.keyfile import KeyFile, KeyFileError, new_key
from shoal.gateway.tenants import TenantLimits
from tests.support.wires import until

A, B, C = (f"sha256:{hashlib.sha256(key).hexdigest()}" for key in (b"key-a", b"key-b", b"key-c"))
ENTRY = f"- digest: {A}\n  tenant: acme\n  classes: [standard]\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def write(path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    """In one step, as one should."""
    new = path.with_suffix(".new")
    new.write_bytes(text if isinstance(text, bytes) else text.encode())
    new.chmod(mode)
    os.replace(new, path)
    return path


def write_in_place(path: Path, text: str) -> None:
    path.write_text(text)


def read(path: Path) -> dict[bytes, Grant]:
    return KeyFile(str(path), DEFAULT_CLASSES).read()


def problem(path: Path) -> str:
    with pytest.raises(KeyFileError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"gateway.key_file: {path}: ")
    assert "\n" not in message and len(message) < 500
    return message


def test_an_entry_is_a_grant(path: Path) -> None:
    text = f"""
- digest: {A}
  tenant: acme
  classes: [batch, interactive]
  max_in_flight: 8
  max_queued: 4
  tokens_per_minute: 60000
- {{digest: "{B}", tenant: portal, classes: [standard], proxy: true}}
"""
    limits = TenantLimits(max_in_flight=8, max_queued=4, tokens_per_minute=60000)
    assert read(write(path, text)) == {
        digest(b"key-a"): Grant(tenant="acme", classes=("batch", "interactive"), limits=limits),
        digest(b"key-b"): Grant(tenant="portal", classes=("standard",), proxy=True),
    }


def test_a_tenant_may_have_several_keys_with_one_set_of_limits(path: Path) -> None:
    limited = ENTRY + "  max_in_flight: 2\n"
    other = f"- {{digest: '{B}', tenant: acme, classes: [batch], max_in_flight: 2}}\n"
    assert {grant.limits.max_in_flight for grant in read(write(path, limited + other)).values()} == {2}
    assert "entry 2: limits are a tenant's" in problem(write(path, limited + other.replace("2}", "3}")))
    assert "entry 2: limits are a tenant's" in problem(write(path, limited + other.replace(", max_in_flight: 2", "")))


def test_a_list_without_keys_is_a_file_and_lets_nobody_in(path: Path) -> None:
    keys = Keys([], read(write(path, "[]\n")))
    assert keys.required
    with pytest.raises(ApiError, match="an API key is required"):
        keys.check(None, "a", 0.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a list of keys"),
        ("# nothing", "expected a list of keys"),
        ("keys: []", "expected a list of keys"),
        ("key-a", "expected a list of keys"),
        ("- key-a", "entry 1: expected digest, tenant and classes"),
        ("- {", "it is not YAML (line 1)"),
        ("- a: b\n- 'key-a", "it is not YAML (line 2)"),
        (b"\xff\xfe\xff", "it is not YAML"),
        ("- !!python/object/apply:os.getcwd []", "it is not YAML"),
        ("[" * 1500, "it is not YAML"),
        ("- {}", "entry 1: 'digest' is required"),
        (ENTRY.replace("  tenant: acme\n", ""), "entry 1: 'tenant' is required"),
        (ENTRY.replace("  classes: [standard]\n", ""), "entry 1: 'classes' is required"),
        (ENTRY + "  tennant: x\n", "entry 1: unknown field 'tennant'; did you mean 'tenant'?"),
        (ENTRY + "  key: key-a\n", "entry 1: unknown field 'key'"),
        (ENTRY.replace(A, "key-a"), "entry 1: digest: "),
        (ENTRY.replace(A, A.upper()), "entry 1: digest: "),
        (ENTRY.replace(A, A[:-1]), "entry 1: digest: "),
        (ENTRY.replace(A, f'"{A}\\n"'), "entry 1: digest: "),
        (ENTRY.replace("acme", "7"), "entry 1: tenant: Expected `str`, got `int`"),
        (ENTRY.replace("acme", '""'), "entry 1: tenant: "),
        (ENTRY.replace("acme", "a b"), "entry 1: tenant: "),
        (ENTRY.replace("acme", '"a\\nb"'), "entry 1: tenant: "),
        (ENTRY.replace("acme", "a" * 129), "entry 1: tenant: "),
        (ENTRY.replace("[standard]", "standard"), "entry 1: classes: "),
        (ENTRY.replace("[standard]", "[]"), "entry 1: classes: "),
        (ENTRY.replace("standard", "gold"), "entry 1: there is no class 'gold'; known: interactive, standard, batch"),
        (ENTRY + "  max_in_flight: 0\n", "entry 1: max_in_flight: "),
        (ENTRY + "  max_in_flight: many\n", "entry 1: max_in_flight: "),
        (ENTRY + "  tokens_per_minute: 1.5\n", "entry 1: tokens_per_minute: "),
        (ENTRY + "  proxy: 1\n", "entry 1: proxy: "),
        (ENTRY + ENTRY, "entry 2: its digest is there already"),
        ("- {}\n" * (keyfile.MAX_KEYS + 1), f"{keyfile.MAX_KEYS + 1} keys; at most {keyfile.MAX_KEYS}"),
        ("#" * (keyfile.MAX_FILE_BYTES + 1), "it is larger than"),
    ],
)
def test_a_wrong_file_is_named_with_entry_and_field_and_nothing_of_it_is_repeated(
    path: Path, text: str | bytes, message: str
) -> None:
    shown = problem(write(path, text))
    assert message in shown
    assert "key-a" not in shown and A not in shown and A[7:] not in shown


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o606, 0o644, 0o666, 0o777])
def test_a_file_that_everybody_may_read_or_write_is_refused(path: Path, mode: int) -> None:
    assert f"(mode {mode:o}); chmod 600 it" in problem(write(path, ENTRY, mode))


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640])
def test_a_private_file_is_read(path: Path, mode: int) -> None:
    assert len(read(write(path, ENTRY, mode))) == 1


def test_what_is_no_file_is_refused_without_waiting(path: Path) -> None:
    assert "No such file or directory" in problem(path)
    path.mkdir()
    assert "Is a directory" in problem(path)
    path.rmdir()
    os.mkfifo(path, 0o600)
    assert "it is no regular file" in problem(path)


def test_a_link_to_the_file_will_do(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(write(path, ENTRY))
    assert len(read(tmp_path / "link")) == 1


def test_a_new_key_is_let_in_by_its_entry(path: Path) -> None:
    key, entry = new_key("acme", classes=["batch"], max_in_flight=3, tokens_per_minute=None)
    text = yaml.safe_dump([msgspec.to_builtins(entry)])
    assert key not in text and "tokens_per_minute" not in text
    grant = Keys([], read(write(path, text))).check(f"Bearer {key}".encode(), "a", 0.0)
    assert grant == Grant(tenant="acme", classes=("batch",), limits=TenantLimits(max_in_flight=3))
    assert len({new_key("acme", classes=["batch"])[0] for _ in range(100)}) == 100
    with pytest.raises(KeyFileError, match="tenant"):
        new_key("a b", classes=["batch"])


# -- changes -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def watched(path: Path, monkeypatch: pytest.MonkeyPatch, check_s: float = 0.02) -> AsyncIterator[tuple]:
    monkeypatch.setattr(keyfile, "CHECK_S", check_s)
    file = KeyFile(str(path), DEFAULT_CLASSES)
    keys = Keys(["from-the-environment"], file.read())
    task = asyncio.create_task(file.watch(keys))
    try:
        yield keys, file
        assert not task.done()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def tenant(keys: Keys, key: str) -> str | None:
    """None: not let in."""
    with suppress(ApiError):
        return keys.check(f"Bearer {key}".encode(), "a", 0.0).tenant
    return None


async def test_a_changed_file_is_read_without_a_restart(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, ENTRY)
    async with watched(path, monkeypatch) as (keys, _):
        assert tenant(keys, "key-a") == "acme" and tenant(keys, "key-b") is None
        write(path, ENTRY.replace(A, B))
        await until(lambda: tenant(keys, "key-b") == "acme")
        assert tenant(keys, "key-a") is None, "a key that was taken out is not accepted any more"
        write_in_place(path, ENTRY.replace(A, C).replace("acme", "globex"))
        await until(lambda: tenant(keys, "key-c") == "globex")
        write(path, "[]\n")
        await until(lambda: tenant(keys, "key-c") is None)
        assert tenant(keys, "from-the-environment") == ""


@pytest.mark.parametrize("broken", ["", "- {", ENTRY + ENTRY, ENTRY.replace("[standard]", "[gold]"), None])
async def test_a_broken_file_leaves_the_keys_of_before_and_says_so_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str | None
) -> None:
    write(path, ENTRY)
    async with watched(path, monkeypatch) as (keys, _):
        with caplog.at_level(logging.INFO):
            write(path, broken) if broken is not None else os.unlink(path)
            await until(lambda: caplog.messages)
            await asyncio.sleep(0.2)  # ten more looks
        assert caplog.messages == ["keys.not_reloaded"] and caplog.records[0].levelno == logging.ERROR
        assert tenant(keys, "key-a") == "acme"
        write(path, ENTRY.replace(A, B))
        await until(lambda: tenant(keys, "key-b") == "acme")


async def test_a_file_that_becomes_public_leaves_the_keys_of_before(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, ENTRY)
    async with watched(path, monkeypatch) as (keys, _):
        write(path, ENTRY.replace("[standard]", "[interactive]") + ENTRY.replace(A, B), 0o666)
        await until(lambda: caplog.messages)
        assert tenant(keys, "key-b") is None and tenant(keys, "key-a") == "acme"


async def test_it_is_read_at_once_when_asked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, ENTRY)
    async with watched(path, monkeypatch, check_s=60.0) as (keys, file):
        write(path, ENTRY.replace(A, B))
        file.reread()
        await until(lambda: tenant(keys, "key-b") == "acme")


async def test_a_file_that_is_still_being_written_is_left_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off before its limits, an entry would allow more than it says."""
    whole = ENTRY + "  max_in_flight: 1\n"
    write(path, whole)
    async with watched(path, monkeypatch) as (keys, _):
        states = [0]

        def state(self: KeyFile) -> tuple[int, ...]:
            """Another one at every look, and the same while the file is read."""
            if threading.current_thread() is threading.main_thread():
                states.append(len(states))
            return (states[-1],)

        with monkeypatch.context() as patch:
            patch.setattr(KeyFile, "_state", state)
            write_in_place(path, ENTRY.replace("acme", "globex"))
            await until(lambda: len(states) > 10)
            assert keys.check(b"Bearer key-a", "a", 0.0) == Grant(
                tenant="acme", classes=("standard",), limits=TenantLimits(max_in_flight=1)
            )
            write_in_place(path, whole.replace("acme", "globex"))
        await until(lambda: tenant(keys, "key-a") == "globex")
        assert keys.check(b"Bearer key-a", "a", 0.0).limits == TenantLimits(max_in_flight=1)


def test_a_file_that_changes_while_it_is_read_is_not_taken(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, content = KeyFile(str(write(path, ENTRY)), DEFAULT_CLASSES), KeyFile._content

    def and_meanwhile(self: KeyFile) -> bytes:
        found = content(self)
        write(path, ENTRY.replace(A, B))
        return found

    monkeypatch.setattr(KeyFile, "_content", and_meanwhile)
    with pytest.raises(KeyFileError, match="it changed while it was read"):
        file.read()
