"""Measured rates, and the waits that follow from them, against queues that can be worked out by hand."""

from __future__ import annotations

import math

import pytest

from tokenmill.cluster.forecast import Load, Rates, RetryAfter, Rows, predicted_wait
from tokenmill.cluster.request_queue import RequestQueue
from tokenmill.cluster.slots import Room
from tokenmill.core.cost import Costs
from tokenmill.core.errors import MAX_RETRY_S
from tokenmill.core.events import EngineStats
from tokenmill.core.policy import Newcomer
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.terms import Terms


def stats(num_steps: int, tokens: int, step_s: float, drawn: int = 0, **more: int) -> EngineStats:
    return EngineStats(
        num_steps=num_steps, last_step_tokens=tokens, last_step_s=step_s, generation_tokens=drawn, **more
    )


def test_what_a_prompt_token_takes_follows_from_the_costs_of_steps() -> None:
    """Nothing is known without them; a full step of prompts is shared by its tokens."""
    rates = Rates(64, 500)
    rates.note_step(stats(1, 20, 0.05))
    assert rates.token_s == 0 and rates.step_s == 0.05
    rates.note_step(stats(2, 500, 0.1)._replace(costs=Costs(step_s=0.05, token_s=0.0002)))
    assert rates.token_s == pytest.approx(0.0003)


def test_steps_that_leave_prompts_behind_tell_how_much_of_them_a_step_takes() -> None:
    """Tokens that were drawn are none of prompts; a step with room for more says nothing; nor do two in one message."""
    rates = Rates(64, 500)
    rates.note_step(stats(1, 300, 0.1))
    assert rates.room == 500
    for number in range(2, 200):
        rates.note_step(stats(number, 300, 0.1, drawn=number * 50, num_prompt_left=900))
    assert rates.room == pytest.approx(250, rel=0.01)
    rates.note_step(stats(205, 20, 0.1, num_prompt_left=900))
    assert rates.room == pytest.approx(250, rel=0.01)


def test_rows_are_fewer_where_prompts_wait_beside_steps_with_room_for_them() -> None:
    rates = Rates(64, 500)
    for number in range(1, 4):
        rates.note_step(stats(number, 30, 0.01, num_waiting=5, num_running=12))
    assert rates.num_rows == 64, "they may just have come"
    rates.note_step(stats(4, 30, 0.01, num_waiting=5, num_running=12))
    assert rates.num_rows == 12
    rates.note_step(stats(5, 400, 0.1, num_waiting=5, num_running=14))
    assert rates.num_rows == 14
    rates.note_step(stats(6, 30, 0.01, num_running=14))
    assert rates.num_rows == 64


def test_steps_of_one_engine_say_nothing_of_what_waits_for_another() -> None:
    """Nor does KV that is on its way to an engine with room for it."""
    rates = Rates(64, 500)
    rates.resize(64, 500, num_engines=2)
    draws, arriving = stats(0, 0, 0.0), stats(0, 0, 0.0, num_waiting=1)._replace(kv_usage=0.2)
    for own in (draws, arriving, arriving._replace(kv_usage=0.8)):
        for number in range(1, 6):
            rates.note_step(stats(number, 5, 0.01, num_waiting=1, num_running=3), 1, own)
        assert rates.num_rows == (3 if own.kv_usage == 0.8 else 64)
        rates.note_step(stats(9, 5, 0.01), 1, draws)


def test_how_long_a_row_is_held_follows_from_how_answers_end() -> None:
    """Answers that all reach their limit take all of it; those that end early take the mean, however high the limit."""
    rates = Rates(64, 500)
    rates.note_step(stats(1, 30, 0.01))
    for _ in range(400):
        rates.note_end(100, "length")
    assert rates.hold_s(250) == pytest.approx(2.5, rel=0.01) and rates.hold_s(10) == pytest.approx(0.1, rel=0.01)
    for _ in range(400):
        rates.note_end(100, "stop")
    assert rates.hold_s(100_000) == pytest.approx(1.0, rel=0.02) and rates.hold_s(1) == pytest.approx(0.01)


