"""Which other replica a request is told of: the one that holds most of its prompt, where fetching may pay."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from shoal.core.kv.hashing import NO_KEY, chain, root_key, scope_key
from shoal.core.kv.news import DEVICE, HOST
from shoal.core.request import Peer
from shoal.fleet.scorers import Errand
from shoal.gateway.link import Identity
from shoal.gateway.replicas import Place, Replicas
from shoal.wire.messages import EngineInfo

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
)
COSTS = (5e6, 500_000.0, 0.0, 1e5, 10.0)  # a token of a prompt takes 0.5 ms


class Fleet:
    """Replicas a, b and c, all connected; `a` fails nothing and is the one that is always picked."""

    def __init__(self, **held: int) -> None:
        self.replicas = Replicas(Identity(name="g", incarnation="1", secret=b"s"), static=["a", "b", "c"])
        for name, link in self.replicas._links.items():
            self.set(name, incarnation=f"of {name}", info=msgspec.structs.replace(INFO, peers=f"tcp:127.0.0.1:{name}"))
            self.set(name, _connection=object(), _ready=True, _costs=COSTS)
            link._heard_s = link._progress_s = time.monotonic() + 1000
        for name, count in held.items():
            self.tell(name, count)

    def set(self, name: str, **fields: Any) -> None:
        for field, value in fields.items():
            setattr(self.replicas._links[name], field, value)

    def tell(self, name: str, count: int, tier: int = DEVICE) -> None:
        keys, parents = KEYS[:count], (NO_KEY, *KEYS)[:count]
        self.replicas.directory.tell(name, b"".join(keys), b"".join(parents), bytes([tier]) * count)

    def place(self) -> Place:
        errand = Errand(avoid=frozenset("bc"), keys=KEYS, block_tokens=16, prompt_tokens=1600)
        place = self.replicas.pick(errand)
        assert place is not None and place.link.name == "a"
        return place


def peer(name: str, count: int) -> Peer:
    return Peer(f"tcp:127.0.0.1:{name}", f"of {name}", count)


@pytest.mark.parametrize(
    ("held", "token_ms", "expected"),
    [
        ({}, 0.5, None),
        ({"b": 50}, 0.5, peer("b", 50)),
        ({"b": 50, "c": 60}, 0.5, peer("c", 60)),
        ({"a": 20, "b": 50}, 0.5, peer("b", 50)),
        ({"a": 50, "b": 50}, 0.5, None),
        ({"a": 49, "b": 50}, 0.6, peer("b", 50)),  # a step of 5 ms, and 10 ms for 16 tokens
        ({"a": 49, "b": 50}, 0.3, None),  # computed as soon as another engine is asked
    ],
)
def test_the_one_that_holds_most_is_named_where_it_helps(
    held: dict[str, int], token_ms: float, expected: Peer | None
) -> None:
    fleet = Fleet(**held)
    fleet.set("a", _costs=(5e6, token_ms * 1e6, 0.0, 1e5, 10.0))
    assert fleet.place().peer == expected


def test_whoever_cannot_be_asked_is_not_named() -> None:
    assert Fleet(b=50).place().peer == peer("b", 50)
    for name, field, value in (
        ("b", "info", msgspec.structs.replace(INFO, peers="")),  # it does not lend
        ("a", "info", msgspec.structs.replace(INFO, peers="")),  # it does not fetch
        ("b", "info", msgspec.structs.replace(INFO, hash_root=b"another")),
        ("b", "_connection", None),
        ("b", "_ready", False),
    ):
        fleet = Fleet(b=50)
        fleet.set(name, **{field: value})
        assert fleet.place().peer is None, (name, field)


def test_what_is_in_slower_tiers_is_not_lent() -> None:
    fleet = Fleet()
    fleet.tell("b", 50, HOST)
    assert fleet.place().peer is None
