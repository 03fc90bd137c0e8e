"""Whether one replica should compute a request's prompt and another one decode it: by predicted times.

    whole   one replica computes the prompt and decodes
    split   one computes the prompt; another fetches its blocks, and decodes from the first token on

What a way costs is the time until the answer is there, and for those that decode where it passes the time by which they
get later: each of them waits for the prompt's chunks, and each step takes longer by what one more adds to it.

A role is a word on what will come, which no prediction knows: where prompts are computed a chunk will be in every step,
and where others decode some will be waiting for each chunk. So a replica for decodes rarely computes a prompt of more
than a few tokens, and one for prompts rarely keeps an answer; but where they are alone, or far less busy, they do.
One that does both is expected to get what the others leave to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from shoal.fleet.scorers import CHUNK_TOKENS, Errand, chunks_ns, own_ns, prompt_ns, step_ns
from shoal.fleet.view import ReplicaRole, ReplicaView

MOST_TOKENS = 128  # of the answer, that count: few use all that they may
DECODES = 8  # that wait for a chunk on a replica for decodes, at least
LATENCY_NS = 10_000_000  # until another replica has answered


class Reason(StrEnum):
    """Why a request is split, or what speaks most against it."""

    PAYS = "pays"
    NO_PAIR = "no_pair"  # of replicas between which KV could go
    PROMPT = "prompt"  # would be computed later, or in the way of more decodes
    MIGRATION = "migration"  # takes too long
    ANSWER = "answer"  # would be slower there, or in the way of more decodes


class Way(NamedTuple):
    cost_ns: float
    name: str
    then: str  # who decodes; empty: the same
    parts_ns: tuple[float, float, float]  # prompt, migration, answer


class Choice(NamedTuple):
    way: Way
    reason: Reason


class Coming(NamedTuple):
    """How much of either kind will come to a replica by its role, from 0 to 1: to one that does both, as much as others
    leave to it."""

    prompts: Mapping[ReplicaRole, float]
    answers: Mapping[ReplicaRole, float]

    @classmethod
    def to(cls, replicas: Sequence[ReplicaView]) -> Coming:
        num = Counter(replica.role for replica in replicas)
        left = [num[role] / len(replicas) for role in (ReplicaRole.DECODE, ReplicaRole.PREFILL)]
        return cls(
            {ReplicaRole.PREFILL: 1.0, ReplicaRole.BOTH: left[0], ReplicaRole.DECODE: 0.0},
            {ReplicaRole.PREFILL: 0.0, ReplicaRole.BOTH: left[1], ReplicaRole.DECODE: 1.0},
        )


def choose(errand: Errand, replicas: Sequence[ReplicaView], cached: Mapping[str, int]) -> Choice:
    """The cheapest way over at least one replica; equal ones: the first name. `cached`: tokens of the prompt."""
    coming = Coming.to(replicas)
    prompts = {each.name: _prompt_ns(errand, each, cached.get(each.name, 0), coming) for each in replicas}
    answers = {each.name: _answer_ns(errand, each, coming) for each in replicas}
    whole = min(_way(each.name, "", prompts[each.name], 0.0, answers[each.name]) for each in replicas)
    migrations = {each.name: _migration_ns(errand, each, cached.get(each.name, 0)) for each in replicas}
    pairs = [
        _way(first.name, then.name, prompts[first.name], migrations[then.name], answers[then.name])
        for first in replicas
        for then in replicas
        if errand.keys and _are_pair(first, then)
    ]
    if not pairs:
        return Choice(whole, Reason.NO_PAIR)
    split = min(pairs)
    if split.cost_ns < whole.cost_ns:
        return Choice(split, Reason.PAYS)
    more = [there - here for there, here in zip(split.parts_ns, whole.parts_ns, strict=True)]
    return Choice(whole, (Reason.PROMPT, Reason.MIGRATION, Reason.ANSWER)[more.index(max(more))])


def _way(name: str, then: str, *parts_ns: float) -> Way:
    prompt, migration, answer = parts_ns
    return Way(prompt + migration + answer, name, then, (prompt, migration, answer))


def _are_pair(first: ReplicaView, then: ReplicaView) -> bool:
    """One may compute prompts that the other decodes; between two that do both, nobody has asked for it."""
    if first.name == then.name or first.role is ReplicaRole.DECODE or then.role is ReplicaRole.PREFILL:
        return False
    if first.role is then.role:
        return False
    return bool(first.kv_root) and first.kv_root == then.kv_root and then.fetch_token_ns > 0


def _prompt_ns(errand: Errand, replica: ReplicaView, cached_tokens: int, coming: Coming) -> float:
    waiting = max(float(replica.num_running), DECODES * coming.answers[replica.role])
    return prompt_ns(errand, replica, cached_tokens) + waiting * chunks_ns(errand, replica, cached_tokens)


def _answer_ns(errand: Errand, replica: ReplicaView, coming: Coming) -> float:
    _, per_new, _, _, _ = replica.costs
    chunk = per_new * CHUNK_TOKENS * coming.prompts[replica.role]
    own = own_ns(errand, replica)
    return min(errand.max_tokens, MOST_TOKENS) * (step_ns(replica) + chunk + own + replica.num_running * own)


def _migration_ns(errand: Errand, replica: ReplicaView, cached_tokens: int) -> float:
    """To a replica: what it lacks is fetched; then a block at most is computed again, in a step with its others."""
    _, per_new, _, _, _ = replica.costs
    fetch = LATENCY_NS + replica.fetch_token_ns * (errand.prompt_tokens - cached_tokens)
    again = per_new * errand.block_tokens
    return fetch + step_ns(replica) + again + replica.num_running * again
