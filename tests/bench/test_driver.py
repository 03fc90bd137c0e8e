"""The load driver against a real server on the loopback, whose every answer is scripted."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
from pathlib import Path

import pytest

import driver
import result
from client import Failure, Request, Target
from driver import Schedule, run, schedule
from shoal.workload.arrivals import ClosedLoop, OpenLoop
from shoal.workload.lengths import MIXES, Mix, Uniform
from tests.bench import server as fate
from tests.bench.server import Server, serving

MS = 1_000_000


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may make the driver late; only one test is about that."""
    for module in (driver, result):
        monkeypatch.setattr(module, "MAX_LAG_MS", 1e6)


def target(server: Server, **settings: object) -> Target:
    return Target(url=server.url, model="tiny", **{"timeout_s": 10.0, **settings})  # type: ignore[arg-type]


def one(fate: int, prompt: int = 3, output: int = 4, due_ns: int = 0) -> Request:
    return Request(due_ns, (fate,) * prompt, output)


@pytest.mark.usefixtures("patient")
async def test_figures_count_tokens_from_usage_and_never_from_events() -> None:
    async with serving(per_event=3) as server:
        load = Schedule((one(fate.FINE, 5, 7), one(fate.FINE, 6, 4), one(fate.FINE, 1, 1)))
        found = await run(target(server), load)
    figures = found.figures()
    assert (figures["requests"], figures["answered"], figures["errors"]) == (3, 3, {})
    assert (figures["prompt_tokens"], figures["output_tokens"]) == (12, 12)
    assert figures["output_tokens_per_s"] == pytest.approx(12 / figures["duration_s"])
    assert figures["total_tokens_per_s"] == pytest.approx(24 / figures["duration_s"])
    assert [len(outcome.chunk_ns) for outcome in found.outcomes] == [3, 2, 1]
    assert figures["ttft_ms"]["count"] == figures["e2e_ms"]["count"] == 3
    assert figures["tpot_ms"]["count"] == 2  # a single token has no time per token
    assert figures["gap_ms"]["count"] == 3
    assert figures["invalid"] == []
    assert server.bodies[0] == {
        "model": "tiny",
        "prompt": [0] * 5,
        "max_tokens": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
    }


@pytest.mark.usefixtures("patient")
async def test_each_failure_is_counted_by_its_kind() -> None:
    async with serving() as server:
        fates = {
            fate.FINE: "",
            fate.BUSY: "http_429",
            fate.ERROR_EVENT: "error_event",
            fate.CUT: "cut",
            fate.NO_DONE: "cut",
            fate.NO_FINISH: "cut",
            fate.NO_USAGE: "no_usage",
            fate.GARBAGE: "protocol",
            fate.SILENT: "timeout",
        }
        found = await run(target(server, timeout_s=0.5), Schedule(tuple(one(kind) for kind in fates)))
        assert [outcome.error for outcome in found.outcomes] == list(fates.values())
        assert found.errors() == {
            "cut": 3, "error_event": 1, "http_429": 1, "no_usage": 1, "protocol": 1, "timeout": 1,
        }  # fmt: skip
        assert found.figures(driver.Slo(ttft_ns=10_000 * MS))["slo_attainment"] == 1 / len(fates)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = Target(url=f"http://127.0.0.1:{unused.getsockname()[1]}", model="tiny")
        found = await run(nobody, Schedule((one(fate.FINE),)))
    assert found.errors() == {"connect": 1}
    assert found.invalid() == ["no request was answered"]


async def test_a_queue_at_the_server_is_charged_from_when_each_request_was_due() -> None:
    """One request each 10 ms, 30 ms of service each: the k-th has its first token at 30 (k + 1) ms or later."""
    async with serving(first_s=0.03) as server:
        load = Schedule(tuple(one(fate.FINE, due_ns=k * 10 * MS) for k in range(10)))
        found = await run(target(server), load)
    for k, outcome in enumerate(found.outcomes):
        assert outcome.due_ns == k * 10 * MS <= outcome.sent_ns + MS  # never early
        assert outcome.latency.ttft_ns == outcome.chunk_ns[0] - outcome.due_ns
    for k, first_ns in enumerate(sorted(outcome.chunk_ns[0] for outcome in found.outcomes)):
        assert first_ns >= 30 * (k + 1) * MS
    assert server.most_active > 3  # nobody waited for an answer before sending


