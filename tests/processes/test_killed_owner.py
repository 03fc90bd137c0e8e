"""The owner of a prefix is killed while another engine fetches it: real engine processes, and a client that notices
nothing."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.core.request import Finish, Peer, RequestSpec, Sampling
from shoal.sim.agreement import agree
from shoal.sim.replay import replay
from shoal.wire.connection import Connection
from shoal.wire.messages import Frame, KeepAlive, Submit, Update, Welcome
from tests.support.gateways import metric
from tests.support.processes import Process, running, socket_folder
from tests.support.tiny_model import make_tiny_model
from tests.support.wires import connect, until

pytestmark = [pytest.mark.torch, pytest.mark.processes]

NUM_HELD, NUM_OUTPUT = 250, 24  # blocks of the prompt; tokens
PROMPT = tuple(3 + (number * number + 7 * number) % 260 for number in range(16 * NUM_HELD + 5))
BLOCK_BYTES = 16 * 8 * 4 * 32 * 2 * 4  # tokens, layers, heads, their size, keys and values, float32
PIECES_PER_S = 2  # so slow that the fetch cannot be over before its owner is killed
LIMIT_S = 60.0


@contextmanager
def engine(model: Path, folder: Path, name: str, *options: str) -> Iterator[Process]:
    command = [sys.executable, "-m", "shoal.cli", "engine", "--model", str(model), "--name", name]
    command += ["--listen", f"unix:{folder}/{name}.sock", "--dtype", "float32", "--threads", "1", *options]
    pool_bytes = 5 * NUM_HELD * BLOCK_BYTES  # a quarter of it is lent at most
    with running([*command, "--kv-cache-bytes", str(pool_bytes)]) as process:
        process.wait_line(r"engine\.serving", LIMIT_S)
        yield process


async def answer(connection: Connection, id: str, peer: Peer | None = None) -> tuple[list[int], list[Update]]:
    """The tokens, whose order and number are right, and all that was told of the request."""
    spec = RequestSpec(id=id, prompt=PROMPT, max_tokens=NUM_OUTPUT, sampling=Sampling(temperature=0), peer=peer)
    connection.send(Submit(specs=(spec,)))
    tokens: list[int] = []
    told: list[Update] = []
    async with asyncio.timeout(LIMIT_S):
        while not (told and told[-1].ending):
            frame = await connection.receive()
            assert not isinstance(frame, Frame) or not frame.refused
            for update in frame.updates if isinstance(frame, Frame) else ():
                assert update.id == id and update.index == len(tokens)
                tokens += update.tokens
                told.append(update)
    return tokens, told


async def stay(*connections: Connection) -> None:
    while True:
        for connection in connections:
            connection.send(KeepAlive())
        await asyncio.sleep(1.0)


def count(process: Process, name: str, label: str = "") -> float:
    return metric(process.wait_line(r"metrics=(\S+)")[1], name).get(label, 0.0)


async def test_an_owner_that_is_killed_during_a_fetch_is_not_noticed(tmp_path: Path) -> None:
    model = make_tiny_model(
        tmp_path / "model", num_layers=8, num_heads=4, num_kv_heads=4, head_dim=32, max_position=8192
    )
    journal = tmp_path / "journal"
    rate = PIECES_PER_S * (2 << 20)
    with (
        socket_folder() as folder,
        engine(model, folder, "owner", "--peer-max-bytes-per-s", str(rate)) as owner,
        engine(model, folder, "other", "--journal", str(journal)) as other,
    ):
        lends, borrows = [await connect(f"unix:{folder}/{name}.sock") for name in ("owner", "other")]
        staying = asyncio.create_task(stay(lends, borrows))
        expected, _ = await answer(lends, "first")
        welcome = lends.peer
        assert isinstance(welcome, Welcome) and welcome.engine is not None
        peer = Peer(welcome.engine.peers, welcome.incarnation, NUM_HELD)

        asked = asyncio.create_task(answer(borrows, "second", peer))
        await until(lambda: count(other, "kv_fetched_bytes_total") > 0, LIMIT_S)
        owner.kill(signal.SIGKILL)
        tokens, told = await asked
        assert tokens == expected
        ending = told[-1].ending
        assert ending is not None and (ending.reason, ending.message) == (Finish.LENGTH, "")
        assert count(other, "kv_failed_fetches_total", "lost") == 1
        assert re.search(r"peers\.fetch_ended_early .*(the owner is gone|the owner closed|eof)", other.text), other.text
        num_fetched = count(other, "kv_fetched_blocks_total")
        assert 0 < num_fetched < NUM_HELD and ending.cached_tokens == 16 * num_fetched
        assert count(other, "prefix_cache_peer_hits_total") == 16 * num_fetched

        again, told = await answer(borrows, "third", peer)  # whoever holds it now is this engine itself
        assert again == expected
        assert told[-1].ending is not None and told[-1].ending.cached_tokens == 16 * NUM_HELD
        staying.cancel()
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "kv_lent_blocks"):
            assert count(other, name) == 0, name
        assert other.stop() == 0, other.text
    assert replay(journal) and agree(journal)
