"""Requests go where their prefix is held: real processes, and a stub that tells its blocks word for word."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.core.kv.hashing import chain, scope_key
from shoal.core.kv.news import DEVICE
from shoal.core.request import Finish, RequestSpec
from shoal.fleet.directory import Held
from shoal.wire.messages import Costs, Ending, Frame, KvNews, Update
from tests.gateway.stub import StubEngine, stage
from tests.support.gateways import service
from tests.support.processes import wait_until
from tests.support.scripted import Script
from tests.support.wires import VIEW, until

PROMPT = list(range(100, 200))  # six blocks of 16 tokens, and four more
NO_PARENT = bytes(16)


@pytest.mark.processes
def test_requests_go_to_the_engine_that_holds_their_beginning_until_that_is_killed(model_dir: Path) -> None:
    with service(model_dir, Script(), Script()) as s:
        wait_until(lambda: s.counts("num_replicas_ready")[""] == 2, 10, lambda: s.gateway.text)
        assert s.complete(PROMPT, max_tokens=4).status == 200
        (holder,) = [number for number in (0, 1) if s.engine_count("prefix_cache_queries_total", number)]
        other = 1 - holder
        for number in range(3):
            answer = s.complete([*PROMPT, 50 + number], max_tokens=4).json
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
        assert s.engine_count("prefix_cache_hits_total", holder) == 3 * 96
        assert s.counts("prefix_cached_tokens_total")[""] == s.counts("prefix_expected_tokens_total")[""] == 3 * 96
        wait_until(lambda: s.counts("directory_blocks")[""] == 6, 10, lambda: s.gateway.text)
        assert 0 < s.counts("directory_bytes")[""] <= 256 << 20

        s.engines[holder].kill(signal.SIGKILL)
        s.engines[holder].wait()
        wait_until(lambda: s.counts("directory_blocks")[""] == 0, 10, lambda: s.gateway.text)
        for hits in (0, 96):  # the other one computes it once, and is known to hold it from then on
            assert s.complete([*PROMPT, 60 + hits], max_tokens=4).status == 200
            assert s.engine_count("prefix_cache_hits_total", other) == hits
        assert s.counts("prefix_expected_tokens_total")[""] == 4 * 96
        assert s.balanced()


def news(keys: Sequence[bytes], first: int = 0) -> KvNews:
    return KvNews(first, b"".join(keys), b"".join((NO_PARENT, *keys[:-1])), bytes([DEVICE]) * len(keys))


def keys_of(prompt: Sequence[int]) -> tuple[bytes, ...]:
    return chain(scope_key(b"root", ""), prompt, 16)  # the stub's root; no keys, hence the tenant without a name


async def test_what_is_known_of_a_replica_ends_with_its_session_and_at_a_gap(model_dir: Path, folder: Path) -> None:
    engine = StubEngine()
    keys = keys_of(PROMPT)
    async with stage(model_dir, folder, engine) as s:
        directory = s.gateway._replicas.directory
        name = f"unix:{folder}/0.sock"

        def holds(num_blocks: int) -> bool:
            return directory.holders(keys) == ({name: Held(*[num_blocks] * 3)} if num_blocks else {})

        engine.tell(Frame(view=VIEW, kv=news(keys[:2])))
        engine.tell(Frame(view=VIEW, kv=KvNews(2, keys[2], keys[1], bytes([DEVICE]))))
        await until(lambda: holds(3))
        engine.tell(Frame(view=VIEW, kv=news(keys[:1])))  # from the beginning
        await until(lambda: holds(1))
        engine.tell(Frame(view=VIEW, kv=KvNews(7, keys[1], keys[0], bytes([DEVICE]))))
        engine.tell(Frame(view=VIEW, kv=KvNews(8, keys[0], NO_PARENT, bytes([DEVICE]))))
        await until(lambda: holds(0))
        engine.tell(Frame(view=VIEW, kv=news(keys[:4])))
        await until(lambda: holds(4))
        engine.drop()
        await until(lambda: holds(0))
        await until(lambda: engine.num_connections == 2)
        engine.tell(Frame(view=VIEW, kv=news(keys[:5])))
        await until(lambda: holds(5))
        engine.tell(Frame(view=VIEW, kv=KvNews(5, keys[5], NO_PARENT, b"")))
        await until(lambda: engine.num_connections == 3 and holds(0))


@pytest.mark.parametrize("scored", [False, True])
async def test_the_holder_is_picked_and_what_it_found_is_counted_beside_what_was_expected(
    model_dir: Path, folder: Path, scored: bool
) -> None:
    """A prompt whose logprobs are asked for is computed in full, so that its prefix does not matter."""

    def answer(engine: StubEngine, specs: Sequence[RequestSpec]) -> None:
        engine.say(Update(spec.id, 0, (100,), ending=Ending(Finish.LENGTH, None, 64)) for spec in specs)

    first, second = StubEngine(answer), StubEngine(answer)
    prompt = PROMPT[:90]
    async with stage(model_dir, folder, first, second) as s:
        second.tell(Frame(view=VIEW, kv=news(keys_of(prompt))))
        await until(lambda: len(s.gateway._replicas.directory) == 5)
        body = {"prompt": prompt, "max_tokens": 1} | ({"echo": True, "logprobs": 1} if scored else {})
        status, _ = await s.complete(**body)
        if scored:
            assert (len(first.submitted), len(second.submitted)) == (1, 0)
            return
        assert status == 200
        assert (len(first.submitted), len(second.submitted)) == (0, 1)
        value = s.gateway.metrics.registry.get_sample_value
        assert value("shoal:prefix_prompt_tokens_total") == 90
        assert value("shoal:prefix_expected_tokens_total") == 80
        assert value("shoal:prefix_cached_tokens_total") == 64


async def test_costs_that_no_one_could_compute_with_are_not_taken_over(model_dir: Path, folder: Path) -> None:
    engine, good = StubEngine(), (1e6, 1e4, 1.0, 1e3, 10.0)
    async with stage(model_dir, folder, engine) as s:
        for costs in (good, (float("nan"), 1, 1, 1, 1), (-1.0, 1, 1, 1, 1), (1.0,), (1e300, 1, 1, 1, 1)):
            engine.tell(Frame(view=VIEW, costs=Costs(coefficients=costs)))
        engine.tell(Frame(view=replace(VIEW, context_tokens=5, waiting_tokens=7)))
        (link,) = s.gateway._replicas._links.values()
        await until(lambda: link.replica_view().context_tokens == 5)
        assert link.replica_view().costs == good and link.replica_view().waiting_tokens == 7
        assert (await s.complete())[0] == 200
