"""The metrics listener of a process: open to this machine, and no way to harm the process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit
from urllib.request import urlopen

import psutil
import pytest

from shoal.telemetry import metrics
from shoal.telemetry.metrics import Exporter, new_registry


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    made = Exporter(new_registry())
    yield made
    made.close()


def strangers(exporter: Exporter, count: int) -> list[socket.socket]:
    port = urlsplit(exporter.url).port
    return [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(count)]


def test_strangers_take_neither_threads_nor_files(exporter: Exporter) -> None:
    threads, files = threading.active_count(), psutil.Process().num_fds()
    held = strangers(exporter, 30)
    assert threading.active_count() == threads
    assert psutil.Process().num_fds() - files - len(held) <= 1
    for sock in held:
        sock.close()


def test_who_says_nothing_is_cut_and_the_next_is_served(exporter: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics._Handler, "timeout", 0.1)
    (mute,) = strangers(exporter, 1)
    with closing(mute), urlopen(exporter.url, timeout=5) as answer:
        assert b"process_" in answer.read()
        assert mute.recv(1) == b""
