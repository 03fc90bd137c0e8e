"""The whole comparison, with a fake on both sides: turns, record, claims, and that nothing is left running."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import serve_vs_peers
from peers import vllm_cpu
from tests.support.processes import alive, descendants

pytestmark = pytest.mark.processes

FAKE = [sys.executable, "-m", "tests.bench.server"]


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """In place of installing and starting real ones; the signals are this process' own again afterwards."""
    monkeypatch.setattr(vllm_cpu, "install", lambda screen: tmp_path)
    monkeypatch.setattr(vllm_cpu, "versions", lambda folder: {"vllm-cpu": "0"})
    monkeypatch.setattr(vllm_cpu, "serve_command", lambda *_, eager: [*FAKE, "eager" if eager else "compiled"])
    monkeypatch.setattr(serve_vs_peers.models, "pull", lambda name: tmp_path / name)
    monkeypatch.setattr(serve_vs_peers, "_shoal_command", lambda model: FAKE)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def compare(tmp_path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "found.json"
    before = {process.pid for process in descendants(psutil.Process().pid)}
    code = serve_vs_peers.main([*words, "--json", str(file)])
    assert [process for process in alive(descendants(psutil.Process().pid)) if process.pid not in before] == []
    return code, json.loads(file.read_text())


def test_quick_gives_each_its_turn_and_claims_what_it_measured(tmp_path: Path) -> None:
    code, found = compare(tmp_path, "--quick", "--rounds", "2")
    assert code == 0
    cells = [(row["round"], row["concurrency"], row["server"]) for row in found["tables"]["cells"]]
    assert cells == [
        (number, concurrency, server)
        for number in (1, 2)
        for concurrency in (1, 16)
        for server in ("shoal", "vLLM eager")
    ]
    assert {claim["name"] for claim in found["claims"]} == {
        "16 concurrent: output tok/s / vLLM eager",
        "1 concurrent: TPOT / vLLM eager",
        "warm start to first token, s",
    }  # the fakes have no KV pool, so memory is not claimed
    assert {row["text"] for row in found["tables"]["greedy text: shoal and peer"]} == {"equal, 2 tokens"}
    assert [row["processes"] for row in found["tables"]["memory of all processes after the last round"]] == [1, 1]
    ratios = found["tables"]["shoal / vLLM eager: median (each round)"]
    assert [(row["concurrent"], len(row["output tok/s"].split())) for row in ratios] == [(1, 3), (16, 3)]


def test_one_that_is_stopped_keeps_what_it_measured_and_claims_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = serve_vs_peers.Comparison._measure, []

    def measure(self: serve_vs_peers.Comparison, *cell: Any) -> None:
        calls.append(cell)
        if len(calls) == 4:
            signal.raise_signal(signal.SIGTERM)
        real(self, *cell)

    monkeypatch.setattr(serve_vs_peers.Comparison, "_measure", measure)
    code, found = compare(tmp_path, "--rounds", "1", "--peer", "both")
    assert code == 130
    assert [row["server"] for row in found["tables"]["cells"]] == ["shoal", "vLLM eager", "vLLM compiled"]
    assert {claim["name"] for claim in found["claims"]} == {
        "1 concurrent: TPOT / vLLM eager",
        "1 concurrent: TPOT / vLLM compiled",
        "warm start to first token, s",
    }


def test_a_peer_that_does_not_start_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm_cpu, "serve_command", lambda *_, eager: [sys.executable, "-c", "exit('no such thing')"])
    code, found = compare(tmp_path, "--quick")
    assert code == 1
    assert [claim["name"] for claim in found["claims"]] == ["warm start to first token, s"]
    assert "no such thing" in capsys.readouterr().err