async def test_a_driver_that_was_late_calls_its_run_invalid_and_still_charges_the_wait() -> None:
    async with serving() as server:
        load = Schedule(tuple(one(fate.FINE, due_ns=k * MS) for k in range(20)))
        driving = asyncio.create_task(run(target(server), load))
        await asyncio.wait_for(server.heard.wait(), 10)
        time.sleep(0.2)  # noqa: ASYNC251 (the driver's own loop stands still)
        found = await driving
    assert found.lag_p99_ms() > 100
    assert found.invalid()[0].startswith("the driver was late: p99")
    assert max(outcome.latency.ttft_ns for outcome in found.outcomes) > 100 * MS


async def test_closed_loop_keeps_so_many_in_flight_and_no_more() -> None:
    async with serving(between_s=0.002) as server:
        load = schedule(ClosedLoop(3), Mix(Uniform(4), Uniform(5)), 12, seed=1, vocab_size=8192)
        found = await run(target(server), load)
    assert server.most_active == 3
    assert len(found.answered()) == 12
    assert all(outcome.due_ns <= outcome.sent_ns for outcome in found.outcomes)
    by_end = sorted(outcome.end_ns for outcome in found.outcomes)
    assert found.outcomes[3].due_ns >= by_end[0]  # the fourth was due when the first caller was free


@pytest.mark.usefixtures("patient")
async def test_other_lengths_than_asked_make_the_run_invalid() -> None:
    async with serving() as server:
        found = await run(target(server), Schedule((one(fate.FINE), one(fate.SHORT))))
    assert found.invalid() == ["1 answers with another number of tokens than asked for"]


async def test_warm_up_is_sent_first_and_not_counted() -> None:
    async with serving() as server:
        found = await run(target(server), Schedule((one(fate.FINE),), warm_up=(one(fate.BUSY), one(fate.FINE, 9))))
        assert len(found.outcomes) == 1
        assert [len(body["prompt"]) for body in server.bodies] == [3, 9, 3]
        with pytest.raises(Failure, match="http_429: warm-up"):
            await run(target(server), Schedule((one(fate.FINE),), warm_up=(one(fate.BUSY),)))


def test_schedule_is_made_from_its_seed() -> None:
    def make(seed: int) -> Schedule:
        return schedule(OpenLoop(5.0), MIXES["chat"], 30, seed=seed, vocab_size=8192, warm_up=2)

    assert make(1) == make(1) != make(2)
    load = make(1)
    assert len(load.requests) == 30 and len(load.warm_up) == 2
    assert all(100 <= token < 8192 for request in load.requests for token in request.prompt)
    constant = schedule(OpenLoop(5.0, math.inf), Mix(Uniform(6), Uniform(2)), 3, seed=1, vocab_size=200)
    assert [request.due_ns for request in constant.requests] == [200 * MS, 400 * MS, 600 * MS]
    assert {(len(request.prompt), request.output_tokens) for request in constant.requests} == {(6, 2)}


@pytest.mark.usefixtures("patient")
async def test_command_line_writes_figures_and_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_API_KEY", "sesame")
    figures, rows = tmp_path / "figures.json", tmp_path / "rows.jsonl"
    async with serving(api_key="sesame") as server:
        words = (
            f"--rate 400 --requests 8 --input 10 --output 4 --range 0.5 --seed 3 --slo-ttft-ms 60000 {server.url}/v1/"
        )
        code = await asyncio.to_thread(driver.main, [*words.split(), "--json", str(figures), "--rows", str(rows)])
    assert code == 0
    document = json.loads(figures.read_text())
    assert document["target"] == {"url": server.url, "model": "tiny"}
    assert document["load"]["arrivals"] == {"rate_per_s": 400.0, "burstiness": 1.0}
    assert document["figures"]["answered"] == 8 and document["figures"]["slo_attainment"] == 1.0
    assert all(claim["ok"] for claim in document["claims"])
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(8))
    assert sum(line["output_tokens"] for line in lines) == document["figures"]["output_tokens"]
    shown = capsys.readouterr()
    assert "8 of 8 answered" in shown.out and shown.err == ""  # no live line where nobody watches
    assert "sesame" not in figures.read_text() + rows.read_text() + shown.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("http://127.0.0.1:9 --rate 1", "connect"),
        ("http://127.0.0.1:9 --rate -1", "rate must be positive"),
        ("http://127.0.0.1:9 --rate 1 --requests 0", "at least one request"),
        ("http://127.0.0.1:9 --model m --concurrency 1", "connect: warm-up"),
    ],
)
def test_command_line_says_why_nothing_was_measured(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert driver.main(words.split()) == 2
    assert says in capsys.readouterr().err
