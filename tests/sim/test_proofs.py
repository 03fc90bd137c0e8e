"""Replay and agreement: a journal is all it takes to make the same run again, and the simulator is the same program.

The journals come from the engine's real step loop with a scripted runner, from a scheduler called at random, and from
a real (tiny) model. Each holds preemption, aborts and n > 1, with one and with two plans in flight, some with copies.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from shoal.core.classes import DEFAULT_CLASSES
from shoal.core.kv.hashing import root_key
from shoal.core.limits import Limits
from shoal.core.plan import Copied, KvOp, StepPlan, StepResult
from shoal.core.request import RequestSpec, Sampling
from shoal.core.scheduler import Scheduler
from shoal.core.stepcost import StepCost
from shoal.engine.config import EngineConfig
from shoal.engine.loop import Runner, StepLoop, Turn
from shoal.engine.transfer.copier import Copier, Tell
from shoal.sim.agreement import agree
from shoal.sim.replay import Divergence, replay
from shoal.telemetry import journal
from shoal.telemetry.journal import Applied, CopiesDone, JournalFile, Planned, Recorder, Submitted
from tests.support.scripted import EmptyHost, Rule, Script, ScriptedRunner
from tests.support.tiny_model import make_tiny_model

ROOT = root_key("scripted", "float32", "none", 16)
WAIT_S = 60.0
VOCAB = 259
CLASSES = {name: replace(service, max_wait_s=3600.0) for name, service in DEFAULT_CLASSES.items()}
PARKING = {"num_host_blocks": 24, "block_bytes": 1000, "preemption": "swap"}
ON_DISK = {**PARKING, "disk_bytes_per_s": 1e9}


def limits(in_flight: int, **changes: Any) -> Limits:
    """16 blocks hold a third of what 8 requests of these lengths need: there is preemption."""
    settings = {
        "num_blocks": 16,
        "max_model_len": 256,
        "vocab_size": VOCAB,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_prefill_chunk": 24,
        "max_steps_in_flight": in_flight,
        "classes": CLASSES,
        **changes,
    }
    return Limits(**settings)


def choices(rng: Random, number: int) -> list[RequestSpec]:
    """One client request: 1 to 3 choices, often with the beginning of an earlier prompt."""
    id, count = f"{number:04d}", rng.choice((1, 1, 1, 2, 3))
    prompt = tuple(range(40)) * rng.randrange(2) + tuple(rng.choices(range(VOCAB), k=rng.randrange(1, 60)))
    leader = None if count == 1 else f"{id}.0"
    sampling = Sampling(seed=number, logprobs=rng.choice((None, None, 2)), prompt_logprobs=rng.choice((None, None, 1)))
    stops, tokens, priority = (7,), rng.randrange(1, 90), rng.choice((0, 0, 0, 1))
    service_class, tenant = rng.choice(list(CLASSES)), rng.choice(("", "one", "two"))
    return [
        RequestSpec(
            id=f"{id}.{n}",
            prompt=prompt,
            max_tokens=tokens,
            stop_token_ids=stops,
            sampling=sampling,
            choice=n,
            leader=leader if n else None,
            priority=priority,
            service_class=service_class,
            tenant=tenant,
        )
        for n in range(count)
    ]


def kinds(path: Path) -> Counter[str]:
    """How many events of each kind the journal tells of."""
    records = [record for _, record in journal.read(path)]
    return Counter(event[0] for record in records if hasattr(record, "events") for event in record.events)


class Client:
    """Drives a real StepLoop on its own thread: submits, aborts some streams by what it sees, waits for all ends.

    It sends while fewer than `num_open` are open, from this thread at any moment, so also while a step is computed.
    """

    def __init__(
        self,
        runner: Runner,
        in_flight: int,
        path: Path,
        *,
        seed: int,
        num_requests: int,
        num_open: int = 6,
        copier: Copier | None = None,
        make: Callable[[Random, int], list[RequestSpec]] = choices,
        **changes: Any,
    ) -> None:
        self.rng = Random(seed)
        self.num_open = num_open
        self.make = make
        self.open: set[str] = set()
        self.failed: list[BaseException] = []
        self.wanted = threading.Semaphore(0)  # requests to send
        scheduler = Scheduler(limits(in_flight, **changes), hash_root=ROOT)
        recorder = Recorder(scheduler, JournalFile(path), hash_root=ROOT)
        self.loop = StepLoop(
            recorder,
            runner,
            publish=self.on_turn,
            announce=lambda predicted_ns: None,
            failed=self.on_failure,
            copier=copier,
        )
        thread = threading.Thread(target=self.loop.run, name="steps", daemon=True)
        self.send(0)
        thread.start()
        for number in range(1, num_requests):
            assert self.wanted.acquire(timeout=WAIT_S) and not self.failed
            self.send(number)
        while self.open:
            assert self.wanted.acquire(timeout=WAIT_S) and not self.failed
        assert self.loop.stop(WAIT_S)
        thread.join(WAIT_S)
        scheduler.check()
        recorder.close()
        self.view = scheduler.view()

    def send(self, number: int) -> None:
        specs = self.make(Random(f"{number}/{self.num_open}"), number)
        self.open.update(spec.id for spec in specs)
        self.loop.submit(1, specs)

    def on_failure(self, error: BaseException) -> None:
        self.failed.append(error)
        self.wanted.release()

    def on_turn(self, turn: Turn) -> None:
        """On the step thread; what it asks for waits for the next turn, like a gateway's messages."""
        self.open.difference_update(refusing.id for refusing in turn.refused.get(1, ()))
        for update in turn.updates.get(1, ()):
            if update.ending is not None:
                self.open.discard(update.id)
            elif self.rng.random() < 0.01:
                self.loop.abort(1, [update.id])
        if len(self.open) < self.num_open:
            self.wanted.release()


