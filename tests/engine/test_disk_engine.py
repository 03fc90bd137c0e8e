"""KV-06 and F10 with a real engine: whatever becomes of the disk tier, the tokens are those of an engine without one.

One engine fills the disk and ends; another starts on what it left, while or after something happens to that. Faults are
put between the store and `os`, as in test_disk_tier.py.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from shoal.core.kv.news import DISK
from shoal.core.plan import Copied, StepPlan
from shoal.core.request import RequestSpec, Sampling
from shoal.core.scheduler import Scheduler
from shoal.engine import main
from shoal.engine.config import EngineConfig
from shoal.engine.runner import Runner
from shoal.engine.transfer import diskfile
from shoal.engine.transfer.breaker import RETRY_NS
from shoal.engine.transfer.disk import DiskBlocks
from shoal.engine.transfer.host import HostBlocks
from shoal.engine.transfer.storage import BELIEVED_BYTES_PER_S, Storage
from tests.engine.test_disk_tier import Clock, FaultyOs, flip, full_after
from tests.support.drive import Outcome, make_scheduler, run_requests

pytestmark = pytest.mark.torch

BLOCK_BYTES = 8192  # of the tiny model in float32
CAPACITY = 1 << 20
WAIT_S = 30.0
GREEDY = Sampling(temperature=0)
PROMPT = tuple((29 * place + 3) % 269 for place in range(84))  # five blocks, and four tokens more
ASKED = RequestSpec(id="asked", prompt=PROMPT, max_tokens=6, sampling=GREEDY)
BESIDE = RequestSpec(id="beside", prompt=PROMPT[40:47], max_tokens=40, sampling=GREEDY)
SLOTS_AT = diskfile.Layout.within(CAPACITY, bytes(16), 16, BLOCK_BYTES).blocks_at


class Engine:
    """A scheduler that knows nothing, the runner of this module, and a disk tier in a folder."""

    def __init__(self, runner: Runner, folder: Path, root: bytes | None = None) -> None:
        assert runner.host is not None
        self.clock = Clock()
        self.runner = runner
        self.storage = Storage(
            runner.host,
            folder,
            root=root or runner.hash_root,
            block_tokens=16,
            capacity_bytes=CAPACITY,
            now_ns=self.clock,
        )
        self.scheduler = self.new_scheduler()

    def new_scheduler(self) -> Scheduler:
        """As after a restart, but for the store."""
        return make_scheduler(self.runner, num_blocks=24, disk_bytes_per_s=1e9, on_disk=self.storage.held())

    def serve(self, *specs: RequestSpec) -> dict[str, Outcome]:
        return run_requests(self.runner, self.scheduler, specs, disk=self.storage)

    def errors(self) -> dict[str, int]:
        return {reason: count for reason, count in self.storage.errors.items() if count}


@pytest.fixture(scope="module")
def runner(tiny: Path, new_runner: Callable[..., Runner]) -> Runner:
    return new_runner(tiny, host_cache_bytes=64 * BLOCK_BYTES)


@pytest.fixture(scope="module")
def alone(runner: Runner) -> dict[str, list[int]]:
    """Tokens without any tier."""
    return {
        spec.id: run_requests(runner, make_scheduler(runner, num_host_blocks=0), [spec])[spec.id].tokens
        for spec in (ASKED, BESIDE)
    }


@pytest.fixture(scope="module")
def left(runner: Runner, alone: dict[str, list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that an engine has left, with the blocks of both prompts."""
    folder = tmp_path_factory.mktemp("left") / "kv"
    engine = Engine(runner, folder)
    assert tokens_of(engine.serve(ASKED, BESIDE)) == alone
    assert engine.storage.num_blocks >= 5 and not engine.errors()
    engine.storage.close(WAIT_S)
    return folder


@pytest.fixture
def folder(left: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(left, tmp_path / "kv"))


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> FaultyOs:
    faulty = FaultyOs()
    monkeypatch.setattr(diskfile, "os", faulty)
    return faulty


@pytest.fixture
def start(runner: Runner) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def new(folder: Path, **settings: Any) -> Engine:
        made.append(Engine(runner, folder, **settings))
        return made[-1]

    yield new
    for engine in made:
        engine.storage.close(WAIT_S)
        view = engine.scheduler.view()
        assert view.free_blocks + view.cached_blocks == view.total_blocks
        assert view.free_host_blocks + view.cached_host_blocks == view.total_host_blocks


def tokens_of(outcomes: Mapping[str, Outcome]) -> dict[str, list[int]]:
    return {id: outcome.tokens for id, outcome in outcomes.items()}


