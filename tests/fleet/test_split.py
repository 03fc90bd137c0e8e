"""Tables: whether a request is split between replicas with roles, between which, and why not."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from shoal.core.kv.hashing import NO_KEY
from shoal.fleet.directory import Held
from shoal.fleet.route import MAX_CANDIDATES, Pick, pick
from shoal.fleet.scorers import Errand
from shoal.fleet.split import Reason, choose
from shoal.fleet.view import ReplicaRole, ReplicaView

COSTS = (1e7, 1e5, 0.0, 1e4, 10.0)  # a step, a new token, an attended one, a sequence, a token of context; ns
FETCH_NS = 50_000.0  # a token's KV: half of what computing it takes
SLOW_FETCH_NS = 5_000_000.0


def view(role: str, name: str = "", **numbers: Any) -> ReplicaView:
    """Named by its role's first letter."""
    usual: dict[str, Any] = {"costs": COSTS, "ready": True, "kv_root": b"root", "fetch_token_ns": FETCH_NS}
    return ReplicaView(name=name or role[0], role=ReplicaRole(role), **(usual | numbers))


def errand(prompt: int = 1500, answer: int = 100, **more: Any) -> Errand:
    return Errand(keys=(NO_KEY,), block_tokens=16, prompt_tokens=prompt, max_tokens=answer, **more)


def never(replicas: Sequence[ReplicaView], count: int) -> list[ReplicaView]:
    raise AssertionError("few candidates need no sample")


PREFILL, DECODE, BOTH = view("prefill"), view("decode"), view("both")
BUSY_DECODE = view("decode", num_running=40, context_tokens=400_000)
LONG, CHAT, BRIEF, ONE = errand(), errand(prompt=200), errand(prompt=20), errand(answer=1)