@pytest.mark.parametrize("composer", ["value", "fcfs", "static"])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_real_loop_is_replayed_and_simulated_exactly(tmp_path: Path, in_flight: int, composer: str) -> None:
    path = tmp_path / "journal"
    script = Script(rules=(Rule(order=3, tokens=(1, 2, 3, 7)),), step_ms=0.2, steps_in_flight=in_flight)
    Client(ScriptedRunner(script), in_flight, path, seed=in_flight, num_requests=60, composer=composer)
    seen = kinds(path)
    assert seen["preempted"] > 5 and seen["token"] > 500 and seen["prompt_scored"] > 10
    assert replay(path) == sum(1 for _ in journal.read(path))
    assert agree(path) > 200


@pytest.mark.parametrize("in_flight", [2, 3])
def test_a_real_loop_that_feeds_a_pipeline_is_replayed_and_simulated_exactly(tmp_path: Path, in_flight: int) -> None:
    path = tmp_path / "journal"
    script = Script(rules=(Rule(order=3, tokens=(1, 2, 3, 7)),), step_ms=0.2, steps_in_flight=in_flight)
    Client(ScriptedRunner(script), in_flight, path, seed=in_flight, num_requests=60, num_stages=in_flight)
    plans = [record.plan for _, record in journal.read(path) if isinstance(record, journal.Planned) and record.plan]
    assert all(part.from_step == -1 for plan in plans for part in plan.slices)
    seen = kinds(path)
    assert seen["preempted"] > 5 and seen["token"] > 500
    assert replay(path) == sum(1 for _ in journal.read(path))
    assert agree(path) > 200


@pytest.mark.parametrize("composer", ["value", "fcfs"])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_real_loop_that_parks_is_replayed_and_simulated_exactly(
    tmp_path: Path, in_flight: int, composer: str
) -> None:
    """Copies of a block take 0.2 ms, as long as a step, so they end at any moment of a turn."""
    path = tmp_path / "journal"
    script = Script(step_ms=0.2, steps_in_flight=in_flight)
    copier = Copier(EmptyHost(24), max_bytes_per_s=5_000_000)
    Client(
        ScriptedRunner(script),
        in_flight,
        path,
        seed=in_flight,
        num_requests=60,
        copier=copier,
        composer=composer,
        **PARKING,
    )
    seen = kinds(path)
    assert seen["parked"] > 5 and seen["resumed"] > 5
    assert sum(isinstance(record, CopiesDone) for _, record in journal.read(path)) > 10
    assert replay(path) == sum(1 for _ in journal.read(path))
    assert agree(path) > 200


