"""A client request's life: the seam is exact over all its replicas, it ends once, and it starts over only while nothing
came back."""

from __future__ import annotations

import random

import pytest

from shoal.core.request import Finish, Refusal
from shoal.fleet.stream import (
    MAX_ATTEMPTS,
    MAX_REPLAYS,
    TRANSITIONS,
    Deliver,
    Ended,
    Failed,
    Phase,
    RetryBudget,
    SendAgain,
    Stream,
    Withdraw,
)

STOP = (Finish.STOP, 9, 0, "")
LENGTH = (Finish.LENGTH, None, 0, "")


def sent(num_choices: int = 1, budget: RetryBudget | None = None) -> Stream:
    stream = Stream(num_choices, budget or RetryBudget())
    stream.sent("a")
    return stream


def test_tokens_are_delivered_and_the_stop_token_is_marked_as_silent() -> None:
    stream = sent()
    assert stream.update(0, 0, (5, 6)) == [Deliver(0, (5, 6), (), 0)]
    assert stream.update(0, 2, (7, 9), (), STOP) == [Deliver(0, (7, 9), (), 1), Ended(0, Finish.STOP, 0)]
    assert stream.phase is Phase.ENDED


def test_the_request_ends_with_its_last_choice() -> None:
    stream = sent(2)
    stream.update(1, 0, (5,), (), LENGTH)
    assert not stream.over
    stream.update(0, 0, (5,), (), LENGTH)
    assert stream.phase is Phase.ENDED


@pytest.mark.parametrize("index", [0, 2, 7])
def test_a_gap_or_a_repeat_fails_the_request_and_withdraws_all_of_it(index: int) -> None:
    stream = sent(2)
    stream.update(0, 0, (5,))
    assert stream.update(0, index, (6,)) == [
        Withdraw((0, 1)),
        Failed("seam_broken", f"token 1 was due and {index} came"),
    ]


def test_logprobs_must_be_as_many_as_tokens() -> None:
    assert isinstance(sent().update(0, 0, (5, 6), ("one",))[-1], Failed)


def test_a_stop_token_that_is_not_the_last_token_is_a_broken_seam() -> None:
    assert sent().update(0, 0, (9, 5), (), STOP)[-1] == Failed("seam_broken", "the stop token is not the last token")
    assert isinstance(sent().update(0, 0, (), (), STOP)[-1], Failed)


def test_prompt_scores_must_be_gapless_and_commit_the_request() -> None:
    stream = sent()
    assert stream.scored(1, 3) == []
    assert stream.phase is Phase.STREAMING
    assert stream.scored(4, 1) == []
    assert isinstance(stream.scored(4, 1)[-1], Failed)


@pytest.mark.parametrize("finish", [Finish.ABORT, Finish.ERROR])
def test_an_ending_that_is_none_is_a_loss_and_all_choices_go_on_elsewhere(finish: Finish) -> None:
    stream = sent(3)
    effects = stream.update(1, 0, (5,), (), (finish, None, 0, "why"))
    assert effects == [Deliver(1, (5,), (), 0), Withdraw((0, 1, 2)), SendAgain(0, frozenset({"a"}))]
    stream.sent("b")
    assert stream.update(1, 1, (6,), (), LENGTH)[0] == Deliver(1, (6,), (), 0)


def test_lost_before_anything_came_back_it_is_sent_again_elsewhere_twice_at_most() -> None:
    stream = sent()
    assert stream.lost("replica_lost", "gone") == [Withdraw((0,)), SendAgain(50, frozenset({"a"}))]
    stream.sent("b")
    assert stream.lost("replica_lost", "gone") == [Withdraw((0,)), SendAgain(100, frozenset({"a", "b"}))]
    stream.sent("a")
    assert stream.attempt == MAX_ATTEMPTS
    assert stream.lost("replica_lost", "gone") == [Withdraw((0,)), Failed("replica_lost", "gone")]


def test_lost_in_the_middle_it_goes_on_behind_what_was_delivered() -> None:
    stream = sent(2)
    stream.update(0, 0, (5, 6))
    stream.update(1, 0, (7,), (), LENGTH)
    assert stream.lost("replica_lost", "gone") == [Withdraw((0,)), SendAgain(0, frozenset({"a"}))]
    assert (stream.delivered(0), stream.open_choices()) == ([5, 6], (0,))
    stream.sent("b")
    assert stream.update(0, 2, (8,), (), LENGTH) == [Deliver(0, (8,), (), 0), Ended(0, Finish.LENGTH, 0)]


def test_a_stream_is_replayed_so_often_and_no_budget_is_asked() -> None:
    budget = RetryBudget()
    while budget.take():
        pass
    stream = sent(budget=budget)
    stream.update(0, 0, (5,))
    waits = []
    for _ in range(MAX_REPLAYS):
        (again,) = [each for each in stream.lost("replica_lost", "gone") if isinstance(each, SendAgain)]
        waits.append(again.wait_ms)
        stream.sent("b")
    assert waits == [0, 200, 400]
    assert stream.lost("replica_lost", "gone")[-1] == Failed("replica_lost", "gone")


