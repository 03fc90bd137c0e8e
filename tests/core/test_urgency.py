"""Token targets of several classes in one step: who waits for whom when not all of them can be in time."""

from __future__ import annotations

from shoal.core.classes import ServiceClass
from shoal.core.kv.hashing import root_key
from shoal.core.limits import Limits
from shoal.core.plan import StepResult
from shoal.core.request import RequestSpec
from shoal.core.scheduler import Scheduler
from shoal.core.stepcost import StepCost
from shoal.core.urgency import CATCH_UP, LEAST_SHARE, late_ns

MS = 1_000_000
BASE_MS, ROW_MS, TARGET_MS = 30, 6, 70  # eight rows take 78 ms


class Replica:
    """Each step takes exactly what is predicted."""

    def __init__(self) -> None:
        classes = {
            name: ServiceClass(rank=rank, weight=8 >> rank, ttft_ms=1000, tpot_ms=TARGET_MS, max_wait_s=600)
            for rank, name in enumerate(("interactive", "standard"))
        }
        self.limits = Limits(
            num_blocks=500, max_model_len=4096, vocab_size=100, max_num_seqs=16, classes=classes, max_step_ns=100 * MS
        )
        cost = StepCost((BASE_MS * MS, 0, 0, ROW_MS * MS, 0))
        self.scheduler = Scheduler(self.limits, hash_root=root_key("m", "float32", "1", 16), cost=cost)
        self.now_ns = 0
        self.token_ms: dict[str, list[int]] = {}

    def submit(self, id: str, service_class: str, max_tokens: int) -> None:
        spec = RequestSpec(id=id, prompt=(1, 2), max_tokens=max_tokens, service_class=service_class)
        self.scheduler.submit(spec, self.now_ns)
        self.token_ms[id] = []

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            plan = self.scheduler.plan(self.now_ns)
            assert plan is not None
            self.now_ns += plan.predicted_ns
            sampled = [part.id for part in plan.slices if part.sample]
            for id in sampled:
                self.token_ms[id].append(self.now_ns // MS)
            self.scheduler.apply(StepResult(plan.step, [7] * len(sampled), busy_ns=plan.predicted_ns), self.now_ns)

    def interval_ms(self, id: str) -> float:
        times = self.token_ms[id]
        return (times[-1] - times[0]) / (len(times) - 1)


def test_the_more_urgent_are_in_time_although_the_less_urgent_are_hopelessly_late() -> None:
    replica = Replica()
    for number in range(8):
        replica.submit(f"s{number}", "standard", 400)
    replica.run(40)
    assert replica.interval_ms("s0") > TARGET_MS, "all eight are late"
    replica.submit("i0", "interactive", 30)
    replica.run(40)
    assert len(replica.token_ms["i0"]) == 30
    assert replica.interval_ms("i0") <= TARGET_MS
    before = len(replica.token_ms["s0"])
    replica.run(40)
    assert len(replica.token_ms["s0"]) > before + 20, "and then the others go on"


def test_alone_in_their_class_the_late_keep_nobody_waiting() -> None:
    replica = Replica()
    for number in range(8):
        replica.submit(f"s{number}", "standard", 400)
    replica.run(40)
    assert {len(times) for times in replica.token_ms.values()} == {40}


def test_a_late_token_leaves_others_what_lets_it_catch_up_or_a_share_where_nothing_does() -> None:
    assert late_ns(36 * MS, 63 * MS) == int(CATCH_UP * 63 * MS)
    assert late_ns(20 * MS, 63 * MS) == int((1 + LEAST_SHARE) * 20 * MS), "a step is not made much longer than it is"
    assert late_ns(60 * MS, 63 * MS) == 60 * MS
    assert late_ns(64 * MS, 63 * MS) == int((1 + LEAST_SHARE) * 64 * MS), "it cannot catch up"
    assert late_ns(64 * MS, 0) == int((1 + LEAST_SHARE) * 64 * MS), "it has no target"
