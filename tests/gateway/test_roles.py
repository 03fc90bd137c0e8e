"""Replicas with roles: what gateways learn of them and keep, and who is to decode."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.core.kv.hashing import chain, root_key, scope_key
from shoal.fleet.scorers import Errand
from shoal.fleet.split import Reason
from shoal.fleet.view import ReplicaRole
from shoal.gateway.link import Identity
from shoal.gateway.replicas import Place, Replicas
from shoal.wire.messages import EngineInfo, Members, Replica

IDENTITY = Identity(name="g", incarnation="1", secret=b"s")
ROOT = root_key("m", "float32", "1", 16)
KEYS = chain(scope_key(ROOT), range(1600), 16)
INFO = EngineInfo(
    model="m",
    model_digest="d",
    hash_root=ROOT,
    hash_block_tokens=16,
    max_model_len=4096,
    vocab_size=10_000,
    peers="tcp:127.0.0.1:1",
    fetch_token_ns=50_000.0,
)
COSTS = (1e7, 1e5, 0.0, 1e4, 10.0)


def listed(**roles: str) -> Members:
    return Members(
        version=1,
        replicas=tuple(
            Replica(name=name, incarnation="1", address=f"unix:/{name}", state="serving", role=ReplicaRole(role))
            for name, role in roles.items()
        ),
    )


def fleet(info: EngineInfo = INFO, **roles: str) -> Replicas:
    """All connected and idle."""
    replicas = Replicas(IDENTITY)
    replicas.on_members(listed(**roles))
    for link in replicas._links.values():
        connected: dict[str, Any] = {"info": info, "_connection": object(), "_ready": True, "_costs": COSTS}
        for field, value in connected.items():
            setattr(link, field, value)
        link._heard_s = link._progress_s = time.monotonic() + 1000
    return replicas


def place(replicas: Replicas, **more: Any) -> Place:
    found = replicas.pick(Errand(keys=KEYS, block_tokens=16, prompt_tokens=1600, max_tokens=100, **more))
    assert found is not None
    return found


def test_a_long_prompt_goes_from_the_one_for_prompts_to_the_one_that_decodes() -> None:
    replicas = fleet(p="prefill", d="decode")
    found = place(replicas)
    assert (found.link.name, found.then, found.reason) == ("p", replicas._links["d"], Reason.PAYS)


def test_a_role_counts_from_the_next_list_on() -> None:
    replicas = fleet(a="both", b="both")
    assert place(replicas)[3:] == (None, None)
    replicas.on_members(listed(a="decode", b="prefill"))
    assert (place(replicas).link.name, place(replicas).then) == ("b", replicas._links["a"])
    replicas.on_members(listed(a="both", b="both"))
    assert place(replicas)[3:] == (None, None)


@pytest.mark.parametrize("fields", [{"peers": ""}, {"fetch_token_ns": 0.0}])
def test_engines_that_exchange_no_blocks_share_no_request(fields: dict[str, Any]) -> None:
    found = place(fleet(msgspec.structs.replace(INFO, **fields), p="prefill", d="decode"))
    assert (found.then, found.reason) == (None, Reason.NO_PAIR)


def test_when_a_half_fails_the_other_does_the_whole() -> None:
    replicas = fleet(p="prefill", d="decode")
    found = place(replicas, avoid=frozenset("p"))
    assert (found.link.name, found.then) == ("d", None)
    found = place(replicas, avoid=frozenset("d"))
    assert (found.link.name, found.then) == ("p", None)


async def test_roles_are_kept_on_disk_and_a_list_without_them_is_read(tmp_path: Path) -> None:
    file = tmp_path / "members.json"
    Replicas(IDENTITY, members_file=file).on_members(listed(p="prefill", d="decode"))
    assert await recalled(file) == {"p": "prefill", "d": "decode"}
    old = msgspec.json.decode(file.read_bytes())
    for replica in old["replicas"]:
        del replica["role"]
    file.write_bytes(msgspec.json.encode(old))
    assert await recalled(file) == {"p": "both", "d": "both"}


async def recalled(file: Path) -> dict[str, str]:
    replicas = Replicas(IDENTITY, members_file=file)
    running = asyncio.create_task(replicas.run())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    return {view.name: view.role.value for view in replicas.views()}


def test_a_fixed_list_knows_no_roles() -> None:
    assert [view.role for view in Replicas(IDENTITY, static=["unix:/a"]).views()] == [ReplicaRole.BOTH]
