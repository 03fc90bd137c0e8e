"""SEC-01: nothing that arrives at an internal port is ever run, and internal ports are private."""

from __future__ import annotations

import asyncio
import http.client
import os
import pickle
import re
import socket
import sys
import tokenize
import urllib.request
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import psutil
import pytest

from tests.support.processes import ROOT, descendants, listening, running, wait_until
from tests.support.serve import Serving, complete, ready, serve
from tests.support.wires import frame

SOURCE = ROOT / "src"

FORBIDDEN = re.compile(
    r"\b(?:pickle|cPickle|marshal|shelve|dill|joblib|cloudpickle)\b|\b(?<!\.)(?:eval|exec|compile|__import__)\s*\("
    r"|\byaml\.(?:load|full_load|unsafe_load)\b|\btorch\.load\b|recv_pyobj|os\.system|shell\s*=\s*True"
)
ALLOWED: dict[tuple[str, str], str] = {}  # (file below src, line without its indent) -> why it is harmless


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_sec_01_c_the_source_holds_no_call_that_runs_data() -> None:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for number, line in enumerate(code_lines(path), start=1):
            if FORBIDDEN.search(line):
                found[(str(path.relative_to(SOURCE)), line.strip())] = number
    assert found.keys() - ALLOWED.keys() == set(), "a forbidden call, or an explanation in ALLOWED is missing"
    assert ALLOWED.keys() - found.keys() == set(), "an explanation of nothing"


def test_sec_01_c_the_search_finds_what_it_is_for(tmp_path: Path) -> None:
    bad = [
        "import pickle",
        "eval(text)",
        "x = exec(code)",
        "yaml.load(f)",
        "torch.load(p)",
        "s.recv_pyobj()",
        "run(shell=True)",
    ]
    assert all(FORBIDDEN.search(line) for line in bad)
    assert not any(
        FORBIDDEN.search(line) for line in ["yaml.safe_load(f)", "model.eval()", "re.compile(x)", "retrieval(x)"]
    )


@pytest.mark.torch
def test_sec_01_a_pickles_to_every_port_run_nothing_and_are_counted(
    service: Serving, model: Path, tmp_path: Path
) -> None:
    pids = {process.pid for process in descendants(service.process.pid)}
    bombs = [tmp_path / f"pwned_{protocol}" for protocol in (0, 2, 5)]
    payloads = [pickle.dumps(Bomb(path), protocol) for path, protocol in zip(bombs, (0, 2, 5), strict=True)]
    for process in descendants(service.process.pid):
        for where in listening(process.pid):
            for payload in payloads:
                for data in (payload, frame(payload), frame(msgspec.msgpack.encode({"t": "hello", "proof": payload}))):
                    deliver(where, data)
    page = urlsplit(service.url).netloc
    for payload in payloads:
        connection = http.client.HTTPConnection(page, timeout=5)
        connection.request("POST", "/v1/chat/completions", payload, {"content-type": "application/octet-stream"})
        assert 400 <= connection.getresponse().status < 500
        connection.close()
    assert not any(path.exists() for path in bombs)
    assert {process.pid for process in descendants(service.process.pid)} == pids, "a process ended"
    assert asyncio.run(ready(service.url)) == 200
    assert asyncio.run(complete(service.url, model.name)) == 200
    for metrics in (service.status_url + "/metrics", service.status()["replicas"][0]["metrics"]):
        wait_until(lambda metrics=metrics: num_bad(metrics) >= 9)


@pytest.mark.torch
def test_sec_01_e_a_default_start_listens_on_loopback_and_private_sockets_only(service: Serving) -> None:
    family = [psutil.Process(service.process.pid), *descendants(service.process.pid)]
    found = [where for process in family for where in listening(process.pid)]
    assert len(found) >= 6  # API, status page, metrics of gateway and engine, two sockets
    for where in found:
        if where.startswith("/"):
            assert Path(where).lstat().st_mode & 0o777 == 0o600
            assert Path(where).parent.stat().st_mode & 0o777 == 0o700
        else:
            assert where.startswith("127.0.0.1:"), where


@pytest.mark.torch
def test_secrets_are_in_no_argument_line_or_file_and_only_where_they_are_needed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "a-key-that-nobody-must-see"
    monkeypatch.setenv("SHOAL_API_KEY", key)
    with serve(model) as service:
        gateway = service.pid("gateway-0")
        secrets = {key}
        for process in descendants(service.process.pid):
            environment = process.environ()
            secrets.add(environment["SHOAL_SECRET"])
            assert ("SHOAL_API_KEY" in environment) == (process.pid == gateway), process.cmdline()
        assert len(secrets) == 2
        assert asyncio.run(complete(service.url, model.name)) == 401
        shown = [service.process.text, str(service.status())]
        shown += [" ".join(process.cmdline()) for process in descendants(service.process.pid)]
        shown += [path.read_text() for path in service.folder.rglob("*") if path.is_file()]
        assert not [text for text in shown for secret in secrets if secret in text]
        assert all(path.stat().st_mode & 0o077 == 0 for path in service.folder.rglob("*"))


def test_the_status_page_does_not_collect_endless_heads() -> None:
    command = [sys.executable, "-m", "shoal.cli", "controller", "--listen", "tcp:127.0.0.1:0", "--controller-port", "0"]
    with running(command, {"SHOAL_SECRET": "x"}) as process:
        where = urlsplit(process.wait_line(r"page=(\S+)")[1]).netloc
        host, _, port = where.rpartition(":")
        wait_until(lambda: where in listening(process.pid))
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx: ")
            sent = 0
            with suppress(ConnectionError):
                while sent < 16 << 20:
                    sent += sock.send(b"a" * 65536)
        assert sent < 16 << 20


def code_lines(path: Path) -> list[str]:
    """The file's lines with comments and the insides of strings blanked."""
    lines = [list(line) for line in path.read_text("utf-8").splitlines()]
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                (row, start), (last_row, end) = token.start, token.end
                for number in range(row, last_row + 1):
                    line = lines[number - 1]
                    first, stop = (start if number == row else 0), (end if number == last_row else len(line))
                    line[first:stop] = " " * (stop - first)
    return ["".join(line) for line in lines]


def deliver(where: str, data: bytes) -> None:
    family, address = (socket.AF_UNIX, where) if where.startswith("/") else (socket.AF_INET, _tcp(where))
    with socket.socket(family) as sock:
        sock.settimeout(5)
        sock.connect(address)
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        try:
            while sock.recv(1 << 16):
                pass
        except ConnectionError:
            pass


def _tcp(where: str) -> tuple[str, int]:
    host, _, port = where.rpartition(":")
    return host, int(port)


def num_bad(url: str) -> float:
    """Connections that ended because what came over them was no message of ours."""
    with urllib.request.urlopen(url, timeout=5) as answer:
        text = answer.read().decode()
    counts = re.findall(r'shoal:wire_disconnects_total\{cause="(?:malformed|oversized)"\} (\S+)', text)
    return sum(float(count) for count in counts)
