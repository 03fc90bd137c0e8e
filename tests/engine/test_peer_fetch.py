"""Two real engines: one computes a prompt, the other fetches its blocks; the tokens are the same, come what may."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.core.limits import Limits
from shoal.core.request import Finish, Peer, RequestSpec, Sampling
from shoal.core.scheduler import Scheduler
from shoal.core.stepcost import StepCost
from shoal.engine import main
from shoal.engine.config import EngineConfig
from shoal.engine.loop import StepLoop, Turn
from shoal.engine.runner import Runner, load
from shoal.engine.transfer.peers import Peers
from shoal.engine.transfer.tcp import Tcp
from shoal.engine.transfer.wire_form import WireForm
from shoal.sim.agreement import agree
from shoal.sim.replay import replay
from shoal.telemetry.journal import JournalFile, Recorder
from shoal.wire.messages import Ending, EngineInfo
from tests.support.tiny_model import make_tiny_model
from tests.support.wires import SECRET

pytestmark = pytest.mark.torch

LIMIT_S = 20.0
PROMPT = tuple(7 + number % 90 for number in range(201))  # 12 full blocks


class Wires:
    """The blocks of an engine, behind a gate, and where the bytes that are read may be spoiled."""

    def __init__(self, form: WireForm) -> None:
        self.num_layers, self.block_bytes = form.num_layers, form.block_bytes
        self.gate, self.reached = threading.Event(), threading.Event()
        self.gate.set()
        self._form = form

    def take(self, block: int, first_layer: int, target: memoryview) -> None:
        self.reached.set()
        assert self.gate.wait(LIMIT_S)
        self._form.take(block, first_layer, target)

    def put(self, block: int, first_layer: int, source: memoryview) -> None:
        self._form.put(block, first_layer, source)


class Spoiling(Tcp):
    """Flips a bit of what is read, a while after it was digested: in the window, before the reader comes."""

    def open(self, door, target, limit_s):  # type: ignore[no-untyped-def]
        reader = super().open(door, target, limit_s)
        poll = reader.poll

        def spoiled() -> bool:
            there = poll()
            if there:
                target.view[5 * 8192 + 100] ^= 4  # of the sixth block
            return there

        reader.poll = spoiled  # type: ignore[method-assign]
        return reader


class Side:
    """One engine without its process."""

    def __init__(self, runner: Runner, peers: Peers, journal: Path) -> None:
        limits = Limits(
            num_blocks=runner.num_blocks,
            block_tokens=runner.block_tokens,
            max_model_len=runner.max_model_len,
            vocab_size=runner.vocab_size,
            block_bytes=runner.blocks.block_bytes,
            fetch_bytes_per_s=1e9,
        )
        # So dear that fetching pays, whatever it takes here.
        scheduler = Scheduler(limits, hash_root=runner.hash_root, cost=StepCost((0.0, 1e8, 0.0, 0.0, 0.0)))
        self.info = EngineInfo(
            model="tiny",
            model_digest=runner.model_digest,
            hash_root=runner.hash_root,
            hash_block_tokens=runner.block_tokens,
            max_model_len=runner.max_model_len,
            vocab_size=runner.vocab_size,
        )
        self.peers = peers
        self.address = ""
        self.tokens: dict[str, list[int]] = {}
        self.endings: dict[str, Ending] = {}
        self.recorder = Recorder(scheduler, JournalFile(journal), hash_root=runner.hash_root)
        self.failure: BaseException | None = None
        self._changed = threading.Condition()
        self.steps = StepLoop(
            self.recorder,
            runner,
            peers=peers,
            publish=self._hear,
            announce=lambda predicted_ns: None,
            failed=self._failed,
        )
        threading.Thread(target=self.steps.run, daemon=True).start()

    def _failed(self, error: BaseException) -> None:
        self.failure = error

    def _hear(self, turn: Turn) -> None:
        with self._changed:
            for updates in turn.updates.values():
                for update in updates:
                    self.tokens.setdefault(update.id, []).extend(update.tokens)
                    if update.ending is not None:
                        self.endings[update.id] = update.ending
            self._changed.notify_all()

    def submit(self, id: str, peer: Peer | None = None) -> None:
        spec = RequestSpec(id=id, prompt=PROMPT, max_tokens=8, sampling=Sampling(temperature=0.0), peer=peer)
        self.steps.submit(1, [spec])

    def _wait(self, look: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(look, LIMIT_S)

    async def end(self, id: str) -> tuple[list[int], Ending]:
        await asyncio.to_thread(self._wait, lambda: id in self.endings)
        assert self.failure is None
        return self.tokens[id], self.endings[id]

    def peer(self, num_blocks: int = 12) -> Peer:
        return Peer(self.address, "of owner", num_blocks)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), max_position=1024)


def _load(model: Path) -> Runner:
    return load(model, EngineConfig(dtype="float32", device="cpu", threads=1, kv_cache_bytes=64 * 8192))


@asynccontextmanager
async def engine(
    model: Path, folder: Path, name: str, transport: Tcp | None = None
) -> AsyncIterator[tuple[Side, Wires]]:
    runner = _load(model)
    wires = Wires(runner.blocks)
    side = Side(runner, Peers(wires, "tcp:127.0.0.1:0", [transport or Tcp()]), folder / name)
    try:
        side.address = await side.peers.open(
            side.steps, name=name, incarnation=f"of {name}", secret=SECRET, info=side.info
        )
        yield side, wires
    finally:
        wires.gate.set()
        assert await side.peers.close(LIMIT_S)
        assert await asyncio.to_thread(side.steps.stop, LIMIT_S)
        side.recorder.close()
    assert side.failure is None
    assert replay(folder / name) and agree(folder / name)


def test_a_prompt_that_another_engine_has_is_fetched(model: Path, tmp_path: Path) -> None:
    async def scene() -> None:
        async with engine(model, tmp_path, "owner") as (owner, _), engine(model, tmp_path, "borrower") as (other, _):
            owner.submit("a")
            expected, _ = await owner.end("a")
            other.submit("b", owner.peer())
            tokens, ending = await other.end("b")
            assert tokens == expected
            assert (ending.reason, ending.cached_tokens) == (Finish.LENGTH, 192)
            assert other.peers.fetched_blocks == 12 and not other.peers.failed
            assert owner.peers.lent_bytes == other.peers.fetched_bytes == 12 * 8192

    asyncio.run(scene())


def test_an_owner_that_goes_during_a_fetch_is_not_noticed(model: Path, tmp_path: Path) -> None:
    async def scene() -> None:
        async with engine(model, tmp_path, "borrower") as (other, _):
            async with engine(model, tmp_path, "owner") as (owner, wires):
                owner.submit("a")
                expected, _ = await owner.end("a")
                wires.gate.clear()
                other.submit("b", owner.peer())
                assert await asyncio.to_thread(wires.reached.wait, LIMIT_S)
                await owner.peers._lender.listener.close(0.1)  # type: ignore[union-attr]
                tokens, ending = await other.end("b")
                wires.gate.set()
            assert tokens == expected and ending.cached_tokens == 0
            assert sum(other.peers.failed.values()) == 1
            other.submit("c", owner.peer())
            assert (await other.end("c"))[0] == expected

    asyncio.run(scene())


def test_a_flipped_bit_is_computed_again(model: Path, tmp_path: Path) -> None:
    async def scene() -> None:
        async with (
            engine(model, tmp_path, "owner") as (owner, _),
            engine(model, tmp_path, "borrower", Spoiling()) as (other, _),
        ):
            owner.submit("a")
            expected, _ = await owner.end("a")
            other.submit("b", owner.peer())
            tokens, ending = await other.end("b")
            assert tokens == expected and ending.cached_tokens == 5 * 16
            assert other.peers.failed == {"corrupt": 1}

    asyncio.run(scene())


def test_one_that_is_aborted_during_its_fetch_leaves_nothing(model: Path, tmp_path: Path) -> None:
    async def scene() -> None:
        async with engine(model, tmp_path, "owner") as (owner, wires), engine(model, tmp_path, "b") as (other, _):
            owner.submit("a")
            expected, _ = await owner.end("a")
            wires.gate.clear()
            other.submit("b", owner.peer())
            assert await asyncio.to_thread(wires.reached.wait, LIMIT_S)
            other.steps.abort(1, ["b"])
            _, ending = await other.end("b")
            assert ending.reason is Finish.ABORT
            wires.gate.set()
            other.submit("c", owner.peer())
            assert (await other.end("c"))[0] == expected

    asyncio.run(scene())


@pytest.mark.parametrize(("most", "believed"), [(0, 2e6), (1_000_000, 1e6), (3_000_000, 2e6)])
def test_no_more_is_expected_than_may_be_fetched(model: Path, most: int, believed: float) -> None:
    config = EngineConfig(
        dtype="float32",
        threads=1,
        kv_cache_bytes=64 * 8192,
        peer_bytes_per_s=2_000_000,
        peer_max_bytes_per_s=most,
    )
    assert main.build(model, config, "tiny").scheduler.limits.fetch_bytes_per_s == believed


def test_a_prefetch_brings_the_blocks_before_the_request(model: Path, tmp_path: Path) -> None:
    """Also where there is nothing to bring any more, which is told without a step: replayed and simulated exactly."""

    async def scene() -> None:
        async with engine(model, tmp_path, "owner") as (owner, _), engine(model, tmp_path, "other") as (other, _):
            owner.submit("a")
            expected, _ = await owner.end("a")
            ahead = RequestSpec(id="ahead", prompt=PROMPT, max_tokens=0, peer=owner.peer(), prefetch=True)
            for id in ("ahead", "again"):
                other.steps.submit(1, [replace(ahead, id=id)])
                assert await other.end(id) == ([], Ending(Finish.LENGTH, None, 192))
            assert other.peers.fetched_blocks == 12
            other.submit("b")
            tokens, ending = await other.end("b")
            assert (tokens, ending.cached_tokens) == (expected, 192)

    asyncio.run(scene())
