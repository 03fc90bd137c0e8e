"""API-12: a generation that was cut short never looks like a success."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from shoal.core.request import Finish, RequestSpec
from shoal.gateway import main
from shoal.gateway.text.tokenizer import Tokenizer
from shoal.wire.messages import Ending, Update
from tests.gateway.stub import StubEngine, stage
from tests.support.gateways import MODEL, Service, read_all, service, unchunked
from tests.support.processes import wait_until
from tests.support.scripted import Fault, Rule, Script
from tests.support.wires import until

pytestmark = pytest.mark.processes
FAULTS: dict[str, tuple[Fault, str]] = {
    "b": ("reset", "replica_lost"),
    "c": ("silent_end", "replica_lost"),
    "d": ("half_frame", "replica_lost"),
}


@pytest.fixture(scope="module")
def faulty(model_dir: Path, tokenizer: Tokenizer) -> Iterator[Service]:
    """A prompt that begins with a case's letters meets that case's fault after five tokens, or at once."""
    rules = [Rule(prompt=tuple(tokenizer.encode(f"{case}#")), fault=fault, at=5) for case, (fault, _) in FAULTS.items()]
    rules += [Rule(prompt=tuple(tokenizer.encode(f"{case}@")), fault=fault) for case, (fault, _) in FAULTS.items()]
    rules.append(Rule(prompt=tuple(tokenizer.encode("a#")), fault="abort", at=5))
    with service(model_dir, Script(rules=tuple(rules), step_ms=10)) as made:
        yield made
        assert made.balanced()


def ready(s: Service) -> None:
    wait_until(lambda: s.call("/ready").status == 200, 10, lambda: s.gateway.text)


def change(s: Service, before: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    after = counts(s)
    return {name: dict(Counter(after[name]) - Counter(before[name])) for name in after}


def counts(s: Service) -> dict[str, dict[str, float]]:
    return {name: s.counts(f"request_{name}_total") for name in ("success", "failure", "refused", "aborted")}


@pytest.mark.parametrize("case", FAULTS)
def test_api_12_after_five_tokens_one_error_event_and_a_closed_stream(faulty: Service, case: str) -> None:
    ready(faulty)
    before = counts(faulty)
    body = {"model": MODEL, "prompt": f"{case}#", "max_tokens": 50, "stream": True}
    events = [
        event for event in unchunked(read_all(faulty.post("/v1/completions", body))).decode().split("\n\n") if event
    ]
    assert "[DONE]" not in events[-1], "documented: [DONE] never follows an error event"
    assert sum('"error"' in event for event in events) == 1 and '"error"' in events[-1]
    assert f'"code":"{FAULTS[case][1]}"' in events[-1] and '"message"' in events[-1]
    assert all('"finish_reason":null' in event for event in events[:-1]) and len(events) >= 5
    assert change(faulty, before) == {"success": {}, "failure": {FAULTS[case][1]: 1}, "refused": {}, "aborted": {}}


def test_api_12_an_answer_that_a_replica_gives_up_goes_on(faulty: Service) -> None:
    ready(faulty)
    whole, again = (faulty.complete(prompt, max_tokens=50).json for prompt in ("a#", "a+"))
    assert whole["usage"]["completion_tokens"] == again["usage"]["completion_tokens"] == 50
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["choices"][0]["text"] == again["choices"][0]["text"].replace("+", "#")
    assert faulty.counts("request_replays_total") == {"": 1}


@pytest.mark.parametrize("case", FAULTS)
def test_api_12_without_a_stream_it_is_a_status(faulty: Service, case: str) -> None:
    ready(faulty)
    reply = faulty.complete(f"{case}#", max_tokens=50)
    assert reply.status == 502 and reply.error["code"] == FAULTS[case][1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", ["b", "c", "d"])
def test_api_12_e_before_the_first_byte_it_is_a_status(faulty: Service, case: str, stream: bool) -> None:
    ready(faulty)
    before = counts(faulty)
    reply = faulty.complete(f"{case}@", max_tokens=50, stream=stream)
    assert reply.status in (502, 503) and reply.error["code"] in (FAULTS[case][1], "no_replica")
    assert change(faulty, before)["success"] == {}


async def test_api_12_the_gateway_ends_before_the_answer(
    model_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running answers get their time to finish, then the truth; new ones are refused, and then it is over."""
    monkeypatch.setattr(main, "DRAIN_S", 0.5)

    def begin(engine: StubEngine, specs: Sequence[RequestSpec]) -> None:
        engine.say([Update(specs[0].id, 0, (100,))])

    engine = StubEngine(begin)
    async with stage(model_dir, folder, engine) as s:
        finishing = asyncio.create_task(s.complete(stream=True))
        lasting = asyncio.create_task(s.complete(stream=True))
        await until(lambda: len(engine.submitted) == 2)
        async with s.http.get(s.url + "/health") as answer:  # leaves an open connection behind
            assert answer.status == 200
        s.gateway.drain()
        assert (await s.complete())[1]["error"]["code"] == "shutting_down"
        engine.say([Update(engine.submitted[0].id, 1, (101,), ending=Ending(Finish.LENGTH, None, 0))])
        assert (await finishing)[1].endswith("data: [DONE]\n\n")
        text = (await lasting)[1]
        assert '"code":"shut_down"' in text.split("\n\n")[-2] and "[DONE]" not in text
        await until(lambda: engine.aborted)
