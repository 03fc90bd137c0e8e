"""A real engine process that parks a stream: what its gateway hears, what its metrics say, and that it can end."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from shoal.core.request import RequestSpec
from shoal.wire.connection import Connection
from shoal.wire.messages import Frame, Submit, Update
from tests.support.gateways import metric
from tests.support.processes import scripted_engine, socket_folder
from tests.support.scripted import Rule, Script
from tests.support.wires import connect, next_of

pytestmark = pytest.mark.processes

ONE_AT_A_TIME = Script(rules=(Rule(tokens=(5,), then=5),), step_ms=1, max_num_seqs=1, num_host_blocks=64)


def submit(id: str, max_tokens: int, priority: int = 0) -> Submit:
    return Submit(specs=(RequestSpec(id=id, prompt=(1, 2, 3), max_tokens=max_tokens, priority=priority),))


async def hear(connection: Connection, updates: list[Update], id: str, **fields: object) -> Frame:
    """Until an update of a stream says so; `updates` gets all."""
    while True:
        frame = await next_of(connection, Frame)
        assert isinstance(frame, Frame)
        updates += frame.updates
        for update in frame.updates:
            if update.id == id and all(getattr(update, name) == value for name, value in fields.items()):
                return frame


async def test_a_parked_stream_says_so_and_goes_on_without_a_token_lost() -> None:
    with socket_folder() as folder:
        address = f"unix:{folder}/e.sock"
        with scripted_engine(ONE_AT_A_TIME, listen=address) as engine:
            gateway, updates = await connect(address), list[Update]()
            gateway.send(submit("low", 60, priority=1))
            await hear(gateway, updates, "low", tokens=(5,))
            gateway.send(submit("high", 3))
            await hear(gateway, updates, "low", parked=True)
            frame = await hear(gateway, updates, "low", parked=False)
            while not any(update.id == "low" and update.ending for update in updates):
                frame = await next_of(gateway, Frame)  # type: ignore[assignment]
                updates += frame.updates
            assert [token for update in updates if update.id == "low" for token in update.tokens] == [5] * 60
            assert len([update for update in updates if update.waited_ns is not None]) == 2
            view = frame.view
            assert (view.parks, view.recomputed_tokens, view.free_host_blocks + view.cached_host_blocks) == (1, 0, 64)
            assert set(view.classes) == {"interactive", "standard", "batch"}
            url = engine.wait_line(r"metrics=(\S+)")[1]
            assert metric(url, "num_parks_total") == {"": 1}
            assert metric(url, "engine_queue_time_seconds_count") == {"standard": 3}  # two began, one resumed
            gateway.close()
            assert await asyncio.to_thread(engine.stop) == 0


async def test_a_copy_of_hours_holds_up_neither_the_others_nor_the_end() -> None:
    script = replace(ONE_AT_A_TIME, copy_bytes_per_s=1)
    with socket_folder() as folder:
        address = f"unix:{folder}/e.sock"
        with scripted_engine(script, listen=address) as engine:
            gateway, updates = await connect(address), list[Update]()
            gateway.send(submit("low", 60, priority=1))
            await hear(gateway, updates, "low", tokens=(5,))
            gateway.send(submit("high", 20))
            await hear(gateway, updates, "low", parked=True)
            while not any(update.id == "high" and update.ending for update in updates):
                frame = await next_of(gateway, Frame)
                assert isinstance(frame, Frame)
                updates += frame.updates
            gateway.close()  # "low" has nobody any more, and its blocks are still being copied
            assert await asyncio.to_thread(engine.stop, 5) == 0
