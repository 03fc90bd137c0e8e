"""The waiting bound under adversaries: nobody admitted waits longer than its class promises, whatever others do.

Output lengths are drawn after admission (a stop token comes when it comes), steps take up to their cap, half of the
replicas are lost. Waiting is measured from plan to plan, by a watcher that knows nothing of how the scheduler counts.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from shoal.core.classes import ServiceClass
from shoal.core.kv.hashing import root_key
from shoal.core.limits import Limits
from shoal.core.plan import Accepted, Ended, Event, Refused, StepPlan, StepResult, Token
from shoal.core.request import Refusal, RequestSpec
from shoal.core.scheduler import Scheduler
from shoal.core.stepcost import StepCost

SECOND = 1_000_000_000
STOP = 1
CLASSES = {
    "interactive": ServiceClass(rank=0, weight=8, ttft_ms=1000, tpot_ms=100, max_wait_s=12, max_queue=10_000),
    "standard": ServiceClass(rank=1, weight=4, ttft_ms=5000, tpot_ms=250, max_wait_s=40, max_queue=10_000),
    "batch": ServiceClass(rank=2, weight=1, max_wait_s=600, max_queue=10_000),
}


def limits(**changes: float) -> Limits:
    fields = {
        "num_blocks": 60, "block_tokens": 16, "max_model_len": 900, "vocab_size": 100, "max_num_seqs": 8,
        "max_num_batched_tokens": 256, "max_prefill_chunk": 128, "max_step_ns": SECOND // 2, "classes": CLASSES,
    }  # fmt: skip
    return Limits(**(fields | changes))  # type: ignore[arg-type]


class Replica:
    """One scheduler on a clock of its own; `step_s(plan)` is how long a step takes, `stops(id)` whether it ends now."""

    def __init__(self, limits: Limits, step_s: Callable[[StepPlan], float], stops: Callable[[str], bool]) -> None:
        self.scheduler = Scheduler(
            limits, hash_root=root_key("m", "float32", "1", 16), cost=StepCost((5e6, 3e5, 20, 1e5, 0))
        )
        self.now_ns = 0
        self.waits: dict[str, float] = {}  # longest of each admitted request, s
        self.tokens = dict.fromkeys(limits.classes, 0)
        self.live: dict[str, RequestSpec] = {}
        self.output: dict[str, list[int]] = {}
        self.served_ns: dict[str, int] = {}
        self.refused: list[Refused] = []
        self._step_s = step_s
        self._stops = stops

    def submit(self, spec: RequestSpec) -> bool:
        answer = self.scheduler.submit(spec, self.now_ns)
        if isinstance(answer, Accepted):
            self.live[spec.id] = spec
            self.output[spec.id] = list(spec.output)
            self.served_ns[spec.id] = self.now_ns - spec.waited_ns
        else:
            self.refused.append(answer)
        return isinstance(answer, Accepted)

    def turn(self) -> None:
        """One step, or a moment of nothing."""
        plan = self.scheduler.plan(self.now_ns)
        if plan is None:
            assert not self.live, "nothing is planned though somebody waits"
            self.now_ns += SECOND // 10
            return
        for part in plan.slices:
            self._wait_ends(part.id)
        took_ns = int(self._step_s(plan) * SECOND)
        self.now_ns += took_ns
        tokens = [STOP if self._stops(part.id) else 2 for part in plan.slices if part.sample]
        self.hear(self.scheduler.apply(StepResult(plan.step, tokens, busy_ns=took_ns), self.now_ns))

    def _wait_ends(self, id: str) -> None:
        waited_s = (self.now_ns - self.served_ns[id]) / SECOND
        self.waits[id] = max(self.waits.get(id, 0.0), waited_s)
        self.served_ns[id] = self.now_ns

    def hear(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Token):
                self.output[event.id].append(event.token)
                self.tokens[self.live[event.id].service_class] += 1
            elif isinstance(event, Ended):
                del self.live[event.id]

    def check_waits(self) -> None:
        for id, spec in self.live.items():
            waited_s = max(self.waits.get(id, 0.0), (self.now_ns - self.served_ns[id]) / SECOND)
            bound_s = CLASSES[spec.service_class].max_wait_s
            assert waited_s <= bound_s, f"{id} of class {spec.service_class} has waited {waited_s:.1f} s of {bound_s} s"


def requests(chance: random.Random, name: str, number: int) -> RequestSpec:
    prompt = chance.choice((3, 20, 100, 300) if name != "batch" else (20, 300, 700))
    return RequestSpec(
        id=f"{name}-{number}",
        prompt=tuple(chance.randrange(2, 100) for _ in range(prompt)),
        max_tokens=chance.choice((5, 50, 180)),
        stop_token_ids=(STOP,),
        service_class=name,
        tenant=chance.choice("abc"),
    )


@pytest.mark.parametrize("seed", range(4))
def test_nobody_waits_past_the_bound_of_its_class(seed: int) -> None:
    """Two simulated hours in which interactive requests alone are more than the replica can do."""
    chance = random.Random(seed)
    cap_s = 0.5
    step_s = chance.choice([lambda plan: cap_s, lambda plan: cap_s * chance.random(), lambda plan: 0.05])
    stop_rate = chance.choice((0.0, 0.02, 0.3))
    replica = Replica(limits(), step_s, lambda id: chance.random() < stop_rate)
    number = 0
    while replica.now_ns < 2 * 3600 * SECOND and replica.scheduler.view().step < 12_000:
        for name, rate in (("interactive", 1.2), ("standard", 0.2), ("batch", 0.05)):
            for _ in range(int(rate) + (chance.random() < rate % 1)):
                number += 1
                replica.submit(requests(chance, name, number))
        if chance.random() < 0.01 and replica.live:
            id = chance.choice(list(replica.live))
            replica.hear(replica.scheduler.abort(id, replica.now_ns))
        replica.turn()
        replica.check_waits()
    assert {refused.reason for refused in replica.refused} == {Refusal.WAITING_BOUND}
    assert all(refused.retry_after_ms > 0 for refused in replica.refused)
    served = {id.split("-")[0] for id in replica.waits}
    assert served == set(CLASSES), "every class was served though interactive load alone is too much"
    assert replica.scheduler.view().generation_tokens > 1000


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_holds_when_half_of_the_replicas_are_lost(seed: int) -> None:
    """What a replica promises leaves room for the requests of one that is lost: none of them is refused or late."""
    chance = random.Random(seed)

    def replica(share: float) -> Replica:
        return Replica(limits(admission_share=share), lambda plan: 0.3, lambda id: chance.random() < 0.02)

    pair = [replica(0.5), replica(0.5)]
    number = 0
    for turn in range(3000):
        for name, rate in (("interactive", 0.6), ("standard", 0.2), ("batch", 0.05)):
            if chance.random() < rate:
                number += 1
                pair[number % 2].submit(requests(chance, name, number))
        if turn == 1500:
            move(pair[0], pair[1])
            pair[0] = replica(0.0)
        for each in pair:
            each.turn()
            each.check_waits()


def move(lost: Replica, survivor: Replica) -> None:
    """As a gateway does: the prompt, what was delivered, and how long the client has waited, noticed 3 s later."""
    for id, spec in list(lost.live.items()):
        waited_ns = lost.now_ns - lost.served_ns[id] + 3 * SECOND
        moved = RequestSpec(
            id=id + ".2",
            prompt=spec.prompt,
            output=tuple(lost.output[id]),
            max_tokens=spec.max_tokens,
            stop_token_ids=spec.stop_token_ids,
            service_class=spec.service_class,
            tenant=spec.tenant,
            waited_ns=waited_ns,
        )
        assert survivor.submit(moved), survivor.refused[-1]


def test_batch_work_gets_what_an_empty_system_would_give_when_the_peak_is_over() -> None:
    def tokens_per_s(peaks: bool) -> float:
        """Of batch requests, while none of another class is here; every other minute interactive load saturates the
        replica, or never."""
        chance, sizes = random.Random(1), random.Random(2)
        replica = Replica(limits(num_blocks=400), lambda plan: max(0.02, plan.predicted_ns / SECOND), lambda id: False)
        number, tokens, time_ns = 0, 0, 0
        while replica.now_ns < 600 * SECOND:
            if sum(spec.service_class == "batch" for spec in replica.live.values()) < 20:
                number += 1
                replica.submit(requests(sizes, "batch", number))
            if peaks and replica.now_ns // (60 * SECOND) % 2 == 0 and chance.random() < 0.5:
                number += 1
                replica.submit(requests(chance, "interactive", number))
            alone = all(spec.service_class == "batch" for spec in replica.live.values())
            before, began_ns = replica.tokens["batch"], replica.now_ns
            replica.turn()
            tokens += (replica.tokens["batch"] - before) * alone
            time_ns += (replica.now_ns - began_ns) * alone
        assert time_ns > 100 * SECOND
        return tokens / time_ns * SECOND

    assert tokens_per_s(peaks=True) >= 0.9 * tokens_per_s(peaks=False)


def test_a_promise_is_given_back() -> None:
    replica = Replica(limits(), lambda plan: 0.1, lambda id: False)
    chance = random.Random(0)
    while replica.submit(requests(chance, "interactive", len(replica.live))):
        pass
    for _ in range(3000):
        replica.turn()
    assert not replica.live and replica.scheduler.view().num_waiting == 0
    replica.scheduler.check()
    assert replica.submit(requests(chance, "interactive", 1000))


def test_a_bound_that_steps_cannot_keep_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"classes\.standard\.max_wait_s is 3; with steps of up to 500 ms it must be"):
        limits(classes={"standard": ServiceClass(rank=0, max_wait_s=3)})
