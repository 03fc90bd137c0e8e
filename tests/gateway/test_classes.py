"""Classes, tenants and their limits over HTTP: what a replica is asked, what the client is told, what is counted."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from multidict import CIMultiDict
from prometheus_client.parser import text_string_to_metric_families

from shoal.core.classes import DEFAULT_CLASSES, ServiceClass
from shoal.core.kv import hashing
from shoal.core.request import Finish, Refusal, RequestSpec
from shoal.gateway import job
from shoal.gateway.auth import Grant, Keys, digest
from shoal.gateway.tenants import TenantLimits
from shoal.gateway.text.decode import IncrementalDecoder
from shoal.wire.messages import Ending, Refusing, Update
from tests.gateway.stub import Stage, StubEngine, stage
from tests.support.wires import until

LENGTH = Ending(Finish.LENGTH, None, 0)
TEXT = "/v1/completions"
LISTED = {
    digest(b"k-acme"): Grant(tenant="acme", classes=("standard", "batch")),
    digest(b"k-globex"): Grant(tenant="globex", classes=("interactive",)),
    digest(b"k-one"): Grant(tenant="one", classes=("standard",), limits=TenantLimits(max_in_flight=1, max_queued=1)),
    digest(b"k-few"): Grant(tenant="few", classes=("standard",), limits=TenantLimits(tokens_per_minute=60)),
    digest(b"k-proxy"): Grant(tenant="portal", classes=("standard",), proxy=True),
}


def keys() -> Keys:
    return Keys(["k-own"], LISTED)


class Answer(NamedTuple):
    status: int
    headers: CIMultiDict[str]
    body: Any
    took_s: float

    @property
    def code(self) -> str:
        code: str = self.body["error"]["code"]
        return code


async def ask(s: Stage, key: str = "", headers: Sequence[tuple[str, str]] = (), **fields: Any) -> Answer:
    """A completion of one token, unless told otherwise."""
    every = CIMultiDict(headers)
    if key:
        every.add("authorization", f"Bearer {key}")
    began = time.monotonic()
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 1} | fields
    async with s.http.post(s.url + TEXT, json=body, headers=every) as answer:
        text = await answer.text()
        took_s = time.monotonic() - began
        parsed = text if answer.content_type == "text/event-stream" else json.loads(text)
        return Answer(answer.status, CIMultiDict(answer.headers), parsed, took_s)


async def raw(s: Stage, lines: str, pause_s: float = 0.0) -> tuple[int, float]:
    """A completion with these header lines, byte for byte, and a pause in the middle of its body: the status, and the
    moment before the rest was sent."""
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(s.url.rpartition(":")[2]))
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n{lines}\r\n\r\n"
    writer.write(head.encode() + body[:5])
    await asyncio.sleep(pause_s)
    sent_s = time.monotonic()
    writer.write(body[5:])
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return int(answer.split()[1]), sent_s


async def metrics(s: Stage, key: str = "k-own") -> tuple[str, dict[tuple[str, ...], float]]:
    """The page, and its samples by name and labels, sorted by the labels' names."""
    async with s.http.get(s.url + "/metrics", headers={"authorization": f"Bearer {key}"}) as answer:
        page = await answer.text()
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return page, {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value for sample in samples
    }


# -- what a replica is asked -------------------------------------------------------------------------------------------


async def test_the_key_decides_tenant_salt_class_and_place(model_dir: Path, folder: Path) -> None:
    engine = StubEngine()
    async with stage(model_dir, folder, engine, keys=keys()) as s:
        for key, fields in (
            ("k-own", {"priority": -3}),
            ("k-own", {}),
            ("k-acme", {"priority": -3}),
            ("k-acme", {"priority": 3}),
            ("k-globex", {"n": 2}),
        ):
            assert (await ask(s, key, **fields)).status == 200
    found = [(spec.tenant, spec.salt, spec.service_class, spec.priority) for spec in engine.submitted]
    assert found == [
        ("", "", "interactive", -3),
        ("", "", "standard", 0),
        ("acme", "acme", "standard", 0),
        ("acme", "acme", "batch", 3),
        ("globex", "globex", "interactive", 0),
        ("globex", "globex", "interactive", 0),
    ]