def conversations(rng: Random, number: int) -> list[RequestSpec]:
    """One of six beginnings of five blocks, and something new: more than the device holds, or a small host tier."""
    beginning = rng.randrange(6)
    prompt = (*range(80 * beginning % 90, 80 * beginning % 90 + 80), beginning, *rng.choices(range(VOCAB), k=20))
    return [RequestSpec(id=f"{number:04d}.0", prompt=prompt, max_tokens=rng.randrange(2, 30))]


class EmptyDisk:
    """A disk tier without bytes: some blocks are not there, others are given up later, and all take their time."""

    def __init__(self, seed: int) -> None:
        self._chance = Random(seed)
        self._written: dict[bytes, None] = {}
        self._timers: list[threading.Timer] = []

    def start(self, op: KvOp, tell: Tell) -> None:
        bad = [place for place in range(len(op.disk)) if self._chance.random() < 0.1]
        self._written.update(dict.fromkeys([held.key for held in op.disk if op.out]))
        dropped = ()
        if self._chance.random() < 0.1:
            dropped = (self._chance.choice(list(self._written)),)
        copied = Copied(op.number, 100_000, tuple(bad), dropped)
        self._timers.append(threading.Timer(self._chance.random() * 0.003, tell, [copied]))
        self._timers[-1].start()

    def close(self, limit_s: float) -> None:
        for timer in self._timers:
            timer.cancel()
            timer.join(limit_s)


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_real_loop_that_brings_prefixes_back_is_replayed_and_simulated_exactly(
    tmp_path: Path, in_flight: int, disk: bool
) -> None:
    """Beginnings leave the device and come back from the host tier, with a disk tier also from there. A step takes a
    while for each token, so that copying pays."""
    path = tmp_path / "journal"
    script = Script(step_ms=0.2, prefill_ms_per_token=0.05, steps_in_flight=in_flight)
    copier = Copier(EmptyHost(24), max_bytes_per_s=20_000_000, disk=EmptyDisk(in_flight) if disk else None)
    client = Client(
        ScriptedRunner(script),
        in_flight,
        path,
        seed=in_flight,
        num_requests=80,
        num_open=3,
        copier=copier,
        make=conversations,
        num_blocks=24,
        block_bytes=1000,
        num_host_blocks=20 if disk else 40,
        disk_bytes_per_s=1e9 if disk else 0.0,
    )
    view = client.view
    assert view.host_hits > 60 and (view.disk_hits > 20) == disk, view  # how many, the machine decides
    assert replay(path) == sum(1 for _ in journal.read(path))
    assert agree(path) > 200


@pytest.mark.torch
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("parks", [False, True])
def test_a_real_model_is_replayed_and_simulated_exactly(tmp_path: Path, in_flight: int, parks: bool) -> None:
    from shoal.engine.runner import load

    path = tmp_path / "journal"
    model = make_tiny_model(tmp_path / "model")
    memory = {"kv_cache_bytes": 16 * 8192, "host_cache_bytes": 24 * 8192 * parks}
    runner = load(model, EngineConfig(dtype="float32", device="cpu", threads=1, **memory))
    assert (runner.num_blocks, runner.block_tokens) == (16, 16)
    copier = None if runner.host is None else Copier(runner.host)
    changes = PARKING if parks else {}
    Client(runner, in_flight, path, seed=in_flight + 10, num_requests=14, copier=copier, **changes)
    seen = kinds(path)
    assert seen["parked" if parks else "preempted"] > 0 and seen["token"] > 300 and seen["prompt_scored"] > 3
    assert replay(path) == sum(1 for _ in journal.read(path))
    assert agree(path) > 100


