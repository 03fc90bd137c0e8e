"""API-11: a client that goes away takes its work along; one that only stops sending does not."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.gateways import MODEL, Service, read_all, service, unchunked
from tests.support.processes import wait_until
from tests.support.scripted import Script

pytestmark = pytest.mark.processes
STEP_S = 0.05  # long beside a hiccup of a busy machine, so that "two steps" can be told
LIMIT_S = 0.5
TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def slow(model_dir: Path) -> Iterator[Service]:
    """50 ms a step, four requests at a time, prompts at 0.25 ms a token."""
    script = Script(step_ms=STEP_S * 1000, prefill_ms_per_token=0.25, max_num_seqs=4)
    with service(model_dir, script) as made:
        yield made
        assert made.balanced()


def asking(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hello", "max_tokens": 2000, "stream": True} | fields


def read_events(sock: socket.socket, count: int) -> None:
    text = b""
    while text.count(b"data: ") < count:
        piece = sock.recv(65536)
        assert piece, "the answer is over"
        text += piece


def busy(s: Service) -> float:
    return s.engine_count("num_requests_running") + s.engine_count("num_requests_waiting")


def gone(s: Service, sock: socket.socket, num_choices: int = 1, num_steps: int = 2) -> None:
    """Closes, and sees that the engine stops, gives everything back, and that it is counted once."""
    aborted = s.counts("request_aborted_total").get("client_disconnect", 0)
    sock.close()
    closed_s = time.monotonic()
    num_tokens = s.engine_count("generation_tokens_total")
    wait_until(lambda: busy(s) == 0, 5)
    assert time.monotonic() - closed_s <= LIMIT_S
    assert s.engine_count("generation_tokens_total") - num_tokens <= num_steps * num_choices
    assert s.engine_count("kv_cache_usage_perc") == 0
    wait_until(lambda: s.counts("request_aborted_total").get("client_disconnect", 0) == aborted + 1)


@pytest.mark.parametrize("n", [1, 4], ids=["a", "e"])
def test_api_11_close_after_three_chunks(slow: Service, n: int) -> None:
    sock = slow.post(TEXT, asking(n=n))
    read_events(sock, 3)
    gone(slow, sock, n)


def test_api_11_b_close_without_a_stream(slow: Service) -> None:
    sock = slow.post(TEXT, asking(stream=False))
    wait_until(lambda: slow.engine_count("num_requests_running") == 1)
    gone(slow, sock)


def test_api_11_c_close_while_queued(slow: Service) -> None:
    running = slow.post(TEXT, asking(n=4))
    read_events(running, 3)
    queued = slow.post(TEXT, asking())
    wait_until(lambda: slow.engine_count("num_requests_waiting") == 1)
    queued.close()
    wait_until(lambda: slow.engine_count("num_requests_waiting") == 0, LIMIT_S)
    assert slow.engine_count("num_requests_running") == 4
    gone(slow, running, 4)


def test_api_11_d_close_during_a_chunked_prompt(slow: Service) -> None:
    before = slow.engine_count("steps_total")
    sock = slow.post(TEXT, asking(prompt=[100] * 2000, max_tokens=100))
    wait_until(lambda: slow.engine_count("steps_total") > before)
    gone(slow, sock)


def test_api_11_f_a_half_close_is_not_a_disconnect(slow: Service) -> None:
    sock = slow.post(TEXT, asking(max_tokens=20))
    sock.shutdown(socket.SHUT_WR)
    body = unchunked(read_all(sock)).decode()
    expected = slow.complete("hello", max_tokens=20).json["choices"][0]["text"]
    events = [event for event in body.split("\n\n") if event.startswith("data: {")]
    assert "".join(event.partition('"text":"')[2].partition('"')[0] for event in events) == expected
    assert body.endswith("data: [DONE]\n\n")


def test_api_11_f_a_half_close_without_a_stream(slow: Service) -> None:
    sock = slow.post(TEXT, asking(stream=False, max_tokens=20))
    sock.shutdown(socket.SHUT_WR)
    answer = read_all(sock)
    interim, _, final = answer.partition(b"HTTP/1.1 200 OK")
    assert interim == b"HTTP/1.1 102 Processing\r\n\r\n" * interim.count(b"102")
    assert b'"completion_tokens":20' in final and b"connection: close" in final


def test_api_11_a_close_after_a_half_close(slow: Service) -> None:
    sock = slow.post(TEXT, asking(stream=False))
    sock.shutdown(socket.SHUT_WR)
    wait_until(lambda: slow.engine_count("num_requests_running") == 1)
    sock.close()
    wait_until(lambda: busy(slow) == 0, LIMIT_S)


def test_api_11_close_with_another_request_waiting_behind(slow: Service) -> None:
    """The second request of a connection waits for the first one's answer; both go with the connection."""
    body = json.dumps(asking()).encode()
    sock = slow.connect()
    sock.sendall(f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    read_events(sock, 3)
    gone(slow, sock, num_steps=4)  # nothing is read meanwhile, so the close shows at the second write


def test_api_11_five_hundred_clients_that_go_away_leave_nothing_open(slow: Service) -> None:
    gateway, engine = psutil.Process(slow.gateway.pid), psutil.Process(slow.engines[0].pid)
    assert slow.complete("hello", max_tokens=1).status == 200
    before = gateway.num_fds(), engine.num_fds(), gateway.num_threads(), engine.num_threads()
    for number in range(500):
        sock = slow.post(TEXT, asking(stream=number % 2 == 0))
        if number % 50 == 0:
            sock.recv(1)
        sock.close()
    wait_until(lambda: busy(slow) == 0, 20)
    wait_until(lambda: slow.counts("requests_in_flight")[""] == 0)
    assert slow.engine_count("kv_cache_usage_perc") == 0
    now = gateway.num_fds(), engine.num_fds(), gateway.num_threads(), engine.num_threads()
    assert all(after <= first + 2 for first, after in zip(before, now, strict=True)), (before, now)