def test_a_restart_finds_the_blocks_again(
    start: Callable[..., Engine], folder: Path, alone: dict[str, list[int]]
) -> None:
    engine = start(folder)
    engine.scheduler.kv_news()
    told = engine.scheduler.kv_news()
    assert len(told) == engine.storage.num_blocks and {tier for _, _, tier, _ in told} == {DISK}
    known = {b""}
    for key, parent, _, stored in told:
        assert stored and parent in known, "a block is told of after the one before it"
        known.add(key)
    outcomes = engine.serve(ASKED, BESIDE)
    assert tokens_of(outcomes) == alone
    view = engine.scheduler.view()
    assert view.disk_hits == view.host_hits == 80 and not engine.errors()
    assert outcomes["asked"].ended is not None and outcomes["asked"].ended.cached_tokens == 80


# -- KV-06, the ten cases ----------------------------------------------------------------------------------------------


def served_as_without(engine: Engine, alone: dict[str, list[int]], num_hit: int = 0) -> None:
    assert tokens_of(engine.serve(ASKED, BESIDE)) == alone
    assert engine.scheduler.view().disk_hits == num_hit
    assert engine.storage.num_bytes <= CAPACITY


def test_file_removed_behind_our_back(start: Callable[..., Engine], folder: Path, alone: dict[str, list[int]]) -> None:
    """The breaker opens at once, and half a minute later there is a new file."""
    engine = start(folder)
    (folder / "blocks").unlink()
    served_as_without(engine, alone)
    assert engine.errors()["missing"] >= 1 and engine.storage.off
    engine.clock.now_ns += RETRY_NS
    deadline_s = time.monotonic() + WAIT_S
    while not (folder / "blocks").exists() or engine.storage.off:
        engine.scheduler = engine.new_scheduler()
        engine.serve(ASKED, BESIDE)
        assert time.monotonic() < deadline_s
    engine.scheduler = engine.new_scheduler()
    served_as_without(engine, alone)  # writes
    engine.scheduler = engine.new_scheduler()
    served_as_without(engine, alone, num_hit=80)


@pytest.mark.parametrize("running", [False, True])
def test_file_cut_to_half(
    start: Callable[..., Engine], folder: Path, alone: dict[str, list[int]], running: bool
) -> None:
    """Before the start, or under a running engine: what lay before the cut is found."""
    engine = start(folder) if running else None
    file = folder / "blocks"
    with open(file, "r+b") as opened:
        opened.truncate(SLOTS_AT + 2 * BLOCK_BYTES + 100)
    engine = engine or start(folder)
    served_as_without(engine, alone, num_hit=32)
    assert engine.errors()["cut"] >= 3


def test_one_bit_flipped(start: Callable[..., Engine], folder: Path, alone: dict[str, list[int]]) -> None:
    """In the third block."""
    flip(folder / "blocks", SLOTS_AT + 2 * BLOCK_BYTES + 4711)
    engine = start(folder)
    served_as_without(engine, alone, num_hit=64)
    assert engine.errors() == {"corrupt": 1}


def test_one_bit_flipped_in_each_block(start: Callable[..., Engine], folder: Path, alone: dict[str, list[int]]) -> None:
    engine = start(folder)
    for slot in range(engine.storage.num_blocks):
        flip(folder / "blocks", SLOTS_AT + slot * BLOCK_BYTES + 99)
    served_as_without(engine, alone)
    assert engine.errors()["corrupt"] >= 5 and engine.storage.off


def test_header_of_another_model(
    start: Callable[..., Engine], folder: Path, alone: dict[str, list[int]], runner: Runner
) -> None:
    other = start(folder, root=b"q" * 16)
    other.storage.close(WAIT_S)
    engine = start(folder)
    assert engine.errors() == {"foreign": 1} and engine.storage.held() == []
    served_as_without(engine, alone)


def test_no_space_left(
    start: Callable[..., Engine], tmp_path: Path, alone: dict[str, list[int]], faults: FaultyOs
) -> None:
    faults.calls["pwritev"] = full_after(SLOTS_AT + 2 * BLOCK_BYTES)
    engine = start(tmp_path / "small")
    served_as_without(engine, alone)
    assert engine.errors() == {"full": 1} and engine.storage.num_blocks == 2


