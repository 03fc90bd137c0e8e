"""A service whose engine is two processes: what clients see when one of them fails, and that nothing is left of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.processes.test_kill_engine import Stream, until_ready
from tests.support.processes import alive, descendants
from tests.support.serve import Serving, complete, ready, serve
from tests.support.wires import until

pytestmark = [pytest.mark.torch, pytest.mark.processes]

RED_S, GONE_S = 3.0, 10.0
SLACK_S = 1.0  # of a machine with other work


def ranks_of(service: Serving) -> list[psutil.Process]:
    return [child for child in descendants(service.pid("engine-0")) if "shoal.engine.parallel.rank" in child.cmdline()]


async def test_f12_a_failed_rank_ends_its_engine_which_comes_back(model: Path) -> None:
    with serve(model, "--tensor-parallel-size", "2") as service:
        await until_ready(service)
        for number, cause in ((signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "has been stopped")):
            streams = [Stream() for _ in range(4)]
            tasks = [asyncio.create_task(stream.run(service.url, model.name)) for stream in streams]
            async with asyncio.timeout(20):
                for stream in streams:
                    await stream.begun.wait()
            [rank] = ranks_of(service)
            engine = psutil.Process(service.pid("engine-0"))
            os.kill(rank.pid, number)
            began_s = time.monotonic()
            while await ready(service.url) == 200:
                assert time.monotonic() - began_s < RED_S + SLACK_S, "/ready stayed green"
                await asyncio.sleep(0.02)
            await until(lambda engine=engine, rank=rank: not alive([engine, rank]), GONE_S)
            await asyncio.wait_for(asyncio.gather(*tasks), 10)
            assert [len(stream.errors) for stream in streams] == [1] * 4
            assert not any(stream.finish_reasons for stream in streams)
            assert f'rank=1 cause="{cause}' in service.process.text
            await until_ready(service)
            assert await complete(service.url, model.name) == 200
        processes = [psutil.Process(service.pid("engine-0")), *ranks_of(service)]
        assert len(processes) == 2
        assert await asyncio.to_thread(service.process.stop) == 0
        assert not alive(processes)
        assert service.process.text.count("engine.rank_failed") == 2, "an orderly end is no failure"
