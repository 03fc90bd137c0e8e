"""F12: a rank that dies, stops, raises or is elsewhere takes its replica along, soon, and with its cause in the log."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from shoal.core.request import Finish, RequestSpec, Sampling
from shoal.engine.loop import StepLoop, Turn
from shoal.engine.parallel.comm import CommError
from shoal.engine.parallel.group import RankFailed
from tests.support.drive import make_scheduler
from tests.support.processes import alive, running, wait_until
from tests.support.ranks import Ranks, ranks

pytestmark = [pytest.mark.torch, pytest.mark.processes]

HEALTH_S, HANG_S, GONE_S = 3.0, 8.0, 10.0
BAD_STEP = 20  # beyond the two that a test begins with
SLACK_S = 1.0  # of a machine with other work


class Streams:
    """Four streams without an end, computed by two ranks; and what came of them."""

    def __init__(self, two: Ranks) -> None:
        self.failed: list[BaseException] = []
        self.endings: list[Finish] = []
        self.over = threading.Event()
        self.num_tokens = 0
        self.loop = StepLoop(
            make_scheduler(two, num_blocks=two.num_blocks),
            two,
            publish=self._on_turn,
            announce=lambda predicted_ns: None,
            failed=self._on_failure,
        )
        two.group.watch(self.loop.fail)
        self._thread = threading.Thread(target=self.loop.run, daemon=True)
        self._thread.start()

    def begin(self) -> None:
        greedy = Sampling(temperature=0)
        specs = [RequestSpec(id=str(n), prompt=(n, 5, 7), max_tokens=480, sampling=greedy) for n in range(4)]
        self.loop.submit(1, specs)

    def close(self) -> None:
        assert self.loop.stop(20)

    def _on_turn(self, turn: Turn) -> None:
        for update in turn.updates.get(1, ()):
            self.num_tokens += len(update.tokens)
            if update.ending is not None:
                self.endings.append(update.ending.reason)
                if self.endings == [Finish.LENGTH] * 4:
                    self.endings.clear()
                    self.begin()

    def _on_failure(self, error: BaseException) -> None:
        self.failed.append(error)
        self.over.set()


@contextmanager
def streams(folder: Path, how: str = "", *, idle: bool = False, **settings: Any) -> Iterator[tuple[Streams, Ranks]]:
    command = (sys.executable, "-m", "tests.support.bad_rank", how, str(BAD_STEP))
    with ranks(folder, command=command, tensor_parallel_size=2, **settings) as two:
        made = Streams(two)
        if not idle:
            made.begin()
            wait_until(lambda: made.num_tokens > 8 or made.failed, 30)
        yield made, two
        made.close()


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize(
    ("number", "cause", "limit_s"),
    [(signal.SIGKILL, "was killed by SIGKILL", 1.0), (signal.SIGSTOP, "has been stopped for", HEALTH_S)],
    ids=["killed", "stopped"],
)
def test_f12_a_rank_that_is_killed_or_stopped(
    tiny: Path, caplog: pytest.LogCaptureFixture, number: int, cause: str, limit_s: float, idle: bool
) -> None:
    with caplog.at_level(logging.ERROR), streams(tiny, idle=idle) as (four, two):
        os.kill(two.group.pids[0], number)
        began_s = time.monotonic()
        assert four.over.wait(GONE_S)
        assert time.monotonic() - began_s < limit_s + SLACK_S
        [error] = four.failed
        assert isinstance(error, RankFailed) and f"rank 1 of tp=2 cp=1 pp=1: {cause}" in str(error)
        assert four.endings == ([] if idle else [Finish.ERROR] * 4)
    told = [record.args for record in caplog.records if record.message == "engine.rank_failed"]
    assert len(told) == 1 and told[0]["rank"] == 1 and cause in told[0]["cause"]  # type: ignore[index, call-overload]


def test_f12_without_kernels_a_rank_that_is_killed(tiny: Path) -> None:
    with streams(tiny, kernels="off") as (four, two):
        os.kill(two.group.pids[0], signal.SIGKILL)
        assert four.over.wait(HEALTH_S)
        assert "was killed by SIGKILL" in str(four.failed[0])


@pytest.mark.parametrize(
    ("how", "limit_s", "cause"),
    [
        ("raises", 1.0, "rank 1 of tp=2 cp=1 pp=1: RuntimeError: out of luck"),
        ("drops a request", 2.0, "rank [01] computes something else than rank [01]"),
        ("skips a sum", HANG_S, "rank [01] (computes something else|did not come)"),
        ("hangs", HANG_S, "rank 1 did not come to where it was waited for within 5 s"),
    ],
)
def test_f12_a_rank_that_raises_or_is_elsewhere(tiny: Path, how: str, limit_s: float, cause: str) -> None:
    with streams(tiny, how) as (four, _):
        began_s = time.monotonic()
        assert four.over.wait(GONE_S + SLACK_S)
        assert time.monotonic() - began_s < limit_s + SLACK_S
        [error] = four.failed
        assert isinstance(error, RankFailed | CommError)
        assert re.search(cause, str(error)), error


def test_ranks_end_with_the_process_that_started_them(tiny: Path) -> None:
    """However that ends: no message, no signal to them, only its death."""
    code = f"""
import sys, time
from pathlib import Path
from tests.support.ranks import ranks
with ranks(Path({str(tiny)!r}), tensor_parallel_size=2) as two:
    print("pids", *two.group.pids, flush=True)
    time.sleep(600)
"""
    with running([sys.executable, "-c", code]) as process:
        found = process.wait_line(r"pids (\d+)", 60)
        rank = psutil.Process(int(found[1]))
        os.kill(rank.pid, signal.SIGTERM)  # which is for rank 0 to heed
        os.kill(rank.pid, signal.SIGINT)
        assert alive([rank])
        process.kill()
        wait_until(lambda: not alive([rank]), GONE_S)


def test_what_a_rank_says_when_it_cannot_load_is_what_the_engine_says(tiny: Path) -> None:
    command = (sys.executable, "-c", "import sys; sys.exit('no such model')")
    with pytest.raises(RankFailed, match="rank 1 of tp=2 cp=1 pp=1: ended with exit status 1"):  # noqa: SIM117
        with ranks(tiny, command=command, tensor_parallel_size=2):
            pass
