"""The small decisions, one table each: who is next in line, who is preempted, how much of a step one gets."""

from __future__ import annotations

import random

import pytest

from shoal.core import victims
from shoal.core.classes import DEFAULT_CLASSES
from shoal.core.compose import Room, split
from shoal.core.kv.prefix import Chain
from shoal.core.limits import Limits
from shoal.core.plan import Slice
from shoal.core.progress import Request, State
from shoal.core.request import RequestSpec
from shoal.core.stepcost import StepCost
from shoal.core.urgency import Hurry, Leeway
from shoal.core.waiting import FirstComeLine

MS = 10**6
PER_TOKEN = StepCost((0, 1e6, 0, 0, 0))  # 1 ms a token


def request(id: str, arrival: int, priority: int = 0, prompt: int = 4, blocks: int = 2, scheduled: int = 4) -> Request:
    made = Request(
        RequestSpec(id=id, prompt=(1,) * prompt, max_tokens=9, priority=priority),
        arrival,
        Chain(b""),
        None,
        DEFAULT_CLASSES["standard"],
    )
    made.blocks = list(range(arrival * 100, arrival * 100 + blocks))
    made.scheduled = scheduled
    return made


def left(request: Request) -> int:
    """All have as much to come."""
    return 1


def limits(**more: int) -> Limits:
    return Limits(
        num_blocks=100, max_model_len=1000, vocab_size=10, **({"max_step_ns": 10**10, "composer": "fcfs"} | more)
    )


def test_the_line_is_priority_then_arrival_and_may_lose_whom_it_just_showed() -> None:
    line = FirstComeLine()
    for each in (request("a", 3), request("b", 1, 2), request("c", 2), request("d", 4, -1)):
        line.add(each)
    assert [each.id for each in line] == ["d", "c", "a", "b"] and line.num_tokens == 16
    seen = []
    for each in line:
        seen.append(each.id)
        if each.id in ("d", "a"):
            line.remove(each)
    assert seen == ["d", "c", "a", "b"] and [each.id for each in line] == ["c", "b"] and line.num_tokens == 8


@pytest.mark.parametrize(
    ("growing", "num_blocks", "chosen"),
    [
        (["a", "b", "c"], 3, []),
        (["a", "b", "c"], 2, ["lo"]),  # gives 2 blocks: enough
        (["a", "b", "c"], 0, ["lo", "c"]),  # then 2 need one each, and have 4
        (["a", "b", "lo"], 2, ["lo"]),
        (["a"], 0, ["lo"]),
    ],
)
def test_for_growth_the_last_arrival_of_the_lowest_priority_goes_first(
    growing: list[str], num_blocks: int, chosen: list[str]
) -> None:
    running = {each.id: each for each in (request("lo", 0, 7), request("a", 1), request("b", 2), request("c", 3))}
    found = victims.for_growth([running[id] for id in growing], running.values(), num_blocks, len, left)
    assert [each.id for each in found] == chosen


def test_for_growth_the_first_in_order_and_those_at_their_end_stay() -> None:
    first, second, ending = request("a", 1), request("b", 2), request("c", 3, scheduled=12)
    assert ending.scheduled == ending.final
    running = [first, second, ending]
    assert victims.for_growth(running, running, 0, lambda table: 0, left) == [second]


@pytest.mark.parametrize(
    ("num_slots", "num_blocks", "chosen"),
    [
        (0, 0, []),
        (1, 0, ["b"]),  # the least urgent, newest
        (2, 0, ["b", "a"]),
        (0, 3, ["b"]),  # two blocks and the one kept for its growth
        (0, 7, []),  # not even both are enough, so nobody goes
        (3, 0, []),  # c is as urgent
    ],
)
def test_for_urgent_only_less_urgent_ones_go_and_only_if_that_is_enough(
    num_slots: int, num_blocks: int, chosen: list[str]
) -> None:
    running = [request("a", 1, 5), request("b", 2, 5), request("c", 3, 1)]
    candidates = victims.InOrder({(1, 5): running[:2], (1, 1): running[2:]}, left)
    found = victims.for_urgent(request("h", 4, 1), candidates, num_slots, num_blocks, len)
    assert [each.id for each in found] == chosen


@pytest.mark.parametrize("seed", range(20))
def test_the_least_urgent_and_of_these_the_longest_go_first_and_few_are_predicted(seed: int) -> None:
    chance = random.Random(seed)
    running = [request(f"r{number}", number, chance.randrange(3)) for number in range(60)]
    for each in running:
        each.state, each.limit = State.RUNNING, each.known + chance.randrange(30)
    asked: list[Request] = []
    longest = {each: min(each.limit - each.known, chance.choice((2, 20, 30))) for each in running}

    def remaining(each: Request) -> int:
        asked.append(each)
        return longest[each]

    expected = sorted(running, key=lambda each: (each.urgency, longest[each], each.arrival), reverse=True)
    assert list(victims.in_order(running, remaining)) == expected
    asked.clear()
    groups = {(1, priority): [each for each in running if each.spec.priority == priority] for priority in range(3)}
    candidates = victims.InOrder(groups, remaining)
    first = next(candidates.behind((1, 1)))
    assert first is expected[0] and 2 * len(asked) < len(groups[1, 2]), "those that cannot be the longest are not asked"
    first.state = State.WAITING
    left = [each for each in expected if each.spec.priority == 2]
    assert list(candidates.behind((1, 1))) == left[1:] and len(asked) == len(left)


