"""A simulated replica that parks: when a copy is done, and who waits for it meanwhile, worked out by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from shoal.core.kv.news import DEVICE, DISK, HOST
from shoal.core.limits import Limits
from shoal.core.plan import Copied, Event, KvOp, Parked, Refused, Resumed, Token
from shoal.core.request import RequestSpec
from shoal.core.scheduler import Scheduler
from shoal.core.stepcost import StepCost
from shoal.sim.agenda import Agenda
from shoal.sim.replica import Modelled, Replica

MS = 1_000_000
LIMITS = Limits(
    num_blocks=64,
    max_model_len=256,
    vocab_size=100,
    max_num_seqs=1,
    num_host_blocks=64,
    block_bytes=1_000_000,
    preemption="swap",
)


def test_a_parked_request_waits_for_its_copies_and_nobody_else_does() -> None:
    """Steps of 10 ms, turns 0.3 ms later, copies of 25 ms a block. "low" runs alone, "high" comes at 15 ms.

     0.3  step 1 of low: token at 10.3; step 2 from 10.6: token at 20.6
    20.9  low has to go, and its one block is copied until 45.9; high's only step: token at 30.9
    31.2  low cannot be planned for before its copy is done: nothing happens until 45.9
    46.2  low returns: its block is copied back until 71.2, and nothing can be computed meanwhile
    71.5  low goes on: token at 81.5, and every 10.3 ms from there
    """
    agenda, heard = Agenda(), list[tuple[float, Event | Refused]]()

    def hear(events: Iterable[Event | Refused]) -> None:
        heard.extend((agenda.now_ns / MS, event) for event in events)

    scheduler = Scheduler(LIMITS, hash_root=b"root", cost=StepCost((10.0 * MS, 0, 0, 0, 0)))
    machine = Modelled(StepCost((10.0 * MS, 0, 0, 0, 0)), copy_bytes_per_s=40e6)
    replica = Replica(scheduler, machine, agenda, tell=hear)
    low = RequestSpec(id="low", prompt=(1,) * 10, max_tokens=5, priority=1)
    high = RequestSpec(id="high", prompt=(2,) * 10, max_tokens=1)
    agenda.at(0, lambda: replica.submit(low))
    agenda.at(15 * MS, lambda: replica.submit(high))
    agenda.run()
    tokens = {id: [at for at, event in heard if isinstance(event, Token) and event.id == id] for id in ("low", "high")}
    assert tokens["high"] == [pytest.approx(30.9)]
    assert tokens["low"] == pytest.approx([10.3, 20.6, 81.5, 91.8, 102.1])
    assert [at for at, event in heard if isinstance(event, Parked)] == [pytest.approx(30.9)]  # told by the apply
    (resumed,) = [event for _, event in heard if isinstance(event, Resumed)]
    assert resumed.waited_ns / MS == pytest.approx(71.5 - 10.6)  # from its last slice to the next
    view = scheduler.view()
    assert (view.parks, view.recomputed_tokens, view.swapped_out_bytes) == (1, 0, 1_000_000)
    scheduler.check()


def test_what_a_request_leaves_is_copied_and_written_when_all_have_ended() -> None:
    """One token from a prompt of 40: a step, a turn for the copy of its two blocks, and one for the write of them."""
    agenda = Agenda()
    cost = StepCost((0, 1e6, 0, 0, 0))
    limits = replace(LIMITS, disk_bytes_per_s=Modelled.DISK_BYTES_PER_S)
    scheduler = Scheduler(limits, hash_root=b"root", cost=StepCost(cost.coefficients))
    replica = Replica(scheduler, Modelled(cost, copy_bytes_per_s=1e9), agenda, tell=lambda events: None)
    scheduler.kv_news()
    agenda.at(0, lambda: replica.submit(RequestSpec(id="a", prompt=(1,) * 40, max_tokens=1)))
    agenda.run()
    assert [tier for _, _, tier, stored in scheduler.kv_news() if stored] == [DEVICE] * 2 + [HOST] * 2 + [DISK] * 2
    assert agenda.now_ns / MS == pytest.approx(0.3 + 40 + 0.3 + 2 + 0.3 + 10 + 0.3)
    scheduler.check()


def test_copies_are_made_one_after_the_other() -> None:
    machine = Modelled(StepCost(), copy_bytes_per_s=40e6)
    first, second = (KvOp(number, "a", True, (0, 1), (0, 1)) for number in (1, 2))
    done_ns, copied = machine.copy(first, 2_000_000, 10 * MS, 0)
    assert (done_ns, copied) == (60 * MS, Copied(1, 50 * MS))
    assert machine.copy(second, 2_000_000, 30 * MS, done_ns) == (110 * MS, Copied(2, 50 * MS))
