"""Losing, finding and judging replicas, against stub engines that speak the real wire."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal.core.request import Finish, Refusal, RequestSpec
from shoal.fleet import health
from shoal.fleet.stream import MAX_REPLAYS
from shoal.gateway.link import Identity
from shoal.gateway.replicas import Replicas
from shoal.wire.messages import Announce, Ending, Members, Refusing, Replica, Update
from tests.gateway.stub import StubEngine, stage
from tests.support.wires import SECRET, until

IDENTITY = Identity(name="gateway-0", incarnation="g", secret=SECRET)


def refuse(reason: Refusal) -> StubEngine:
    return StubEngine(
        lambda engine, specs: engine.say(refused=[Refusing(spec.id, reason, "a reason") for spec in specs])
    )


@pytest.mark.parametrize(
    ("reason", "status"),
    [(Refusal.QUEUE_FULL, 429), (Refusal.KV_POOL, 400), (Refusal.CONTEXT_LENGTH, 400), (Refusal.DUPLICATE_ID, 500)],
)
async def test_a_replica_that_refuses_gives_the_status_of_the_table(
    model_dir: Path, folder: Path, reason: Refusal, status: int
) -> None:
    async with stage(model_dir, folder, refuse(reason)) as s:
        got, body = await s.complete(n=2)
        assert (got, body["error"]["code"], body["error"]["message"]) == (status, reason.value, "a reason")


async def test_a_full_queue_says_when_to_come_back(model_dir: Path, folder: Path) -> None:
    async with (
        stage(model_dir, folder, refuse(Refusal.QUEUE_FULL)) as s,
        s.http.post(s.url + "/v1/completions", json={"model": "tiny", "prompt": "x"}) as answer,
    ):
        assert answer.status == 429 and answer.headers["retry-after"] == "1"


async def test_no_replica_is_503_and_not_ready(model_dir: Path, folder: Path) -> None:
    async with stage(model_dir, folder) as s:
        status, body = await s.complete()
        assert (status, body["error"]["code"]) == (503, "no_replica")
        assert await s.status("/ready") == 503 and await s.status("/health") == 200


async def test_a_replica_that_takes_no_work_is_not_ready_until_it_says_so(model_dir: Path, folder: Path) -> None:
    engine = StubEngine(ready=False)
    async with stage(model_dir, folder, engine) as s:
        assert await s.status("/ready") == 503
        assert (await s.complete())[0] == 503
        engine.ready = True
        engine.say()
        await until(lambda: s.gateway._replicas.ready)
        assert await s.status("/ready") == 200
        assert (await s.complete())[0] == 200


async def test_a_request_that_nothing_came_back_of_is_sent_to_another_replica(model_dir: Path, folder: Path) -> None:
    first = StubEngine(lambda engine, specs: engine.drop())
    second = StubEngine()
    async with stage(model_dir, folder, first, second) as s:
        status, body = await s.complete(n=2)
        assert status == 200 and body["usage"]["completion_tokens"] == 4
        assert len(first.submitted) == len(second.submitted) == 2
        ids = [spec.id for spec in (*first.submitted, *second.submitted)]
        assert len(set(ids)) == 4, "an id is used for one attempt only"
        leader, follower = second.submitted
        assert follower.leader == leader.id


async def test_it_is_sent_to_the_same_replica_when_that_is_back_and_the_only_one(model_dir: Path, folder: Path) -> None:
    def drop_once(engine: StubEngine, specs: Sequence[RequestSpec]) -> None:
        engine.answer(specs) if engine.num_connections > 1 else engine.drop()

    engine = StubEngine(drop_once)
    async with stage(model_dir, folder, engine) as s:
        assert (await s.complete())[0] == 200
        assert engine.num_connections == 2


async def test_attempts_are_three_at_most_and_the_failure_is_a_real_status(model_dir: Path, folder: Path) -> None:
    engines = [StubEngine(lambda engine, specs: engine.drop()) for _ in range(2)]
    async with stage(model_dir, folder, *engines) as s:
        status, body = await s.complete(stream=True)
        assert (status, body["error"]["code"]) in ((502, "replica_lost"), (503, "no_replica"))
        assert sum(len(engine.submitted) for engine in engines) <= 3


def half(engine: StubEngine, specs: Sequence[RequestSpec]) -> None:
    """A token, and then the connection is lost."""
    engine.say([Update(specs[0].id, len(specs[0].output), (100,))])
    asyncio.get_running_loop().call_later(0.05, engine.drop)


async def test_after_the_first_token_another_replica_goes_on_behind_it(model_dir: Path, folder: Path) -> None:
    def rest(engine: StubEngine, specs: Sequence[RequestSpec]) -> None:
        (spec,) = specs
        engine.say([Update(spec.id, len(spec.output), (101,), ending=Ending(Finish.LENGTH, None, 0))])

    engines = StubEngine(half), StubEngine(rest)
    async with stage(model_dir, folder, *engines) as s:
        status, text = await s.complete(stream=True)
        assert status == 200 and '"error"' not in text and text.endswith("data: [DONE]\n\n")
    (first,), (second,) = engines[0].submitted, engines[1].submitted
    assert (second.prompt, second.output, second.sampling) == (first.prompt, (100,), first.sampling)
    assert second.id != first.id and second.max_tokens == first.max_tokens


async def test_where_nobody_is_left_to_go_on_it_is_one_error_event(model_dir: Path, folder: Path) -> None:
    async with stage(model_dir, folder, StubEngine(half)) as s:
        status, text = await s.complete(stream=True)
        assert status == 200
        assert text.count('"error"') == 1 and "replica_lost" in text.split("\n\n")[-2]
        assert "[DONE]" not in text and '"finish_reason":"' not in text


async def test_a_request_whose_replicas_are_lost_one_after_the_other_is_given_up(model_dir: Path, folder: Path) -> None:
    engines = [StubEngine(half) for _ in range(6)]
    async with stage(model_dir, folder, *engines) as s:
        status, text = await s.complete(stream=True, max_tokens=20)
        assert status == 200 and text.count('"error"') == 1 and "replica_lost" in text.split("\n\n")[-2]
    assert sum(len(engine.submitted) for engine in engines) == 1 + MAX_REPLAYS


@pytest.mark.parametrize("index", [0, 2])
async def test_a_repeated_or_missing_token_is_an_error_and_never_text(
    model_dir: Path, folder: Path, index: int
) -> None:
    def broken(engine: StubEngine, specs: Sequence[RequestSpec]) -> None:
        engine.say([Update(specs[0].id, 0, (100,))])
        engine.say([Update(specs[0].id, index, (100,))])

    engine = StubEngine(broken)
    async with stage(model_dir, folder, engine) as s:
        status, body = await s.complete()
        assert (status, body["error"]["code"]) == (502, "seam_broken")
        await until(lambda: engine.aborted)


async def test_tokens_after_the_end_of_a_choice_are_dropped(model_dir: Path, folder: Path) -> None:
    def twice(engine: StubEngine, specs: Sequence[RequestSpec]) -> None:
        engine.answer(specs)
        engine.answer(specs)

    async with stage(model_dir, folder, StubEngine(twice)) as s:
        status, body = await s.complete()
        assert status == 200 and body["usage"]["completion_tokens"] == 2


async def test_a_stop_string_ends_the_choice_here_and_at_the_replica(
    model_dir: Path, folder: Path, tokenizer: object
) -> None:
    encode = tokenizer.encode  # type: ignore[attr-defined]
    tokens = tuple(encode("xyab"))

    def endless(engine: StubEngine, specs: Sequence[RequestSpec]) -> None:
        engine.say([Update(specs[0].id, 0, tokens)])

    engine = StubEngine(endless)
    async with stage(model_dir, folder, engine) as s:
        status, body = await s.complete(stop=["ab"])
        choice = body["choices"][0]
        assert (status, choice["text"], choice["finish_reason"]) == (200, "xy", "stop")
        assert body["usage"]["completion_tokens"] == 4
        await until(lambda: engine.aborted)
        assert engine.aborted == [(engine.submitted[0].id, "stop_string")]


async def test_least_loaded_first_and_requests_just_sent_count(model_dir: Path, folder: Path) -> None:
    engines = [StubEngine(lambda engine, specs: None) for _ in range(3)]
    async with stage(model_dir, folder, *engines) as s:
        tasks = [asyncio.create_task(s.complete()) for _ in range(9)]
        await until(lambda: sum(len(engine.submitted) for engine in engines) == 9)
        assert [len(engine.submitted) for engine in engines] == [3, 3, 3]
        for engine in engines:
            for spec in engine.submitted:
                engine.answer([spec])
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 9


async def test_a_request_past_its_time_ends_with_an_error(model_dir: Path, folder: Path) -> None:
    engine = StubEngine(lambda engine, specs: None)
    async with stage(model_dir, folder, engine, request_timeout_s=0.3) as s:
        status, body = await s.complete()
        assert (status, body["error"]["code"]) == (504, "request_timeout")
        await until(lambda: engine.aborted)
        assert engine.aborted == [(engine.submitted[0].id, "request_timeout")]


async def test_silence_makes_a_replica_suspect_then_dead_and_an_announcement_allows_for_it(
    model_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "SUSPECT_NS", 300 * health.MS_NS)
    monkeypatch.setattr(health, "DEAD_NS", 900 * health.MS_NS)
    engine = StubEngine(lambda engine, specs: engine.say([Update(specs[0].id, 0, (100,))], num_running=1))
    async with stage(model_dir, folder, engine) as s:
        began = time.monotonic()
        task = asyncio.create_task(s.complete())
        await until(lambda: engine.submitted)
        await until(lambda: not s.gateway._replicas.ready)
        assert not task.done() and time.monotonic() - began >= 0.3
        status, body = await task
        assert (status, body["error"]["code"]) == (502, "replica_lost")
        await until(lambda: engine.num_connections == 2)
        engine.tell(Announce(what="step", predicted_ns=10**9))
        task = asyncio.create_task(s.complete())
        await until(lambda: len(engine.submitted) == 2)
        engine.tell(Announce(what="step", predicted_ns=10**9))
        await asyncio.wait([task], timeout=1.2)
        assert not task.done() and engine.num_connections == 2
        engine.say([Update(engine.submitted[1].id, 1, (), ending=Ending(Finish.LENGTH, None, 0))])
        assert (await task)[0] == 200


async def test_replicas_hear_that_the_gateway_lives(model_dir: Path, folder: Path) -> None:
    engine = StubEngine()
    async with stage(model_dir, folder, engine):
        await until(lambda: engine.num_keep_alives >= 2)


async def test_members_are_dialled_kept_on_disk_and_retired_only_when_they_are_gone(folder: Path) -> None:
    engine = StubEngine()
    listener = await engine.listen(f"unix:{folder}/e.sock")
    member = Replica(name="engine-0", incarnation="stub", address=f"unix:{folder}/e.sock", state="serving")
    file = folder / "members.json"
    replicas = Replicas(IDENTITY, members_file=file)
    running = asyncio.create_task(replicas.run())
    replicas.on_members(Members(version=1, replicas=(member,)))
    await until(lambda: replicas.ready)
    replicas.on_members(Members(version=2, replicas=()))  # a controller that has just started knows nobody
    engine.say()
    assert replicas.ready
    running.cancel()
    await asyncio.wait([running])

    again = Replicas(IDENTITY, members_file=file)  # a gateway that starts without a controller
    running = asyncio.create_task(again.run())
    await until(lambda: again.ready)
    again.on_members(Members(version=3, replicas=()))
    await listener.close()
    await until(lambda: not again.views())
    running.cancel()
    await asyncio.wait([running])


async def test_the_members_file_is_private_and_follows_no_link(folder: Path) -> None:
    victim = folder / "victim"
    victim.write_text("untouched")
    (folder / "members.new").symlink_to(victim)
    member = Replica(name="engine-0", incarnation="x", address=f"unix:{folder}/e.sock", state="serving")
    members = Members(version=1, replicas=(member,))
    Replicas(IDENTITY, members_file=folder / "members.json").on_members(members)
    assert (folder / "members.json").stat().st_mode & 0o777 == 0o600
    assert victim.read_text() == "untouched" and not (folder / "members.json").is_symlink()


async def test_a_broken_members_file_does_no_harm(folder: Path) -> None:
    file = folder / "members.json"
    file.write_text("{")
    replicas = Replicas(IDENTITY, members_file=file)
    running = asyncio.create_task(replicas.run())
    await asyncio.sleep(0)
    assert not running.done() and replicas.views() == []
    running.cancel()
    await asyncio.wait([running])