async def test_tenants_share_no_prefix(model_dir: Path, folder: Path) -> None:
    """The same prompt has other keys for each tenant, and they are those that an engine makes of the spec's salt."""
    engine = StubEngine()
    async with stage(model_dir, folder, engine, keys=keys()) as s:
        for key in ("k-own", "k-acme", "k-globex"):
            assert (await ask(s, key, prompt="a" * 40)).status == 200
    assert len({spec.prompt for spec in engine.submitted}) == 1
    assert len({spec.prefix_keys[0] for spec in engine.submitted}) == 3
    for spec in engine.submitted:
        assert spec.prefix_keys == hashing.chain(hashing.scope_key(b"root", spec.salt), spec.prompt, 16)


async def test_targets_are_the_class_s_or_looser(model_dir: Path, folder: Path) -> None:
    engine = StubEngine()
    async with stage(model_dir, folder, engine) as s:
        for headers in ([], [("x-slo-ttft-ms", "9000"), ("x-slo-tpot-ms", "1")], [("X-Shoal-Class", "batch")]):
            assert (await ask(s, headers=headers)).status == 200
    standard = DEFAULT_CLASSES["standard"]
    assert [(spec.ttft_ms, spec.tpot_ms) for spec in engine.submitted] == [
        (standard.ttft_ms, standard.tpot_ms),
        (9000.0, standard.tpot_ms),
        (0.0, 0.0),
    ]


async def test_a_proxy_names_the_tenant_and_nobody_else_does(model_dir: Path, folder: Path) -> None:
    engine = StubEngine()
    async with stage(model_dir, folder, engine, keys=keys()) as s:
        spoofed = [("x-tenant-id", "globex"), ("x-shoal-tenant", "globex"), ("x_tenant_id", "globex")]
        for key in ("k-proxy", "k-acme", "k-own"):
            assert (await ask(s, key, spoofed, user="globex", metadata={"tenant": "globex"})).status == 200
        assert (await ask(s, "k-proxy")).status == 200
        assert (await ask(s, "k-proxy", [("x-tenant-id", "a b")])).code == "invalid_request"
        assert (await ask(s, "k-acme", cache_salt="globex")).code == "not_supported"
    assert [(spec.tenant, spec.salt) for spec in engine.submitted] == [
        ("globex", "globex"),
        ("acme", "acme"),
        ("", ""),
        ("portal", "portal"),
    ]


async def test_a_class_that_was_not_granted_is_refused_before_anything_is_done(model_dir: Path, folder: Path) -> None:
    engine = StubEngine()
    async with stage(model_dir, folder, engine, keys=keys()) as s:
        for key, name, status, code in (
            ("k-acme", "interactive", 403, "class_not_granted"),
            ("k-acme", "gold", 400, "unknown_class"),
            ("k-globex", "batch", 403, "class_not_granted"),
            ("k-own", "gold", 400, "unknown_class"),
        ):
            answer = await ask(s, key, [("x-shoal-class", name)], priority=-(1 << 31))
            assert (answer.status, answer.code, answer.body["error"]["param"]) == (status, code, "x-shoal-class")
        assert s.gateway.tenants.in_flight() == {}
    assert not engine.submitted


@pytest.mark.parametrize(
    "lines",
    [
        "x-shoal-class: batch\r\nx-shoal-class: batch",
        "x-shoal-class: batch\r\nX-Shoal-Class: interactive",
        "x-slo-ttft-ms: 5\r\nx-slo-ttft-ms: 5",
        "x-slo-tpot-ms: fast",
        "authorization: Bearer k-acme",  # beside the right one
        "x-shoal-class: batch\r\n interactive",  # a folded line
        "x-shoal-class : batch",
        "x-shoal-class: batch\nauthorization: Bearer k-acme",
    ],
)
async def test_what_two_readers_could_understand_differently_is_refused(
    model_dir: Path, folder: Path, lines: str
) -> None:
    engine = StubEngine()
    async with stage(model_dir, folder, engine, keys=keys()) as s:
        status, _ = await raw(s, f"authorization: Bearer k-own\r\n{lines}")
        assert status == 400
    assert not engine.submitted


