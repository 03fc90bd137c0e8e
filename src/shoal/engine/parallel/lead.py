"""What rank 0 builds: the runner whose steps are everyone's, and the copier whose copies are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from shoal.core.plan import Copied, KvOp
from shoal.engine import runner as runners
from shoal.engine.config import EngineConfig
from shoal.engine.parallel.comm import LIMIT_S
from shoal.engine.parallel.group import START_LIMIT_S, Group
from shoal.engine.parallel.layout import Place
from shoal.engine.parallel.member import Rank, Room, join, rank_config
from shoal.engine.parallel.messages import (
    Build,
    Built,
    CopiesMeasured,
    Copy,
    CopyDone,
    Loaded,
    MeasureCopies,
    Result,
)
from shoal.engine.parallel.pipeline import StageRunner
from shoal.engine.parallel.runner import RankRunner
from shoal.engine.transfer.copier import Copier as OwnCopier

_MEASURE_S = 30.0


def load(model_dir: Path, config: EngineConfig, group: Group) -> RankRunner:
    """Loads rank 0's share while the others load theirs. Raises ValueError as runner.load, RankFailed."""

    def agree(room: Room) -> Room:
        heard = [(loaded.num_blocks, loaded.num_host_blocks) for loaded in group.hear(Loaded, START_LIMIT_S)]
        smallest = Room(*map(min, room, *heard))
        group.tell(Build(*smallest))
        return smallest

    leads: dict[str, Any] = {"tell": group.tell, "cause_of": group.cause_of}
    if group.layout.pp > 1:
        last = group.layout.rank(Place(0, 0, group.layout.pp - 1))
        leads["hear"] = partial(group.hear_from, last, Result, LIMIT_S)
    rank = Rank(
        layout=group.layout,
        join=partial(join, group.memory, 0, config),
        agree=agree,
        make_runner=RankRunner if group.layout.pp == 1 else StageRunner,
        leads=leads,
    )
    runner = runners.load(model_dir, rank_config(config, group.layout, 0), rank)
    assert isinstance(runner, RankRunner)
    group.hear(Built, START_LIMIT_S)
    group.moved_bytes = lambda: runner.moved_bytes
    if isinstance(runner, StageRunner):
        group.stage_ns = lambda: runner.stage_ns
    return runner


class GroupCopier:
    """Implements the Copier protocol of loop.py: every rank copies what it has of a block. A copy is done when all have
    said so, and took as long as the slowest."""

    def __init__(self, own: OwnCopier, group: Group) -> None:
        self._own = own
        self._group = group
        self._lock = threading.Lock()
        self._due: dict[int, tuple[list[Copied], Callable[[Copied | Exception], None]]] = {}
        group.on_copied = self._heard

    def start(self, op: KvOp, tell: Callable[[Copied | Exception], None]) -> None:
        assert not op.disk
        with self._lock:
            self._due[op.number] = [], tell
        self._group.tell(Copy(op))
        self._own.start(op, self._done_here)

    def close(self, limit_s: float) -> bool:
        return self._own.close(limit_s)

    def measure(self) -> float:
        """Bytes per second that all ranks copy together, all at once."""
        self._group.tell(MeasureCopies())
        own = self._own.measure()
        others = self._group.hear(CopiesMeasured, _MEASURE_S)
        return self._group.layout.size * min(own, *(other.bytes_per_s for other in others))

    def _done_here(self, done: Copied | Exception) -> None:
        if isinstance(done, Exception):
            with self._lock:
                waiting, self._due = list(self._due.values()), {}
            for _, tell in waiting:
                tell(done)
        else:
            self._add(done)

    def _heard(self, rank: int, message: CopyDone) -> None:
        self._add(message.copied)

    def _add(self, done: Copied) -> None:
        with self._lock:
            entry = self._due.get(done.number)
            if entry is None:
                return  # given up
            parts, tell = entry
            parts.append(done)
            if len(parts) < self._group.layout.size:
                return
            del self._due[done.number]
        bad = sorted({place for part in parts for place in part.bad})
        tell(Copied(done.number, max(part.busy_ns for part in parts), tuple(bad)))
