"""A real engine process around a ScriptedRunner: the real step loop, server and Scheduler, and no model.

python -m tests.support.scripted_engine --listen unix:/dir/e.sock --script FILE.json   (SHOAL_SECRET in the environment)
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import msgspec

from shoal.core.kv.hashing import root_key
from shoal.core.limits import Limits
from shoal.core.scheduler import Scheduler
from shoal.core.stepcost import StepCost
from shoal.engine import process
from shoal.engine.process import Engine, Parts
from shoal.engine.transfer.copier import Copier
from shoal.telemetry import logs
from shoal.wire import codec, lifeline
from shoal.wire.messages import EngineInfo, Frame
from tests.support.scripted import EmptyHost, Fault, Script, ScriptedRunner

BLOCK_TOKENS = 16


def parts(script: Script, engine: Engine | None = None, cost: StepCost | None = None) -> Parts:
    """`engine` performs the faults of the connection; None where the script has none."""
    time.sleep(script.load_ms / 1000)
    runner = ScriptedRunner(script, None if engine is None else lambda fault, id: _perform(engine, fault, id))
    hash_root = root_key("scripted", "float32", "none", BLOCK_TOKENS)
    cost = cost or StepCost()
    limits = Limits(
        num_blocks=script.num_blocks,
        block_tokens=BLOCK_TOKENS,
        max_num_seqs=script.max_num_seqs,
        max_model_len=script.max_model_len,
        vocab_size=script.vocab_size,
        max_steps_in_flight=script.steps_in_flight,
        num_host_blocks=script.num_host_blocks,
        block_bytes=EmptyHost.block_bytes,
        preemption="swap",
    )
    scheduler = Scheduler(limits, hash_root=hash_root, cost=cost)
    return Parts(
        runner=runner,
        scheduler=scheduler,
        copier=Copier(EmptyHost(script.num_host_blocks), max_bytes_per_s=script.copy_bytes_per_s),
        info=EngineInfo(
            model=script.model,
            model_digest="scripted",
            hash_root=hash_root,
            hash_block_tokens=BLOCK_TOKENS,
            max_model_len=script.max_model_len,
            vocab_size=script.vocab_size,
        ),
        costs=lambda: tuple(cost.coefficients),
        closing=scheduler.check,  # a broken invariant is an exit status that is not 0
    )


def _perform(engine: Engine, fault: Fault, id: str) -> None:
    """On the step thread. Tokens of earlier steps are on their way already, so the fault comes after them."""
    assert engine._steps is not None and engine._server is not None
    key = engine._steps._owners[id].session
    session = engine._server._sessions[key]
    transport = session.connection._transport

    def act() -> None:
        if fault == "reset":
            transport.abort()
            return
        frame = codec.encode(Frame(view=engine._server.view))
        if fault == "half_frame":
            transport.write(frame[: len(frame) // 2])
        elif fault == "silent_end":  # an ending whose reason is none of Finish
            ending = {"t": "frame", "view": engine._server.view, "updates": [[id, 0, [], [], 0, [], ["", None, 0, ""]]]}
            body = msgspec.msgpack.encode(ending)
            transport.write(len(body).to_bytes(4, "big") + body)
        transport.close()

    if fault == "abort":
        engine._steps.abort(key, [id])
    else:
        engine._loop.call_soon_threadsafe(act)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", required=True)
    parser.add_argument("--script", type=Path)
    parser.add_argument("--name", default="engine-0")
    parser.add_argument("--controller", default="")
    options = parser.parse_args()
    logs.setup(options.name)
    lifeline.watch()
    script = msgspec.json.decode(options.script.read_bytes(), type=Script) if options.script else Script()
    engine = Engine(
        lambda: parts(script, engine),
        name=options.name,
        listen=options.listen,
        controller=options.controller,
        secret=os.environ["SHOAL_SECRET"].encode(),
    )
    raise SystemExit(process.run(engine))


if __name__ == "__main__":
    main()