def test_where_nobody_is_left_the_client_hears_of_the_loss() -> None:
    stream = sent()
    stream.update(0, 0, (5,))
    stream.lost("replica_lost", "gone")
    assert stream.unplaced("no_replica", "none") == [Failed("replica_lost", "gone")]
    assert Stream(1, RetryBudget()).unplaced("no_replica", "none") == [Failed("no_replica", "none")]


def test_a_replay_that_is_refused_for_now_is_tried_elsewhere() -> None:
    for reason in (Refusal.DRAINING, Refusal.QUEUE_FULL, Refusal.WAITING_BOUND):
        stream = sent()
        stream.update(0, 0, (5,))
        stream.lost("replica_lost", "gone")
        stream.sent("b")
        assert isinstance(stream.refused(reason, "full")[-1], SendAgain)
        stream.sent("c")
        assert isinstance(stream.refused(Refusal.KV_POOL, "too large")[-1], Failed)


def test_a_migration_withdraws_what_is_open_and_is_no_loss() -> None:
    stream = sent(2)
    assert stream.migrated() == []  # nothing came back: it can as well start over
    stream.update(0, 0, (5,), (), LENGTH)
    for _ in range(2 * MAX_REPLAYS):
        stream.update(1, len(stream.delivered(1)), (6,))
        assert stream.migrated() == [Withdraw((1,))]
        assert stream.migrated() == []
        stream.sent("b")
    assert isinstance(stream.lost("replica_lost", "gone")[-1], SendAgain)


def test_scores_of_a_prompt_come_anew_until_the_first_token() -> None:
    stream = sent()
    stream.scored(1, 3)
    assert isinstance(stream.lost("replica_lost", "gone")[-1], SendAgain)
    stream.sent("b")
    assert stream.scored(1, 5) == []
    stream.update(0, 0, (5,))
    stream.lost("replica_lost", "gone")
    stream.sent("c")
    assert isinstance(stream.scored(1, 5)[-1], Failed)


def test_a_draining_replica_is_like_a_lost_one_and_a_full_one_is_final() -> None:
    assert isinstance(sent().refused(Refusal.DRAINING, "")[-1], SendAgain)
    assert sent(2).refused(Refusal.QUEUE_FULL, "full") == [Withdraw((0, 1)), Failed("queue_full", "full")]


def test_enough_withdraws_one_choice_and_its_late_tokens_are_ignored() -> None:
    stream = sent(2)
    stream.update(0, 0, (5,))
    assert stream.enough(0) == [Withdraw((0,))]
    assert stream.enough(0) == []
    assert stream.update(0, 1, (6,), (), LENGTH) == []
    assert stream.update(1, 0, (6,), (), LENGTH)[-1] == Ended(1, Finish.LENGTH, 0)
    assert stream.phase is Phase.ENDED


def test_cancel_withdraws_what_is_open_and_fails_nobody() -> None:
    stream = sent(2)
    stream.update(1, 0, (5,), (), LENGTH)
    assert stream.cancel() == [Withdraw((0,))]
    assert stream.cancel() == []
    waiting = sent()
    waiting.lost("replica_lost", "gone")
    assert waiting.cancel() == []
    assert waiting.unplaced("no_replica", "none") == []


def test_retries_stay_within_a_fifth_of_the_requests_and_three() -> None:
    budget = RetryBudget()
    num_retries = 0
    for number in range(1, 201):
        budget.request()
        stream = sent(budget=budget)
        while isinstance(stream.lost("replica_lost", "gone")[-1], SendAgain):
            num_retries += 1
            assert num_retries <= 0.2 * number + 3
            stream.sent("a")
    assert num_retries > 30


def test_random_histories_end_once_and_deliver_every_token_once() -> None:
    """500 seeds: whatever comes, no transition is illegal and the delivered indices are 0, 1, 2 …"""
    for seed in range(500):
        rng = random.Random(seed)
        num_choices = rng.randint(1, 3)
        stream = Stream(num_choices, RetryBudget())
        delivered = [0] * num_choices
        endings, failures = [0] * num_choices, 0
        for _ in range(40):
            if stream.phase is Phase.WAITING:
                stream.sent(rng.choice("ab"))
            choice = rng.randrange(num_choices)
            index = delivered[choice] if rng.random() < 0.95 else rng.randrange(9)
            match rng.randrange(13):
                case 0:
                    effects = stream.lost("replica_lost", "")
                case 1:
                    effects = stream.enough(choice)
                case 2:
                    effects = stream.refused(rng.choice(list(Refusal)), "")
                case 3:
                    effects = stream.cancel()
                case 4:
                    effects = stream.migrated()
                case _:
                    tokens = tuple(rng.choices(range(10), k=rng.randrange(4)))
                    ending = rng.choice([None, None, None, LENGTH, (Finish.ERROR, None, 0, "")])
                    effects = stream.update(choice, index, tokens, (), ending)
            for effect in effects:
                if isinstance(effect, Deliver):
                    assert index == delivered[effect.choice]
                    delivered[effect.choice] += len(effect.tokens)
                elif isinstance(effect, Ended):
                    endings[effect.choice] += 1
                elif isinstance(effect, Failed):
                    failures += 1
            assert failures <= 1
            assert max(endings) <= 1
            assert (failures == 0) or stream.phase is Phase.FAILED


def test_every_phase_has_its_transitions() -> None:
    assert set(TRANSITIONS) == set(Phase)