@pytest.mark.parametrize("seed", range(18))
def test_any_calls_in_any_order_are_replayed_exactly(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "journal"
    rng, in_flight = Random(seed), seed % 3 + 1
    changes = {"composer": ("value", "fcfs", "static")[seed // 3 % 3], **(ON_DISK if seed % 2 else {})}
    cost = StepCost((1e6, 2e4, 3.0, 1e4, 0.0))
    scheduler = Scheduler(limits(in_flight, **changes), hash_root=ROOT, cost=cost)
    live = Recorder(scheduler, JournalFile(path), hash_root=ROOT)
    flying: list[StepPlan] = []
    copying = deque[KvOp]()
    ids: list[str] = []
    for number in range(600):
        now_ns = number * 1_000_000
        draw = rng.random()
        if draw < 0.05:
            specs = choices(rng, number)
            ids += [spec.id for spec in specs if live.submit(spec, now_ns)]
        elif draw < 0.07 and ids:
            live.abort(rng.choice(ids), now_ns)
        elif draw < 0.15 and copying:
            count = rng.randint(1, len(copying))
            done = [copying.popleft() for _ in range(count)]
            lost = [(0,) if op.disk and rng.random() < 0.2 else () for op in done]
            live.copied(
                [Copied(op.number, rng.randrange(1_000_000), bad) for op, bad in zip(done, lost, strict=True)], now_ns
            )
        elif draw < 0.55:
            plan = live.plan(now_ns)
            flying += [plan] if plan else []
            copying += plan.ops if plan else []
        elif flying:
            plan = flying.pop(0)
            tokens = [rng.randrange(VOCAB) for part in plan.slices if part.sample]
            live.apply(StepResult(plan.step, tokens, busy_ns=rng.randrange(10_000_000)), now_ns)
        scheduler.check()
    live.close()
    assert replay(path) == sum(1 for _ in journal.read(path)) > 100


def test_a_failed_call_is_replayed_too(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    live = Recorder(Scheduler(limits(1), hash_root=ROOT), JournalFile(path), hash_root=ROOT)
    live.submit(RequestSpec(id="a.0", prompt=(1, 2), max_tokens=2), 1)
    live.plan(2)
    with pytest.raises(ValueError, match="brought 2 tokens"):
        live.apply(StepResult(1, [4, 5]), 3)
    assert replay(path) == 4


def test_two_runs_in_one_file_are_proved_each(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for seed in (5, 6):
        Client(ScriptedRunner(Script(step_ms=0.0)), 1, path, seed=seed, num_requests=6, num_open=1)
    assert replay(path) == sum(1 for _ in journal.read(path))
    assert agree(path) > 20


def test_an_engine_that_was_killed_in_a_step_leaves_a_journal_that_agrees(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    Client(ScriptedRunner(Script(step_ms=0.0, steps_in_flight=2)), 2, whole, seed=9, num_requests=12, num_open=2)
    lines = whole.read_bytes().splitlines(keepends=True)
    for length in range(len(lines) - 40, len(lines), 5):
        cut.write_bytes(b"".join(lines[:length]) + lines[length][:20])
        assert replay(cut) == length
        assert agree(cut) > 20


@pytest.mark.parametrize("change", ["token", "cost", "order", "arrival"])
def test_a_journal_of_another_run_is_found_out(tmp_path: Path, change: str) -> None:
    """The proofs can fail: one token, one measured step, one call's place or one arrival is enough."""
    path = tmp_path / "journal"
    Client(ScriptedRunner(Script(step_ms=0.0)), 1, path, seed=4, num_requests=12)
    lines = path.read_bytes().splitlines(keepends=True)
    records = [record for _, record in journal.read(path)]
    number, record = next(found for found in enumerate(records) if _is_case(change, *found, records))
    if change == "order":
        lines[number - 1], lines[number] = lines[number], lines[number - 1]
    elif isinstance(record, Submitted):
        planned = records[number - 2]
        assert isinstance(planned, Planned) and planned.plan is not None
        lines[number] = journal.encode(msgspec.structs.replace(record, now_ns=planned.now_ns)) + b"\n"
    else:
        assert isinstance(record, Applied)
        if change == "token":
            record.result.tokens[1] += 1
        else:
            record.result.busy_ns += 1_000_000_000
        lines[number] = journal.encode(record) + b"\n"
    path.write_bytes(b"".join(lines))
    if change != "arrival":  # `now` of a submit changes no plan: only the simulator asks when it was
        with pytest.raises((Divergence, ValueError)):
            replay(path)
    with pytest.raises(Divergence):
        agree(path)


def _is_case(change: str, number: int, record: object, records: list[journal.Record]) -> bool:
    if change == "arrival":  # moved from after a step to before it
        return isinstance(record, Submitted) and record.refused is None and isinstance(records[number - 1], Applied)
    return isinstance(record, Applied) and len(record.result.tokens) > 2
