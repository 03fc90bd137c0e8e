"""A replica of several ranks for tests: what `drive.run_requests` takes for a runner, with the processes behind it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil

from shoal.core.plan import KvOp
from shoal.engine.config import EngineConfig
from shoal.engine.parallel import lead
from shoal.engine.parallel.group import COMMAND, Group
from shoal.engine.parallel.layout import layout_of
from shoal.engine.transfer.copier import Copier
from tests.support.processes import alive

COPY_S = 20.0
SETTINGS = {"dtype": "float32", "threads": 1, "kv_cache_bytes": 8 << 20}


class Ranks:
    """Rank 0's runner, but for its host tier, which is that of all ranks."""

    def __init__(self, runner: Any, group: Group) -> None:
        self.runner = runner
        self.group = group
        self.host = None
        if runner.host is not None:
            copier = lead.GroupCopier(Copier(runner.host), group)
            self.copier = copier
            self.host = _AllHosts(copier, runner.host.num_blocks, runner.host.block_bytes * group.layout.size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)


class _AllHosts:
    def __init__(self, copier: lead.GroupCopier, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._copier = copier
        self._numbers = count(1)

    def copy(self, *, out: bool, device_block: int, host_block: int, count: int) -> list[int]:
        told: SimpleQueue[Any] = SimpleQueue()
        blocks = tuple(range(device_block, device_block + count)), tuple(range(host_block, host_block + count))
        self._copier.start(KvOp(next(self._numbers), "", out, *blocks), told.put)
        done = told.get(timeout=COPY_S)
        if isinstance(done, Exception):
            raise done
        return list(done.bad)


@contextmanager
def ranks(folder: Path, *, command: tuple[str, ...] = COMMAND, **settings: Any) -> Iterator[Ranks]:
    """None of the processes is left at the end."""
    config = EngineConfig(**{**SETTINGS, **settings})
    group = Group(layout_of(config), folder, config, command=command)
    processes = [psutil.Process(pid) for pid in group.pids]
    try:
        yield Ranks(lead.load(folder, config, group), group)
    finally:
        group.close()
        assert not alive(processes)