async def test_an_engine_that_does_not_know_the_class_is_the_client_s_400(model_dir: Path, folder: Path) -> None:
    async with stage(model_dir, folder, refusing(Refusal.UNKNOWN_CLASS)) as s:
        answer = await ask(s)
        assert (answer.status, answer.code) == (400, "unknown_class")


async def test_time_spent_waiting_goes_along_and_a_slow_sender_is_not_waiting(model_dir: Path, folder: Path) -> None:
    submitted_s: list[float] = []

    def drop_later(engine: StubEngine, specs: Sequence[RequestSpec]) -> None:
        submitted_s.append(time.monotonic())
        asyncio.get_running_loop().call_later(0.3, engine.drop)

    def answer(engine: StubEngine, specs: Sequence[RequestSpec]) -> None:
        submitted_s.append(time.monotonic())
        engine.answer(specs)

    first, second = StubEngine(drop_later), StubEngine(answer)
    async with stage(model_dir, folder, first, second) as s:
        began_s = time.monotonic()
        assert (await ask(s)).status == 200
        waited_s = [engine.submitted[0].waited_ns / 1e9 for engine in (first, second)]
        assert all(waited <= at_s - began_s for waited, at_s in zip(waited_s, submitted_s, strict=True))
        assert waited_s[1] - waited_s[0] >= 0.3
        first.on_submit = answer
        counts = len(first.submitted), len(second.submitted)
        status, sent_s = await raw(s, "x: y", pause_s=0.5)
        [late] = first.submitted[counts[0] :] + second.submitted[counts[1] :]
        assert status == 200 and late.waited_ns / 1e9 <= submitted_s[-1] - sent_s


# -- what the client is told -------------------------------------------------------------------------------------------


def begins(engine: StubEngine, specs: Sequence[RequestSpec]) -> None:
    """The first slice of each, and in a later frame its tokens."""
    engine.say(Update(spec.id, 0, (), waited_ns=1_234_567_890 + 1000 * number) for number, spec in enumerate(specs))
    engine.answer(specs)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_names_its_class_and_how_long_it_was_queued(
    model_dir: Path, folder: Path, stream: bool
) -> None:
    async with stage(model_dir, folder, StubEngine(begins), keys=keys()) as s:
        answer = await ask(s, "k-acme", [("x-shoal-class", "batch")], stream=stream, n=2)
        assert (answer.status, answer.headers["x-shoal-class"]) == (200, "batch")
        assert answer.headers["x-shoal-queue-ms"] == "1234.6"
        assert "acme" not in str(answer.headers) + str(answer.body)


async def test_where_no_replica_has_begun_no_time_is_told(model_dir: Path, folder: Path) -> None:
    async with stage(model_dir, folder, refusing(Refusal.QUEUE_FULL)) as s:
        answer = await ask(s, headers=[("x-shoal-class", "batch")])
        assert answer.headers["x-shoal-class"] == "batch" and "x-shoal-queue-ms" not in answer.headers
        answer = await ask(s, headers=[("x-shoal-class", "gold")])
        assert "x-shoal-class" not in answer.headers


async def test_a_first_slice_alone_does_not_bind_a_request_to_its_replica(model_dir: Path, folder: Path) -> None:
    def begin_and_drop(engine: StubEngine, specs: Sequence[RequestSpec]) -> None:
        engine.say([Update(specs[0].id, 0, (), waited_ns=5)])
        asyncio.get_running_loop().call_later(0.05, engine.drop)

    second = StubEngine()
    async with stage(model_dir, folder, StubEngine(begin_and_drop), second) as s:
        assert (await ask(s)).status == 200
    assert len(second.submitted) == 1