CASES: dict[str, tuple[Sequence[ReplicaView], Errand, Mapping[str, int], tuple[str, str, str]]] = {
    "one for each: a long prompt": ([PREFILL, DECODE], LONG, {}, ("p", "d", "pays")),
    "and a short one": ([PREFILL, DECODE], CHAT, {}, ("p", "d", "pays")),
    "but a few tokens the one that decodes computes itself": ([PREFILL, DECODE], BRIEF, {}, ("d", "", "migration")),
    "also the few that it does not hold": ([PREFILL, DECODE], LONG, {"d": 1488}, ("d", "", "prompt")),
    "an answer of a token is not worth a migration": ([PREFILL, DECODE], ONE, {}, ("p", "", "migration")),
    "nor is one that takes longer than to decode between prompts": (
        [PREFILL, view("decode", num_running=40, context_tokens=400_000, fetch_token_ns=SLOW_FETCH_NS)], LONG, {},
        ("p", "", "migration"),
    ),
    "over a slow link one that decodes little does all": (
        [PREFILL, view("decode", fetch_token_ns=SLOW_FETCH_NS)], LONG, {}, ("d", "", "migration"),
    ),
    "the prompts wait for the one that computes them": (
        [view("prefill", num_waiting=1, waiting_tokens=1500), DECODE], LONG, {}, ("p", "d", "pays"),
    ),
    "unless they would wait for longer than anybody": (
        [view("prefill", num_waiting=9, waiting_tokens=30_000), DECODE], LONG, {}, ("d", "", "prompt"),
    ),
    "one for prompts decodes where the others are too full": (
        [PREFILL, view("decode", num_running=900, context_tokens=9_000_000)], LONG, {}, ("p", "", "answer"),
    ),
    "alone, each does all": ([PREFILL], LONG, {}, ("p", "", "no_pair")),
    "each": ([DECODE], LONG, {}, ("d", "", "no_pair")),
    "one that does both is for prompts where another only decodes": ([BOTH, DECODE], LONG, {}, ("b", "d", "pays")),
    "as long as that is not too full": (
        [BOTH, view("decode", num_running=300, context_tokens=3_000_000)], LONG, {}, ("b", "", "answer"),
    ),
    "and the answer is not too short": ([BOTH, DECODE], errand(answer=3), {}, ("b", "", "migration")),
    "and passes it on where its own steps are slow": (
        [view("both", num_running=4, context_tokens=800_000), DECODE], LONG, {}, ("b", "d", "pays"),
    ),
    "beside one for prompts it decodes": (
        [PREFILL, view("both", num_running=6, context_tokens=6000)], LONG, {}, ("p", "b", "pays"),
    ),
    "where another only computes prompts it decodes": ([PREFILL, BOTH], LONG, {}, ("p", "b", "pays")),
    "and does the whole where the prompt is short": ([PREFILL, BOTH], BRIEF, {}, ("b", "", "migration")),
    "or the other one far behind": (
        [view("prefill", num_waiting=9, waiting_tokens=30_000), BOTH], LONG, {}, ("b", "", "prompt"),
    ),
    "the emptier of two that decode": (
        [PREFILL, BUSY_DECODE, view("decode", "e", num_running=2)], LONG, {}, ("p", "e", "pays"),
    ),
    "the emptier of two that compute prompts": (
        [view("prefill", num_waiting=1, waiting_tokens=1500), view("prefill", "q"), DECODE], LONG, {},
        ("q", "d", "pays"),
    ),
    "the one that holds the prefix": (
        [PREFILL, view("prefill", "q"), DECODE], LONG, {"q": 800}, ("q", "d", "pays"),
    ),
    "two that do both pass nothing on": (
        [BOTH, view("both", "c", num_running=9), view("prefill", fetch_token_ns=0, kv_root=b"")], LONG, {},
        ("b", "", "no_pair"),
    ),
    "one that fetches nothing": ([PREFILL, view("decode", fetch_token_ns=0.0)], LONG, {}, ("d", "", "no_pair")),
    "one that lends nothing": ([view("prefill", kv_root=b""), DECODE], LONG, {}, ("d", "", "no_pair")),
    "another model's": ([view("prefill", kv_root=b"other"), DECODE], LONG, {}, ("d", "", "no_pair")),
    "a prompt without a block": (
        [PREFILL, DECODE], Errand(block_tokens=16, prompt_tokens=12, max_tokens=100), {}, ("d", "", "no_pair"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_who_computes_the_prompt_and_who_decodes(case: str) -> None:
    replicas, asked, cached, expected = CASES[case]
    for order in itertools.permutations(replicas):
        way, reason = choose(asked, order, cached)
        assert (way.name, way.then, reason.value) == expected


ROUTES: dict[str, tuple[Sequence[ReplicaView], Errand, tuple[str, str] | None]] = {
    "a pair": ([PREFILL, DECODE], LONG, ("p", "d")),
    "one that is not ready": ([view("prefill", ready=False), DECODE], LONG, ("d", "")),
    "one that is suspect": ([PREFILL, view("decode", suspect=True)], LONG, ("p", "")),
    "a half that failed: the other does all": ([PREFILL, DECODE], errand(avoid=frozenset("p")), ("d", "")),
    "the other half": ([PREFILL, DECODE], errand(avoid=frozenset("d")), ("p", "")),
    "both failed: rather not one for decodes": ([PREFILL, DECODE], errand(avoid=frozenset("pd")), ("p", "")),
    "nobody": ([view("prefill", ready=False)], LONG, None),
}


@pytest.mark.parametrize("case", ROUTES)
def test_pick_with_roles(case: str) -> None:
    replicas, asked, expected = ROUTES[case]
    for order in itertools.permutations(replicas):
        picked = pick(asked, order, {}, never)
        assert (None if picked is None else (picked.name, picked.then)) == expected


def test_where_all_do_both_nothing_is_decided() -> None:
    replicas = [view("both", "a", num_running=9), view("both", "b")]
    assert pick(LONG, replicas, {"a": Held(50, 50, 50)}, never) == Pick("a", 800, "", None)


def test_the_reason_comes_with_the_pick() -> None:
    assert pick(LONG, [PREFILL, DECODE], {"p": Held(10, 10, 10)}, never) == Pick("p", 160, "d", Reason.PAYS)


def test_among_many_each_role_has_its_candidates() -> None:
    replicas = [view("decode", f"d{number:02}") for number in range(40)] + [view("prefill", "z")]
    picked = pick(LONG, replicas, {}, lambda others, count: list(others)[:count])
    assert picked is not None and (picked.name, picked.then) == ("z", "d00")
    assert MAX_CANDIDATES < 40