def test_waits() -> None:
    """For prompt tokens ahead, for the row that comes free in time, for whole turns of all rows, for what passes."""
    free = Rows(4, 3)
    assert predicted_wait(Load(1.0, (free,))) == 1.0
    assert predicted_wait(Load(0.0, (Rows(4, 4, (), 0.0, 2.0),))) == 2.0
    ends = (3.0, 1.0, 2.0)
    assert [round(Rows(3, ahead, ends, 0.0, 10.0).wait_s, 3) for ahead in range(5)] == [1.0, 2.0, 3.0, 11.0, 12.0]
    assert predicted_wait(Load(1.5, (free, Rows(3, 0, ends)))) == 1.5
    early = Rows(10, 0, (1000.0,) * 10, hazard=0.1)
    assert early.wait_s == pytest.approx(0.5, rel=0.05), (
        "of ten that end at random after 10 s, the first does after 1 s"
    )
    passing = [(2.0, 0.25), (100.0, 0.25)]
    assert predicted_wait(Load(4.0, (free,), passing)) == pytest.approx(6.0, rel=0.01)


def test_those_who_are_refused_come_back_one_after_another_and_are_forgotten_in_time() -> None:
    """Each is given two fifths of the room; none is counted on after a while in which all came and none was refused."""
    retry_after = RetryAfter()
    assert [retry_after.tell(100.0, 3.0, 1, 0.4) for _ in range(4)] == pytest.approx([3.0, 4.0, 5.0, 6.0])
    assert retry_after.tell(105.0, 3.0, 1, 0.4) == pytest.approx(3 + 4 * math.exp(-5 / 120))
    assert retry_after.tell(120.0, 1.0, 1, 0.4) == pytest.approx(1.0)


def test_the_room_for_returns_is_what_was_served_while_others_were_refused() -> None:
    """A call a second is let in, though each was thought to take a tenth of that."""
    retry_after = RetryAfter()
    for second in range(20):
        retry_after.enter(1)
        before_s = retry_after.tell(float(second), 0.0, 1, 0.1)
    assert retry_after.tell(20.0, 0.0, 1, 0.1) - before_s == pytest.approx(2.5 - before_s / 120, rel=0.1)


def test_steps_that_targets_keep_short_measure_a_deep_queue() -> None:
    """A forecast counts however much is ahead, though no step ever was as long as the engine's settings allow."""
    request_queue = RequestQueue()
    request_queue.share(Room(16, 2048))
    costs, terms = Costs(0.01, 0.0, 0.0005), Terms(ttft_s=60.0, tpot_s=0.1)
    for number in range(1, 101):
        stats = EngineStats(
            num_steps=number, last_step_tokens=150, last_step_s=0.085, num_prompt_left=5000, num_waiting=9, costs=costs
        )
        request_queue.step(stats, 0.085 * number)
    for number in range(40):
        request = Request(f"r{number}", (7,) * 400, SamplingParams(), 4, 0, terms=terms, arrival_s=8.9)
        request_queue.join([request], "me")
    seen = request_queue.forecast(Newcomer("me", 0, 400, 1, 400, terms), 9.0)
    assert seen.ttft_s > 5.0, seen


def test_those_refused_in_a_long_overload_are_spread_over_the_times_that_may_be_told() -> None:
    """None is told more than clients accept, and not many the same; when it is over, little is told again soon."""
    retry_after = RetryAfter()
    told = []
    for tenth in range(6000):
        if tenth % 10 == 0:
            retry_after.enter(1)
        told.append(retry_after.tell(tenth / 10, 20.0, 1, 0.1))
    late = told[1200:]
    assert max(told) <= MAX_RETRY_S and min(late) >= MAX_RETRY_S / 2
    at_s = [int(number / 10 + told_s) // 10 for number, told_s in enumerate(told)]
    assert max(at_s.count(each) for each in {*at_s}) < 3 * 10 * 10
    assert retry_after.tell(720.0, 1.0, 1, 0.1) < 60.0
    assert retry_after.tell(721.0, 400.0, 1, 0.1) <= MAX_RETRY_S


def test_a_step_size_is_measured_once_several_such_steps_were_made() -> None:
    """Larger ones say what smaller ones cost, and a size counts for up to four times as many tokens."""
    rates = Rates(16, 576)
    rates.pace([(0.0, 0, 0.1, 100)] * 2)
    assert not rates.is_measured(100)
    rates.pace([(0.0, 0, 0.1, 70)])
    assert rates.is_measured(100) and rates.is_measured(20) and rates.is_measured(511)
    assert not rates.is_measured(512)
