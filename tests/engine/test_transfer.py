"""KV that goes to the host tier and comes back: the same bytes, and the same tokens from them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.core.plan import Admit, Copied, KvOp, Slice, StepPlan
from shoal.core.request import RequestSpec, Sampling
from shoal.core.scheduler import Scheduler
from shoal.engine import main
from shoal.engine.config import EngineConfig
from shoal.engine.device import choose
from shoal.engine.kvstore import KVStore
from shoal.engine.loop import StepLoop, Turn
from shoal.engine.runner import Runner
from shoal.engine.transfer.copier import Copier
from shoal.engine.transfer.host import HostBlocks
from tests.support.drive import Outcome, make_scheduler, run_requests
from tests.support.kvstore import random_store

pytestmark = pytest.mark.torch

BLOCK_BYTES = 8192  # of the tiny model in float32
WAIT_S = 30.0
GREEDY = Sampling(temperature=0)
PROMPT = tuple((29 * place + 3) % 269 for place in range(40))


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["float32", "bfloat16"])
def store(request: pytest.FixtureRequest) -> KVStore:
    return random_store(request.param)


def copy(host: HostBlocks, *ops: KvOp) -> None:
    """By a copier, as an engine does it."""
    told: list[Copied | Exception] = []
    done = threading.Semaphore(0)

    def tell(outcome: Copied | Exception) -> None:
        told.append(outcome)
        done.release()

    copier = Copier(host)
    for op in ops:
        copier.start(op, tell)
    for _ in ops:
        assert done.acquire(timeout=WAIT_S)
    assert copier.close(WAIT_S)
    assert [each.number for each in told if isinstance(each, Copied)] == [op.number for op in ops]


def test_blocks_come_back_byte_for_byte_and_no_other_changes(store: KVStore) -> None:
    """Scattered blocks, runs of them, and back into others than they came from."""
    host = HostBlocks(store, choose(EngineConfig(threads=1)), 6)
    assert host.block_bytes == store.bytes_NBX[:, 0].numel()
    before = store.bytes_NBX.clone()
    copy(host, KvOp(1, "a", True, (3, 4, 5, 9), (2, 3, 4, 0)), KvOp(2, "b", True, (11, 0), (5, 1)))
    assert torch.equal(store.bytes_NBX, before), "a copy to the host changes nothing on the device"
    store.bytes_NBX[:, [3, 4, 5, 9, 11, 0]] = 0
    copy(host, KvOp(3, "b", False, (4, 5), (5, 1)), KvOp(4, "a", False, (0, 1, 2, 9), (2, 3, 4, 0)))
    expected = before.clone()
    expected[:, [3, 11]] = 0
    expected[:, [4, 5]] = before[:, [11, 0]]
    expected[:, [0, 1, 2, 9]] = before[:, [3, 4, 5, 9]]
    assert torch.equal(store.bytes_NBX, expected)


@pytest.mark.parametrize(
    ("device", "host"), [((12,), (0,)), ((-1,), (0,)), ((0,), (6,)), ((0,), (-1,)), ((10, 11), (5, 6))]
)
def test_blocks_that_do_not_exist_are_noticed(store: KVStore, device: tuple[int, ...], host: tuple[int, ...]) -> None:
    blocks = HostBlocks(store, choose(EngineConfig(threads=1)), 6)
    with pytest.raises(AssertionError, match="blocks of the"):
        blocks.copy(out=True, device_block=device[0], host_block=host[0], count=len(device))


def test_measuring_leaves_the_device_as_it_was(store: KVStore) -> None:
    before = store.bytes_NBX.clone()
    assert Copier(HostBlocks(store, choose(EngineConfig(threads=1)), 6)).measure() > 1e6
    assert torch.equal(store.bytes_NBX, before)


# -- the runner --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["auto", "off"])
def runner(request: pytest.FixtureRequest, tiny: Path, new_runner: Callable[..., Runner]) -> Runner:
    """With our kernels and with torch alone: blocks are laid out in another order, and cleared or not."""
    made = new_runner(tiny, kernels=request.param, host_cache_bytes=64 * BLOCK_BYTES)
    if request.param == "auto" and made._device.kernels is None:
        pytest.skip("no kernels on this machine")
    return made


def plan(step: int, slices: list[Slice], admits: list[Admit], leaves: list[str]) -> StepPlan:
    return StepPlan(step, leaves, admits, slices, sum(piece.count for piece in slices), 0)


@pytest.mark.parametrize("in_a_plan_of_its_own", [False, True])
def test_a_request_goes_on_from_what_came_back(runner: Runner, in_a_plan_of_its_own: bool) -> None:
    """44 tokens fill three blocks but for four places. They come back into other blocks, which held something infinite,
    and the next token's block is new."""
    spec = RequestSpec(id="a", prompt=PROMPT, max_tokens=12)
    whole = run_requests(runner, make_scheduler(runner), [spec])["a"].tokens

    runner.forget_all()
    sampling = spec.sampling
    admit = Admit("a", PROMPT, 40, 0, (0, 1, 2), sampling, 0, 0, ())
    tokens = runner.compute(plan(1, [Slice("a", 0, 40, (), -1, True)], [admit], [])).tokens
    for step in range(2, 6):
        tokens += runner.compute(plan(step, [Slice("a", 38 + step, 1, (), step - 1, True)], [], [])).tokens
    copy(runner.host, KvOp(1, "a", True, (0, 1, 2), (7, 3, 4)))
    runner._store._kv_NB2tKD.fill_(math.inf)
    copy(runner.host, KvOp(2, "a", False, (8, 9, 4), (7, 3, 4)))
    blocks = (8, 9, 4, 5) if in_a_plan_of_its_own else (8, 9, 4)
    back = Admit("a", (*PROMPT, *tokens), 40, 44, blocks, sampling, 0, 0, ())
    if in_a_plan_of_its_own:
        assert runner.compute(plan(6, [], [], ["a"])).busy_ns == 0
        result = runner.compute(plan(7, [], [back], []))
        assert (result.tokens, result.busy_ns, result.latency_ns) == ([], 0, 0)
        admits, leaves = [], []
    else:
        admits, leaves = [back], ["a"]
    for step in range(8, 15):
        blocks = (5,) if step == 12 and not in_a_plan_of_its_own else ()  # position 48 begins a block
        tokens += runner.compute(plan(step, [Slice("a", 36 + step, 1, blocks, -1, True)], admits, leaves)).tokens
        admits, leaves = [], []
    runner._store._kv_NB2tKD.zero_()
    assert tokens == whole