async def test_a_parked_stream_gets_comment_lines_until_it_goes_on(
    model_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "QUIET_S", 0.1)

    def park(engine: StubEngine, specs: Sequence[RequestSpec]) -> None:
        engine.say([Update(specs[0].id, 0, (100,), waited_ns=1)])
        engine.say([Update(specs[0].id, 0, (), parked=True)])

    engine = StubEngine(park)
    async with stage(model_dir, folder, engine) as s:
        body = {"model": "tiny", "prompt": "x", "stream": True}
        async with s.http.post(s.url + TEXT, json=body) as answer:
            text = b""
            while text.count(b":\n\n") < 3:
                text += await asyncio.wait_for(answer.content.readany(), 5)
            engine.say([Update(engine.submitted[0].id, 0, (), parked=False)])
            engine.say([Update(engine.submitted[0].id, 1, (101,), ending=LENGTH)])
            text += await answer.content.read()
    events = [event for event in text.decode().split("\n\n") if event and event != ":"]
    assert events[-1] == "data: [DONE]" and '"finish_reason":"length"' in events[-2]
    assert "error" not in text.decode()


def refusing(reason: Refusal, retry_after_ms: int = 0) -> StubEngine:
    def refuse(engine: StubEngine, specs: Sequence[RequestSpec]) -> None:
        engine.say(refused=[Refusing(spec.id, reason, "a reason", retry_after_ms) for spec in specs])

    return StubEngine(refuse)


@pytest.mark.parametrize("reason", [Refusal.QUEUE_FULL, Refusal.WAITING_BOUND])
@pytest.mark.parametrize(
    ("retry_after_ms", "header"), [(0, "1"), (1, "1"), (1000, "1"), (1001, "2"), (2300, "3"), (7_200_000, "7200")]
)
async def test_the_time_to_come_back_is_the_replica_s(
    model_dir: Path, folder: Path, reason: Refusal, retry_after_ms: int, header: str
) -> None:
    async with stage(model_dir, folder, refusing(reason, retry_after_ms)) as s:
        answer = await ask(s, n=2)
        assert (answer.status, answer.code, answer.headers["retry-after"]) == (429, reason.value, header)


async def test_where_every_line_is_full_the_refusal_is_at_once_and_for_that_class_only(
    model_dir: Path, folder: Path
) -> None:
    """The engine of this test never answers: what it would take a step to say, the gateway says from its last view."""
    classes = {**DEFAULT_CLASSES, "standard": ServiceClass(rank=1, max_queue=3)}
    busy = StubEngine(lambda engine, specs: None, waiting={"standard": 3})
    async with stage(model_dir, folder, busy, classes=classes) as s:
        answer = await ask(s, prompt="x" * 100)
        assert (answer.status, answer.code, answer.headers["retry-after"]) == (429, "queue_full", "1")
        assert answer.took_s < 0.1 and not busy.submitted
        s.gateway._dispatcher.expect_room("standard", 4.5)
        assert (await ask(s)).headers["retry-after"] in ("4", "5")
        other = asyncio.create_task(ask(s, headers=[("x-shoal-class", "batch")]))
        await until(lambda: busy.submitted)
        busy.waiting = {"standard": 2}
        busy.answer(busy.submitted)
        assert (await other).status == 200
        busy.on_submit = lambda engine, specs: engine.answer(specs)
        assert (await ask(s)).status == 200


async def test_one_replica_with_room_is_enough(model_dir: Path, folder: Path) -> None:
    classes = {**DEFAULT_CLASSES, "standard": ServiceClass(rank=1, max_queue=3)}
    engines = StubEngine(waiting={"standard": 3}), StubEngine(waiting={"standard": 1})
    async with stage(model_dir, folder, *engines, classes=classes) as s:
        assert (await ask(s)).status == 200


# -- limits of a tenant ------------------------------------------------------------------------------------------------


async def test_a_tenant_at_its_limit_is_told_so_at_once_and_holds_up_nobody(model_dir: Path, folder: Path) -> None:
    engine = StubEngine(lambda engine, specs: None)
    async with stage(model_dir, folder, engine, keys=keys()) as s:
        held = asyncio.create_task(ask(s, "k-one"))
        await until(lambda: engine.submitted)
        answer = await ask(s, "k-one")
        assert (answer.status, answer.code, answer.headers["retry-after"]) == (429, "tenant_requests_exceeded", "1")
        assert answer.took_s < 0.1
        other = asyncio.create_task(ask(s, "k-acme"))
        await until(lambda: len(engine.submitted) == 2)
        engine.answer(engine.submitted)
        assert [(await held).status, (await other).status] == [200, 200]