def test_a_read_that_takes_5_s_keeps_no_step_waiting(
    start: Callable[..., Engine],
    folder: Path,
    alone: dict[str, list[int]],
    faults: FaultyOs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the disk hangs, the stream beside gets a token in each step; nobody else waits than who asked for the
    blocks, and that until the limit."""
    engine = start(folder)
    gate = faults.hold("preadv")
    plans: list[StepPlan] = []
    launch = engine.runner.launch

    def launched(plan: StepPlan) -> None:
        plans.append(plan)
        launch(plan)
        if len(plans) == 30:
            assert gate.entered.acquire(timeout=WAIT_S)  # the disk has had the read for as long
            assert {part.id for each in plans for part in each.slices} == {"beside"}
            engine.clock.now_ns += 1_000_000_000
            engine.storage._store.expire()

    monkeypatch.setattr(engine.runner, "launch", launched)
    served_as_without(engine, alone)
    assert [len(plan.slices) for plan in plans[:30]] == [1] * 30, "a step did without its token"
    assert engine.errors()["slow"] >= 1
    gate.open()


def test_evict_the_same_key_twice(start: Callable[..., Engine], folder: Path, alone: dict[str, list[int]]) -> None:
    engine = start(folder)
    keys = [held.key for held in engine.storage.held()]
    engine.storage._store.forget(keys + keys, lambda outcome: None)
    served_as_without(engine, alone)
    assert engine.storage.num_blocks >= 5 and not engine.errors()  # written anew


def test_100_leftover_files_of_a_killed_process(
    start: Callable[..., Engine], folder: Path, alone: dict[str, list[int]]
) -> None:
    for number in range(100):
        (folder / f"blocks.{number:016x}").write_bytes(b"unfinished")
    engine = start(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["blocks", "lock"]
    served_as_without(engine, alone, num_hit=80)


def test_folder_read_only(
    start: Callable[..., Engine], folder: Path, alone: dict[str, list[int]], faults: FaultyOs
) -> None:
    faults.fail("open", errno.EROFS)
    engine = start(folder)
    served_as_without(engine, alone)
    assert engine.errors() == {"io": 1} and engine.storage.off


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_the_disk_gives_errors(
    start: Callable[..., Engine], folder: Path, alone: dict[str, list[int]], faults: FaultyOs, call: str
) -> None:
    faults.fail(call, errno.EIO)
    engine = start(folder)
    served_as_without(engine, alone, num_hit=0 if call == "preadv" else 80)
    assert call == "pwritev" or engine.errors()["io"] >= 4


@pytest.mark.parametrize("call", ["read", "write"])
def test_a_transfer_call_raises(
    start: Callable[..., Engine],
    folder: Path,
    alone: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    def raising(*_: Any, **__: Any) -> None:
        raise RuntimeError("no transfer today")

    monkeypatch.setattr(DiskBlocks, call, raising)
    engine = start(folder.parent / "new" if call == "write" else folder)
    served_as_without(engine, alone)
    assert engine.errors()["raised"] >= 4


def test_a_bit_flipped_in_the_host_tier_never_reaches_the_disk(
    start: Callable[..., Engine], tmp_path: Path, alone: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would get a digest of its own there, and be believed."""
    honest = HostBlocks.copy
    spoilt: list[int] = []

    def spoil(host: HostBlocks, **how: Any) -> list[int]:
        bad = honest(host, **how)
        if how["out"] and not spoilt:
            spoilt.append(how["host_block"])
            host._host_HNX[how["host_block"], 1, 77] ^= 16
        return bad

    monkeypatch.setattr(HostBlocks, "copy", spoil)
    engine = start(tmp_path / "kv")
    served_as_without(engine, alone)
    assert engine.errors() == {"memory": 1} and engine.storage.num_blocks >= 4


def test_a_bit_flipped_on_the_way_from_the_disk_is_noticed(
    start: Callable[..., Engine], folder: Path, alone: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the store has checked the block, on its way into the host tier: the digest goes with it."""
    engine = start(folder)
    honest = HostBlocks.filled
    spoilt: list[int] = []

    def spoil(host: HostBlocks, host_block: int, *how: Any) -> None:
        if len(spoilt) == 1:
            host._host_HNX[host_block, 1, 77] ^= 16
        spoilt.append(host_block)
        honest(host, host_block, *how)

    monkeypatch.setattr(HostBlocks, "filled", spoil)
    served_as_without(engine, alone, num_hit=80)
    view = engine.scheduler.view()
    assert len(spoilt) == 5 and view.bad_blocks == 1 and not engine.errors()


# -- other cases of the KV tiers ---------------------------------------------------------------------------------------


def test_kv_01_a_salt_separates_prefixes_in_all_tiers_and_after_a_restart(
    start: Callable[..., Engine], tmp_path: Path, alone: dict[str, list[int]]
) -> None:
    """The same prompt, now with one salt and now with another: each finds what was computed with its own."""
    one, other = (replace(ASKED, salt=salt, max_tokens=1) for salt in ("one", "other"))
    filler = RequestSpec(id="filler", prompt=tuple(place % 7 for place in range(300)), max_tokens=1, sampling=GREEDY)
    engine = start(tmp_path / "kv")
    found: list[int] = []

    def serve(spec: RequestSpec) -> None:
        outcome = engine.serve(spec)["asked"]
        assert outcome.tokens == alone["asked"][:1] and outcome.ended is not None
        found.append(outcome.ended.cached_tokens)

    serve(one)
    serve(other)
    engine.serve(filler)  # takes most of the device's blocks
    assert found == [0, 0]
    serve(one)
    assert engine.scheduler.view().host_hits > 0
    engine.scheduler = engine.new_scheduler()  # the host tier is empty
    num_blocks = engine.storage.num_blocks
    serve(one)
    assert engine.scheduler.view().disk_hits == 80 and found == [0, 0, 80, 80]
    serve(other)
    assert engine.scheduler.view().disk_hits == 160 and found[-1] == 80
    serve(replace(ASKED, salt="a third", max_tokens=1))
    assert engine.scheduler.view().disk_hits == 160 and found[-1] == 0
    assert num_blocks >= 10 and not engine.errors()


def test_kv_03_c_an_abort_while_the_disk_hangs_gives_host_blocks_back_within_the_limit(
    start: Callable[..., Engine], folder: Path, faults: FaultyOs
) -> None:
    """Not before the store has let go of them, and not later than its limit."""
    engine = start(folder)
    gate = faults.hold("preadv")
    scheduler, told = engine.scheduler, SimpleQueue[Copied | Exception]()
    scheduler.submit(ASKED, 0)
    plan = scheduler.plan(0)
    assert plan is not None and len(plan.ops) == 1 and not plan.slices
    engine.runner.launch(plan)
    engine.storage.start(plan.ops[0], told.put)
    assert gate.entered.acquire(timeout=WAIT_S)
    scheduler.apply(engine.runner.collect(), 1)
    assert len(scheduler.abort("asked", 1)) == 1
    scheduler.check()
    view = scheduler.view()
    assert view.total_host_blocks - view.free_host_blocks == 5 and told.empty()
    engine.clock.now_ns += 1_000_000_000
    engine.storage._store.expire()
    copied = told.get(timeout=WAIT_S)
    assert isinstance(copied, Copied) and len(copied.bad) == 5
    scheduler.copied([copied], 2)
    scheduler.check()
    assert scheduler.view().free_host_blocks == view.total_host_blocks
    gate.open()


# -- the whole engine --------------------------------------------------------------------------------------------------


def test_an_engine_is_built_with_its_disk_tier(tiny: Path, tmp_path: Path) -> None:
    config = EngineConfig(
        dtype="float32",
        threads=1,
        kv_cache_bytes=16 * BLOCK_BYTES,
        host_cache_bytes=8 * BLOCK_BYTES,
        kv_disk_folder=str(tmp_path / "kv"),
        kv_disk_bytes=CAPACITY,
    )
    parts = main.build(tiny, config, "tiny")
    assert parts.scheduler.limits.disk_bytes_per_s > 0
    assert parts.disk is not None and not any(parts.disk.errors.values())
    assert parts.copier is not None and parts.copier.close(WAIT_S)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("disk")]


def test_the_rate_of_reads_is_measured_where_that_can_be_done(
    start: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the store, of which nothing is touched; on a full or read-only disk a guess has to do."""
    storage = start(tmp_path / "kv").storage
    assert storage.measure() > 0 and sorted(path.name for path in (tmp_path / "kv").iterdir()) == ["blocks", "lock"]

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert storage.measure() == BELIEVED_BYTES_PER_S
    assert storage.num_blocks == 0 and not any(storage.errors.values())


@pytest.mark.parametrize("field", ["kv_disk_bytes", "host_cache_bytes", "enable_prefix_caching"])
def test_a_disk_tier_that_lacks_something_is_refused(tiny: Path, field: str) -> None:
    whole = EngineConfig(kv_disk_folder="kv", kv_disk_bytes=CAPACITY, host_cache_bytes=CAPACITY)
    lacking = replace(whole, **{field: type(getattr(whole, field))(0)})
    with pytest.raises(ValueError, match=f"engine.kv_disk_folder is 'kv'; it needs engine.{field}, which is"):
        main.build(tiny, lacking, "tiny")
