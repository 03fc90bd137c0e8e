"""A rank that is not the first: it loads its share of the model and does what rank 0 says, until that is gone."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path

import msgspec

from shoal.engine.parallel.comm import Aborted
from shoal.engine.parallel.group import Arguments
from shoal.engine.parallel.layout import Layout
from shoal.engine.parallel.messages import (
    Build,
    Built,
    Clear,
    CopiesMeasured,
    Copy,
    CopyDone,
    Failed,
    Loaded,
    MeasureCopies,
    Pipe,
    Result,
    Step,
    ToRank,
)
from shoal.engine.parallel.shared import Memory
from shoal.telemetry import logs

log = logging.getLogger("shoal.engine")

_PR_SET_PDEATHSIG = 1


class _Gone(Exception):
    """Rank 0 has ended."""


def main() -> None:
    arguments = msgspec.json.decode(sys.argv[-1], type=Arguments)
    _end_with(arguments.parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # to a whole process group: rank 0 drains, and needs its ranks
        signal.signal(number, signal.SIG_IGN)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in main.py
    logs.setup(f"rank-{arguments.rank}")
    memory = Memory(Layout(arguments.tp, arguments.cp, arguments.pp), arguments.fds)
    pipe = Pipe(socket.socket(fileno=arguments.pipe), ToRank)
    try:
        _serve(arguments, memory, pipe)
    except _Gone:
        code = 0
    except Aborted:
        code = 1  # whoever failed has said why
    except Exception as error:
        known = isinstance(error, ValueError | OSError)
        log.error("engine.rank_failed", {"rank": arguments.rank, "error": str(error)}, exc_info=not known)
        _say_why(pipe, error)
        code = 1
    memory.abort()
    logging.shutdown()
    os._exit(code)  # not held up by a copy that is under way


def _say_why(pipe: Pipe, error: Exception) -> None:
    try:
        pipe.send(Failed(f"{type(error).__name__}: {error}"))
    except OSError:
        return  # nobody listens


def _serve(arguments: Arguments, memory: Memory, pipe: Pipe) -> None:
    from shoal.engine import runner as runners
    from shoal.engine.parallel.member import Rank, Room, join, rank_config
    from shoal.engine.parallel.pipeline import StageRunner
    from shoal.engine.parallel.runner import RankRunner
    from shoal.engine.process import calm_collector
    from shoal.engine.transfer.copier import Copier

    def agree(room: Room) -> Room:
        pipe.send(Loaded(*room))
        build = _next(pipe)
        assert isinstance(build, Build)
        return Room(build.num_blocks, build.num_host_blocks)

    rank = Rank(
        layout=memory.layout,
        number=arguments.rank,
        join=partial(join, memory, arguments.rank, arguments.config),
        agree=agree,
        make_runner=StageRunner if memory.layout.pp > 1 else RankRunner,
    )
    config = rank_config(arguments.config, memory.layout, arguments.rank)
    runner = runners.load(Path(arguments.model_dir), config, rank)
    assert isinstance(runner, RankRunner)
    copier = None
    if runner.host is not None:
        copier = Copier(runner.host, max_bytes_per_s=arguments.config.host_copy_bytes_per_s)
    pipe.send(Built())
    calm_collector()
    num_steps = 0

    def told(done: object) -> None:
        pipe.send(CopyDone(done) if not isinstance(done, Exception) else Failed(f"{type(done).__name__}: {done}"))  # type: ignore[arg-type]

    while True:
        message = _next(pipe)
        if isinstance(message, Step):
            num_steps += 1
            assert message.number == num_steps, f"step {message.number} follows {num_steps - 1}"
            runner.take(message.sampled)
            runner.launch(message.plan)
            result = runner.collect()
            if isinstance(runner, StageRunner) and runner.reports and message.plan.slices:
                pipe.send(Result(result, runner.step_ns))
        elif isinstance(message, Clear):
            runner.clear(message.blocks)
        elif isinstance(message, Copy):
            assert copier is not None
            copier.start(message.op, told)
        elif isinstance(message, MeasureCopies):
            assert copier is not None
            pipe.send(CopiesMeasured(copier.measure()))
        else:
            raise AssertionError(f"{message} makes no sense here")


def _next(pipe: Pipe) -> object:
    message = pipe.receive()
    if message is None:
        raise _Gone
    return message


def _end_with(parent: int) -> None:
    """The system ends this process when rank 0's thread that started it is gone, however that went."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main()