async def test_tokens_a_minute_count_prompt_and_max_tokens_of_every_choice(model_dir: Path, folder: Path) -> None:
    engine = StubEngine()
    async with stage(model_dir, folder, engine, keys=keys()) as s:
        prompt = [100] * 10
        assert (await ask(s, "k-few", prompt=prompt, max_tokens=10, n=4)).status == 200  # 50 of 60
        answer = await ask(s, "k-few", prompt=prompt, max_tokens=10)
        assert (answer.status, answer.code) == (429, "tenant_tokens_exceeded")
        assert int(answer.headers["retry-after"]) in range(8, 11)
        assert answer.took_s < 0.1
        assert (await ask(s, "k-few", prompt=[100] * 5, max_tokens=5)).status == 200
    assert len(engine.submitted) == 5


async def test_tokens_of_a_request_that_a_replica_refuses_are_not_spent(model_dir: Path, folder: Path) -> None:
    engine = refusing(Refusal.WAITING_BOUND)
    async with stage(model_dir, folder, engine, keys=keys()) as s:
        for _ in range(5):
            assert (await ask(s, "k-few", prompt=[100] * 10, max_tokens=50)).code == "waiting_bound"
        engine.on_submit = lambda engine, specs: engine.answer(specs)
        assert (await ask(s, "k-few", prompt=[100] * 10, max_tokens=50)).status == 200


async def test_a_request_that_has_begun_waits_no_more(model_dir: Path, folder: Path) -> None:
    listed = {digest(b"k"): Grant(tenant="t", classes=("standard",), limits=TenantLimits(max_queued=1))}
    engine = StubEngine(lambda engine, specs: None)
    async with stage(model_dir, folder, engine, keys=Keys([], listed)) as s:
        tasks = [asyncio.create_task(ask(s, "k"))]
        await until(lambda: engine.submitted)
        assert (await ask(s, "k")).code == "tenant_queue_exceeded"
        assert s.gateway._report()["queued"] == {"standard": 1.0}
        engine.say([Update(engine.submitted[0].id, 0, (), waited_ns=1)])
        await until(lambda: s.gateway._report()["queued"] == {})
        tasks.append(asyncio.create_task(ask(s, "k")))
        await until(lambda: len(engine.submitted) == 2)
        engine.answer(engine.submitted)
        assert [(await task).status for task in tasks] == [200, 200]


def says(updates: Callable[[str], Sequence[Update]]) -> Callable[[StubEngine, Sequence[RequestSpec]], None]:
    return lambda engine, specs: [engine.say(updates(spec.id)) for spec in specs]  # type: ignore[return-value]


def token_and_drop(engine: StubEngine, specs: Sequence[RequestSpec]) -> None:
    engine.say([Update(specs[0].id, 0, (100,))])
    asyncio.get_running_loop().call_later(0.05, engine.drop)


async def leave(s: Stage, engine: StubEngine, stream: bool) -> int:
    """A client that goes away once the replica has its request, or once the stream has begun."""
    engine.submitted.clear()
    headers = {"authorization": "Bearer k-one"}
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 5, "stream": stream}
    async with aiohttp.ClientSession() as client:
        asking = asyncio.create_task(client.post(s.url + TEXT, json=body, headers=headers))
        if stream:
            answer = await asking
            await answer.content.readany()
            answer.close()
        else:
            await until(lambda: engine.submitted)
            asking.cancel()
            await asyncio.wait([asking])
    return 0


def boom(self: IncrementalDecoder, token: int) -> str:
    raise RuntimeError("a bug")