def requests(count: int, **settings: Any) -> list[RequestSpec]:
    return [
        RequestSpec(
            id=f"r{number}",
            prompt=PROMPT[number : number + 20],
            max_tokens=70,
            sampling=Sampling(temperature=0.8, seed=number),
            **settings,
        )
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def undisturbed(runner: Runner) -> dict[str, list[int]]:
    """Each request alone."""
    alone: dict[str, list[int]] = {}
    for spec in requests(6):
        alone[spec.id] = run_requests(runner, make_scheduler(runner), [spec])[spec.id].tokens
    return alone


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_parked_streams_equal_undisturbed_ones(
    runner: Runner, undisturbed: dict[str, list[int]], steps_in_flight: int, prefix_caching: bool
) -> None:
    """Six requests of 6 blocks each in a pool of 9: somebody is always parked, and nothing is computed twice."""
    scheduler = make_scheduler(
        runner,
        num_blocks=9,
        max_steps_in_flight=steps_in_flight,
        preemption="swap",
        prefix_caching=prefix_caching,
    )
    outcomes = run_requests(runner, scheduler, requests(6))
    assert {id: outcome.tokens for id, outcome in outcomes.items()} == undisturbed
    _all_was_parked(scheduler, outcomes)


def _all_was_parked(scheduler: Scheduler, outcomes: dict[str, Outcome]) -> None:
    view = scheduler.view()
    assert view.parks == sum(outcome.parks for outcome in outcomes.values()) >= 4
    assert view.recomputed_tokens == 0 and view.swapped_out_bytes >= view.swapped_in_bytes > 0
    assert view.free_blocks + view.cached_blocks == view.total_blocks
    assert view.free_host_blocks + view.cached_host_blocks == view.total_host_blocks


def test_prompt_logprobs_survive_a_preemption_in_the_middle_of_the_prompt(runner: Runner) -> None:
    """The logprob of a chunk's first token comes from the chunk before it, which nobody keeps for a parked request."""
    prompt = tuple((31 * place + 5) % 269 for place in range(300))
    sampling = Sampling(temperature=0, prompt_logprobs=0)
    asking = RequestSpec(id="a", prompt=prompt, max_tokens=2, sampling=sampling, priority=1)
    urgent = RequestSpec(id="urgent", prompt=PROMPT, max_tokens=2, sampling=GREEDY)
    whole = run_requests(runner, make_scheduler(runner), [asking])["a"]
    scheduler = make_scheduler(runner, max_prefill_chunk=70, max_num_seqs=1, preemption="swap")
    cut = run_requests(runner, scheduler, [asking], later={2: [urgent]})["a"]
    assert cut.preemptions + cut.parks == 1
    scores = [[entry.logprob for entry in outcome.prompt_logprobs] for outcome in (whole, cut)]
    assert scores[1] == pytest.approx(scores[0], abs=1e-4)
    assert cut.tokens == whole.tokens


def test_prompt_logprobs_survive_a_block_that_changed_while_their_request_was_parked(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the third block on all is computed again, but what scores its first token was computed before that."""
    prompt = tuple((31 * place + 5) % 269 for place in range(100))
    sampling = Sampling(temperature=0, prompt_logprobs=0)
    asking = RequestSpec(id="a", prompt=prompt, max_tokens=12, sampling=sampling, priority=1)
    urgent = RequestSpec(id="urgent", prompt=PROMPT, max_tokens=2, sampling=GREEDY)
    whole = run_requests(runner, make_scheduler(runner), [asking])["a"]
    honest, back = HostBlocks.copy, list[int]()

    def spoil(host: HostBlocks, **how: Any) -> list[int]:
        if not how["out"]:
            back.append(how["host_block"])
            host._host_HNX[how["host_block"], 1, 77] ^= 16 * (len(back) == 3)
        return honest(host, **how)

    monkeypatch.setattr(HostBlocks, "copy", spoil)
    scheduler = make_scheduler(runner, max_num_seqs=1, preemption="swap")
    parked = run_requests(runner, scheduler, [asking], later={5: [urgent]})["a"]
    assert (parked.parks, scheduler.view().bad_blocks) == (1, 1)
    scores = [[entry.logprob for entry in outcome.prompt_logprobs] for outcome in (whole, parked)]
    assert scores[1] == pytest.approx(scores[0], abs=1e-4)
    assert parked.tokens == whole.tokens


# -- prefix blocks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("flipped", [False, True])
def test_a_prefix_that_the_device_gave_up_comes_back_from_the_host_unless_its_bytes_changed(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, steps_in_flight: int, flipped: bool
) -> None:
    """KV-03, I7: beside a stream that runs all the time, a prompt is asked again after others took its blocks."""
    long = RequestSpec(id="long", prompt=PROMPT[:5], max_tokens=150, sampling=GREEDY)
    first = RequestSpec(id="first", prompt=PROMPT * 2, max_tokens=4, sampling=GREEDY)
    again = replace(first, id="again")
    others = [
        RequestSpec(id=f"o{n}", prompt=tuple((7 * n + 3 * place) % 269 for place in range(80)), max_tokens=2)
        for n in range(4)
    ]
    scheduler = make_scheduler(runner, num_blocks=18, max_steps_in_flight=steps_in_flight)
    assert runner.host is not None
    if flipped:
        honest = HostBlocks.copy

        def spoil(host: HostBlocks, **how: Any) -> list[int]:
            """Blocks that come back have one bit changed meanwhile, until that was noticed."""
            if not how["out"] and not scheduler.view().bad_blocks:
                host._host_HNX[how["host_block"], 1, 77] ^= 16
            return honest(host, **how)

        monkeypatch.setattr(HostBlocks, "copy", spoil)
    arrivals = {20 * number: [spec] for number, spec in enumerate([*others, again], 1)}
    outcomes = run_requests(runner, scheduler, [long, first], later=arrivals)
    alone = run_requests(runner, make_scheduler(runner), [long])["long"].tokens
    assert outcomes["again"].tokens == outcomes["first"].tokens and outcomes["long"].tokens == alone
    view = scheduler.view()
    assert view.host_hits >= 64 and (view.bad_blocks > 0) == flipped
    assert view.free_blocks + view.cached_blocks == view.total_blocks
    assert view.free_host_blocks + view.cached_host_blocks == view.total_host_blocks


# -- the whole engine --------------------------------------------------------------------------------------------------


class Client:
    """Drives a step loop with its copier, on a thread of its own, and waits for the ends of what it sent."""

    def __init__(self, loop_parts: tuple[Scheduler, Runner, Copier]) -> None:
        scheduler, runner, copier = loop_parts
        self.turns: list[Turn] = []
        self.failures: list[BaseException] = []
        self.tokens: dict[str, list[int]] = {}
        self.open: set[str] = set()
        self.all_ended = threading.Event()
        self.loop = StepLoop(
            scheduler,
            runner,
            copier=copier,
            publish=self._publish,
            announce=lambda predicted_ns: None,
            failed=self._fail,
        )

    def run(self, specs: list[RequestSpec]) -> None:
        self.open = {spec.id for spec in specs}
        self.loop.submit(1, specs)
        thread = threading.Thread(target=self.loop.run, daemon=True)
        thread.start()
        assert self.all_ended.wait(WAIT_S)
        assert self.loop.stop(WAIT_S)
        thread.join(WAIT_S)
        assert not self.failures

    def _publish(self, turn: Turn) -> None:
        self.turns.append(turn)
        for update in turn.updates.get(1, ()):
            self.tokens.setdefault(update.id, []).extend(update.tokens)
            if update.ending is not None:
                self.open.discard(update.id)
        if not self.open:
            self.all_ended.set()

    def _fail(self, error: BaseException) -> None:
        self.failures.append(error)
        self.all_ended.set()


@contextmanager
def no_copier_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "copies"]


@pytest.mark.parametrize("max_bytes_per_s", [0, 10_000_000])
def test_an_engine_whose_pool_is_too_small_parks_and_says_so(
    runner: Runner, undisturbed: dict[str, list[int]], max_bytes_per_s: int
) -> None:
    """The same with the real thread: copies overlap with steps, in whatever order they come."""
    scheduler = make_scheduler(runner, num_blocks=9, preemption="swap", max_step_ns=500_000_000)
    assert runner.host is not None
    client = Client((scheduler, runner, Copier(runner.host, max_bytes_per_s=max_bytes_per_s)))
    with no_copier_left():
        client.run(requests(6, service_class="batch"))
    assert client.tokens == undisturbed
    view = client.turns[-1].view
    assert view.parks >= 4 and view.recomputed_tokens == 0
    scheduler.check()  # what the last ones left may still be copied
    updates = [update for turn in client.turns for update in turn.updates.get(1, ())]
    assert sum(update.parked is True for update in updates) == sum(update.parked is False for update in updates) > 0
    assert all(sum(update.waited_ns is not None for update in updates if update.id == id) == 1 for id in undisturbed)
    waits = [wait for turn in client.turns for wait in turn.waits]
    assert len(waits) >= 6 + view.parks and {wait.service_class for wait in waits} == {"batch"}
    assert all(turn.step is None or turn.step.num_tokens > 0 for turn in client.turns)


def test_an_engine_is_built_with_its_host_tier(tiny: Path) -> None:
    config = EngineConfig(
        dtype="float32",
        threads=1,
        kv_cache_bytes=16 * BLOCK_BYTES,
        host_cache_bytes=5 * BLOCK_BYTES + 1,
        host_copy_bytes_per_s=1_000_000,
        composer="fcfs",
    )
    parts = main.build(tiny, config, "tiny")
    limits = parts.scheduler.limits
    assert (limits.num_host_blocks, limits.block_bytes, limits.composer) == (5, BLOCK_BYTES, "fcfs")
    assert 300_000 < limits.copy_bytes_per_s <= 1_000_000
    assert parts.copier is not None and parts.copier.close(1.0)
    with pytest.raises(ValueError, match=f"engine.host_cache_bytes is 8191; one block takes {BLOCK_BYTES} bytes"):
        main.build(tiny, EngineConfig(dtype="float32", threads=1, host_cache_bytes=8191), "tiny")


def test_an_engine_without_a_host_tier_copies_nothing(tiny: Path) -> None:
    parts = main.build(tiny, EngineConfig(dtype="float32", threads=1, kv_cache_bytes=16 * BLOCK_BYTES), "tiny")
    assert parts.copier is None and parts.scheduler.limits.num_host_blocks == 0