def test_split() -> None:
    fresh = request("fresh", 1, prompt=4, scheduled=0)
    decoding = request("decoding", 2)
    decoding.known = 5
    last = request("last", 3, scheduled=12)  # its last token is planned
    last.known = 13
    assert [[each.id for each in part] for part in split([fresh, decoding, last])] == [["decoding"], ["fresh"]]


def test_room_counts_what_the_cost_model_sees() -> None:
    room = Room(limits(max_prefill_chunk=512), PER_TOKEN)
    room.add(2, known=10 + 20)
    assert room.chunk(5, 7, room.max_ns) == 7
    room.add_chunk(5, 7)
    assert room.chunk(0, 600, room.max_ns) == 512, "the chunk's cap, so nothing is sampled"
    room.add_chunk(0, 512)
    slices = [Slice("a", 9, 1, (), -1, True), Slice("b", 19, 1, (), -1, True), Slice("c", 5, 7, (), -1, True)]
    assert room.features == StepCost.features([*slices, Slice("d", 0, 512, (), -1, False)])


@pytest.mark.parametrize(
    ("more", "need", "granted"),
    [
        ({"max_num_batched_tokens": 20}, 50, 18),  # two are taken
        ({"max_prefill_chunk": 8}, 50, 8),
        ({"max_prefill_chunk": 0}, 900, 900),
        ({"max_step_ns": 10_000_000}, 50, 8),
        ({"max_step_ns": 10_000_000}, 8, 8),
        ({"max_step_ns": 2_000_000}, 50, 0),
        ({"max_num_batched_tokens": 2}, 50, 0),
    ],
)
def test_a_chunk_is_cut_to_budget_cap_and_time(more: dict[str, int], need: int, granted: int) -> None:
    room = Room(limits(**more), PER_TOKEN)
    room.add(2, known=4 + 4)
    assert room.chunk(0, need, room.max_ns) == granted
    assert room.num_tokens == 2


def test_the_largest_chunk_that_fits_is_found() -> None:
    cost = StepCost((3e6, 1e5, 700.0, 2e5, 9e5))
    for start in (0, 17, 900):
        for need in (1, 40, 511):
            room = Room(limits(max_step_ns=20_000_000), cost)
            granted = room.chunk(start, need, room.max_ns)
            fits = [n for n in range(1, need + 1) if cost.predict(_one(start, n, n == need)) <= 20_000_000]
            assert granted == max(fits, default=1)


def _one(start: int, count: int, sample: bool) -> tuple[int, ...]:
    return StepCost.features([Slice("a", start, count, (), -1, sample)])


@pytest.mark.parametrize(("max_step_ns", "fit"), [(10_000_000, 4), (3_000_000, 3), (500_000, 1)])
def test_how_many_decodes_fit(max_step_ns: int, fit: int) -> None:
    room = Room(limits(max_step_ns=max_step_ns), PER_TOKEN)
    assert room.fit([request(id, 1) for id in "abcd"], room.max_ns) == fit
    assert room.fit([], room.max_ns) == 0


def test_where_one_token_takes_longer_than_the_limit_a_step_may_take_a_quarter_more() -> None:
    slow = StepCost((600e6, 0, 0, 10e6, 0))  # 600 ms whatever the step does, and 10 ms a request
    room = Room(limits(max_step_ns=500_000_000), slow)
    assert room.fit([request(str(number), number) for number in range(30)], room.max_ns) == 16


def test_the_first_slice_gets_one_token_whatever_that_takes() -> None:
    far = StepCost((0, 0, 1e6, 0, 0))  # 1 ms for each token attended to
    room = Room(limits(max_step_ns=1_000_000), far)
    assert room.chunk(1000, 5, room.max_ns) == 1
    room.add_chunk(1000, 1)
    assert room.chunk(0, 5, room.max_ns) == 0


@pytest.mark.parametrize(
    ("due_ms", "limit_ms"),
    [
        (1, 12),  # the urgent prompt is late: not longer than the decodes take
        (30, 30),  # it may take until its first token is due
        (900, 50),
    ],
)
def test_a_less_urgent_chunk_leaves_the_time_of_a_more_urgent_one_alone(due_ms: int, limit_ms: int) -> None:
    leeway = Leeway([], Hurry(), 0, decodes_ns=12 * MS, max_ns=50 * MS)
    urgent = request("urgent", 1)
    urgent.service, urgent.token_due_ns = DEFAULT_CLASSES["interactive"], due_ms * MS
    leeway.leave_to([urgent, request("other", 2)])
    assert leeway.limit_ns(DEFAULT_CLASSES["standard"].rank) == limit_ms * MS
    assert leeway.limit_ns(urgent.service.rank) == 50 * MS