# what the replica does, what is asked (None: the client leaves), the status
ENDINGS: dict[str, tuple[Any, dict[str, Any] | None, int]] = {
    "in full": (says(lambda id: [Update(id, 0, (100,), ending=LENGTH)]), {}, 200),
    "in full, as a stream": (says(lambda id: [Update(id, 0, (100,), ending=LENGTH)]), {"stream": True}, 200),
    "refused by the replica": (refusing(Refusal.QUEUE_FULL).on_submit, {}, 429),
    "failed in the replica": (says(lambda id: [Update(id, 0, (), ending=Ending(Finish.ERROR, None, 0, "x"))]), {}, 502),
    "aborted by the replica": (says(lambda id: [Update(id, 0, (), ending=Ending(Finish.ABORT, None, 0))]), {}, 502),
    "a broken seam": (says(lambda id: [Update(id, 3, (100,))]), {}, 502),
    "the replica goes": (lambda engine, specs: engine.drop(), {}, 503),
    "the replica goes after a token": (token_and_drop, {"max_tokens": 5}, 502),
    "the replica goes after an event": (token_and_drop, {"max_tokens": 5, "stream": True}, 200),
    "too long": (None, {"max_tokens": 10**6}, 400),
    "a bad field": (None, {"n": 0}, 400),
    "a bad token": (None, {"prompt": [10**6]}, 400),
    "nothing to do": (None, {"prompt": ""}, 400),
    "another model": (None, {"model": "other"}, 404),
    "a time-out": (lambda engine, specs: None, {}, 504),
    "the client leaves while it waits": (lambda engine, specs: None, None, 0),
    "the client leaves a stream": (says(lambda id: [Update(id, 0, (100,))]), None, 0),
    "a fault of ours": (says(lambda id: [Update(id, 0, (100,))]), {}, 500),
}


