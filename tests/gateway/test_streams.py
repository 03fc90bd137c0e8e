"""Event streams over time: quiet ones, many choices, failures late and early, and a replica that comes back."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from shoal.core.request import Finish, RequestSpec
from shoal.gateway import job
from shoal.wire.messages import Ending, Update
from tests.gateway.stub import StubEngine, stage
from tests.support.gateways import MODEL, service, unchunked
from tests.support.processes import scripted_engine, wait_until
from tests.support.scripted import Script
from tests.support.wires import until

LENGTH = Ending(Finish.LENGTH, None, 0)


def silent(engine: StubEngine, specs: Sequence[RequestSpec]) -> None:
    pass


async def test_a_quiet_stream_gets_comment_lines_until_it_speaks(
    model_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "QUIET_S", 0.1)
    engine = StubEngine(silent)
    async with stage(model_dir, folder, engine) as s:
        body = {"model": "tiny", "prompt": "x", "stream": True}
        async with s.http.post(s.url + "/v1/completions", json=body) as answer:
            assert answer.status == 200
            assert await answer.content.readexactly(6) == b":\n\n:\n\n"
            engine.answer(engine.submitted)
            rest = (await answer.content.read()).decode()
        events = [event for event in rest.split("\n\n") if event and event != ":"]
        assert all(event.startswith("data: ") for event in events) and events[-1] == "data: [DONE]"


async def test_a_failure_after_a_comment_line_is_an_event(
    model_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "QUIET_S", 0.1)
    async with stage(model_dir, folder, StubEngine(silent), request_timeout_s=0.8) as s:
        status, text = await s.complete(stream=True)
        assert status == 200 and '"code":"request_timeout"' in text.split("\n\n")[-2] and "[DONE]" not in text


async def test_one_failed_choice_fails_the_request_and_withdraws_the_others(model_dir: Path, folder: Path) -> None:
    def speak(engine: StubEngine, specs: Sequence[RequestSpec]) -> None:
        if specs[0].id.endswith(".0"):
            engine.say([Update(specs[0].id, 0, (100,)), Update(specs[1].id, 0, (100,), ending=LENGTH)])
            engine.say([Update(specs[2].id, 1, (100,))])

    engine = StubEngine(speak)
    async with stage(model_dir, folder, engine) as s:
        status, body = await s.complete(prompt=["a", "b"], n=3)
        assert (status, body["error"]["code"]) == (502, "seam_broken")
        first = engine.submitted[0].id.removesuffix(".0")
        await until(lambda: len(engine.aborted) == 5)
        assert {id for id, _ in engine.aborted} == {f"{first}.{number}" for number in (0, 2, 3, 4, 5)}


async def test_what_a_replica_is_asked(model_dir: Path, folder: Path) -> None:
    engine = StubEngine()
    async with stage(model_dir, folder, engine) as s:
        assert (await s.complete(prompt=["a", "b"], n=2, priority=3, max_tokens=5, temperature=0.5))[0] == 200
        assert (await s.complete(prompt=["a" * 40], seed=-1, stop_token_ids=[7], max_tokens=1))[0] == 200
        assert (await s.complete(prompt="a", ignore_eos=True))[0] == 200
    a0, a1, b0, b1, seeded, ignoring = engine.submitted
    assert [spec.id.rpartition(".")[2] for spec in (a0, a1, b0, b1)] == ["0", "1", "2", "3"]
    assert [spec.choice for spec in (a0, a1, b0, b1)] == [0, 1, 0, 1]
    assert [spec.leader for spec in (a0, a1, b0, b1)] == [None, a0.id, None, b0.id]
    assert a0.sampling.seed == a1.sampling.seed != b0.sampling.seed
    assert a0.priority == 3 and a0.max_tokens == 5 and a0.sampling.temperature == 0.5
    assert seeded.sampling.seed == 2**64 - 1 and set(seeded.stop_token_ids) == {7, *a0.stop_token_ids}
    assert len(seeded.prefix_keys) == len(seeded.prompt) // 16 == 2
    assert a0.stop_token_ids and not ignoring.stop_token_ids
    assert ignoring.max_tokens == engine.max_model_len - len(ignoring.prompt)


async def test_a_fault_of_ours_in_one_answer_is_that_answer_s_only(
    model_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.gateway.text.decode import IncrementalDecoder

    push = IncrementalDecoder.push

    def fail_on_50(self: IncrementalDecoder, token: int) -> str:
        if token == 50:
            raise RuntimeError("a bug")
        return push(self, token)

    monkeypatch.setattr(IncrementalDecoder, "push", fail_on_50)
    engine = StubEngine(silent)
    async with stage(model_dir, folder, engine) as s:
        tasks = [asyncio.create_task(s.complete()) for _ in range(2)]
        await until(lambda: len(engine.submitted) == 2)
        first, second = engine.submitted
        engine.say([Update(first.id, 0, (50,)), Update(second.id, 0, (100,), ending=LENGTH)])
        answers = await asyncio.gather(*tasks)
        assert sorted(status for status, _ in answers) == [200, 500]
        await until(lambda: engine.aborted)
        assert engine.num_connections == 1


@pytest.mark.processes
def test_killing_the_engine_is_seen_at_once_and_so_is_its_return(model_dir: Path) -> None:
    with service(model_dir, Script(step_ms=10)) as s:
        sock = s.post("/v1/completions", {"model": MODEL, "prompt": "hello", "max_tokens": 4000, "stream": True})
        head = sock.recv(65536)
        address = s.engines[0].wait_line(r"engine\.serving address=(\S+)")[1]
        s.engines[0].kill(signal.SIGKILL)
        wait_until(lambda: s.call("/ready").status == 503, 0.5)
        answer = head
        while piece := sock.recv(65536):
            answer += piece
        sock.close()
        text = unchunked(answer).decode()
        assert text.count('"error"') == 1 and '"code":"replica_lost"' in text.split("\n\n")[-2]
        with scripted_engine(Script(), listen=address):
            wait_until(lambda: s.call("/ready").status == 200, 5)
            assert s.complete("hello", max_tokens=3).status == 200
        assert s.balanced()