async def test_i5_whatever_becomes_of_a_request_its_tenant_gets_back_what_it_held(
    model_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tenant may have one request: what is not given back would make the next one a 429."""
    engine = StubEngine()
    async with stage(model_dir, folder, engine, keys=keys(), request_timeout_s=0.7) as s:
        for ending, (on_submit, fields, status) in ENDINGS.items():
            engine.on_submit = on_submit or at_once
            with monkeypatch.context() as patch:
                if ending == "a fault of ours":
                    patch.setattr(IncrementalDecoder, "push", boom)
                found = await leave(s, engine, "stream" in ending) if fields is None else await one(s, fields)
            assert found in ((502, 503) if ending == "the replica goes" else (status,)), ending
            await until(lambda: s.gateway.tenants.in_flight() == {})
            await until(lambda: s.gateway._dispatcher.num_jobs == 0)
            await until(lambda: s.gateway._replicas.ready)
            engine.on_submit = at_once
            assert (await ask(s, "k-one")).status == 200, ending
            usage = s.gateway.tenants._usage["one"]
            assert (usage.in_flight, usage.queued) == (0, 0), ending


def at_once(engine: StubEngine, specs: Sequence[RequestSpec]) -> None:
    engine.answer(specs)


async def one(s: Stage, fields: dict[str, Any]) -> int:
    return (await ask(s, "k-one", **fields)).status


async def test_i5_a_gateway_that_stops_gives_everything_back(model_dir: Path, folder: Path) -> None:
    engine = StubEngine(lambda engine, specs: None)
    async with stage(model_dir, folder, engine, keys=keys()) as s:
        tasks = [asyncio.create_task(ask(s, key)) for key in ("k-one", "k-acme", "k-own")]
        await until(lambda: len(engine.submitted) == 3)
        s.gateway._dispatcher.fail_all()
        assert {(await task).status for task in tasks} == {503}
        await until(lambda: s.gateway.tenants.in_flight() == {})


async def test_hundreds_of_requests_at_once_never_exceed_the_limit_and_leave_nothing(
    model_dir: Path, folder: Path
) -> None:
    limits = TenantLimits(max_in_flight=8)
    listed = {digest(b"k"): Grant(tenant="t", classes=("standard",), limits=limits)}
    most = 0

    def later(engine: StubEngine, specs: Sequence[RequestSpec]) -> None:
        nonlocal most
        most = max(most, s.gateway.tenants.in_flight()["t"])
        asyncio.get_running_loop().call_later(0.005, engine.answer, specs)

    async with stage(model_dir, folder, StubEngine(later), keys=Keys([], listed)) as s:
        answers = await asyncio.gather(*(ask(s, "k") for _ in range(200)))
        assert {answer.status for answer in answers} == {200, 429} and most == 8
        await until(lambda: s.gateway.tenants.in_flight() == {})


# -- what is counted ---------------------------------------------------------------------------------------------------


async def test_the_numbers_are_by_class_and_never_by_tenant(model_dir: Path, folder: Path) -> None:
    engine = StubEngine(begins)
    async with stage(model_dir, folder, engine, keys=keys()) as s:
        assert (await ask(s, "k-acme")).status == 200
        assert (await ask(s, "k-acme", max_tokens=2)).status == 200
        assert (await ask(s, "k-acme", [("x-shoal-class", "batch")])).status == 200
        assert (await ask(s, "k-acme", [("x-shoal-class", "interactive")])).status == 403
        assert (await ask(s, "k-acme", [("x-shoal-class", "gold")])).status == 400
        assert (await ask(s, "k-globex", max_tokens=10**6)).status == 400
        engine.on_submit = refusing(Refusal.WAITING_BOUND).on_submit
        assert (await ask(s, "k-globex")).status == 429
        page, found = await metrics(s)
        report = s.gateway._report()
    assert found["shoal:request_queue_time_seconds_count", "standard"] == 2
    assert found["shoal:request_queue_time_seconds_sum", "standard"] == pytest.approx(2 * 1.23456789)
    assert found["shoal:request_queue_time_seconds_count", "batch"] == 1
    assert found["shoal:slo_attainment_total", "standard", "true"] == 2
    assert found["shoal:slo_ttft_attainment_total", "standard", "true"] == 2
    assert found["shoal:slo_tpot_attainment_total", "standard", "true"] == 2
    assert found["shoal:slo_attainment_total", "batch", "true"] == 1
    assert ("shoal:slo_ttft_attainment_total", "batch", "true") not in found, "it has no target"
    assert found["shoal:slo_attainment_total", "interactive", "false"] == 1
    assert found["shoal:request_refused_total", "interactive", "waiting_bound"] == 1
    assert found["shoal:request_refused_total", "interactive", "context_length_exceeded"] == 1
    assert found["shoal:request_refused_total", "", "class_not_granted"] == 1
    assert found["shoal:request_refused_total", "", "unknown_class"] == 1
    assert found["shoal:request_success_total", "batch", "length"] == 1
    assert report["slo_attainment"] == {"standard": 1.0, "batch": 1.0, "interactive": 0.0}
    for hidden in ("acme", "globex", "gold", digest(b"k-acme").hex()):
        assert hidden not in page
    kinds = ("success", "failure", "refused", "aborted")
    ended = sum(value for name, value in found.items() if name[0] in {f"shoal:request_{kind}_total" for kind in kinds})
    assert found["shoal:requests_received_total",] == ended == 7


async def test_a_late_first_token_is_a_miss(model_dir: Path, folder: Path) -> None:
    classes = {**DEFAULT_CLASSES, "standard": ServiceClass(rank=1, ttft_ms=50.0, tpot_ms=10_000.0)}

    def late(engine: StubEngine, specs: Sequence[RequestSpec]) -> None:
        asyncio.get_running_loop().call_later(0.15, engine.answer, specs)

    async with stage(model_dir, folder, StubEngine(late), classes=classes) as s:
        assert (await ask(s, max_tokens=2)).status == 200
        assert (await ask(s, max_tokens=2, headers=[("x-slo-ttft-ms", "9000")])).status == 200
        _, found = await metrics(s)
    assert found["shoal:slo_ttft_attainment_total", "standard", "false"] == 1
    assert found["shoal:slo_ttft_attainment_total", "standard", "true"] == 1
    assert found["shoal:slo_tpot_attainment_total", "standard", "true"] == 2
    assert found["shoal:slo_attainment_total", "standard", "false"] == 1
