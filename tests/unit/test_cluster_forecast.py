"""Forecasts, against steps that can be added up by hand."""

from __future__ import annotations

import random

import pytest

from tokenmill.cluster.forecast import Calibration, Forecast, Scene, forecast
from tokenmill.core.cost import UNKNOWN, Costs

FLAT = Costs(step_s=0.01, row_s=0.0, token_s=0.001)
"""A step takes 10 ms, and 1 ms for each token."""
ALONE = Scene(FLAT, num_own=100, usual=100, room=500, num_rows=64)


def test_without_costs_nothing_is_known() -> None:
    assert forecast(ALONE._replace(costs=UNKNOWN)) == Forecast()


def test_alone_a_prompt_takes_its_own_steps() -> None:
    """One step where it fits, several where it does not, after the end of the one under way."""
    assert forecast(ALONE).ttft_s == pytest.approx(0.11)
    assert forecast(ALONE._replace(num_own=1200)).ttft_s == pytest.approx(0.51 + 0.51 + 0.21)
    late = forecast(ALONE._replace(residual_s=0.03))
    assert (late.wait_s, late.ttft_s) == (0.03, pytest.approx(0.14))
    assert forecast(ALONE).tpot_s == pytest.approx(0.011)


def test_prompts_before_its_own_are_computed_first_and_draw_then() -> None:
    """A thousand tokens of ten prompts are two steps; the second has rows that draw, and so has its own."""
    seen = forecast(ALONE._replace(num_ahead=1000))
    assert seen.wait_s == pytest.approx(0.51 + 0.51 + 0.005)
    assert seen.ttft_s == pytest.approx(seen.wait_s + 0.01 + 0.1 + 0.01)
    assert seen.tpot_s == pytest.approx(0.01 + 0.011)


def test_a_rest_that_leaves_room_shares_a_step_with_its_prompt() -> None:
    seen = forecast(ALONE._replace(num_ahead=200))
    assert (seen.wait_s, seen.ttft_s) == (0.0, pytest.approx(0.01 + 0.3))


def test_rows_that_will_have_ended_by_then_do_not_slow_it() -> None:
    """The load counts as it will be, not as it is: of 30 rows that draw, 20 end before its step."""
    busy = ALONE._replace(num_ahead=1000, ends_s=(0.3,) * 20 + (90.0,) * 10)
    assert busy.rows_left(0.2) == 30 and busy.rows_left(1.0) == 10
    seen = forecast(busy)
    assert seen.wait_s == pytest.approx(0.54 + 0.51 + 0.01 + 0.005)
    early = busy._replace(hazard=1.0)
    assert early.rows_left(1.0) == pytest.approx(10 / 2.718, rel=0.01)


def test_a_long_queue_is_walked_in_leaps_to_nearly_the_same_time() -> None:
    """Ten thousand steps' worth takes what its tokens and steps take, within a hundredth."""
    queue = ALONE._replace(num_ahead=500.0 * 10_000, ends_s=())
    whole = forecast(queue._replace(usual=1e9)).wait_s
    assert whole == pytest.approx(0.51 * 10_000, rel=0.01)


def test_prompts_that_keep_coming_slow_every_token() -> None:
    """At half of the time, a token takes twice as long; never longer than full steps take."""
    free = forecast(ALONE).tpot_s
    assert forecast(ALONE._replace(inflow=490.0)).tpot_s == pytest.approx(2 * free, rel=0.06)
    assert forecast(ALONE._replace(inflow=1e9)).tpot_s == pytest.approx(min(10 * free, 0.511), rel=0.06)


def test_steps_are_sized_to_the_pace_of_those_that_draw() -> None:
    """Beside a row that wants a token every 61 ms, prompts get what fits nine tenths of that; one that is far ahead of
    its pace lends half of its lead; without such rows steps are full."""
    paced = ALONE._replace(num_own=350, pace_s=0.0601, ends_s=(9.0,), least=16)
    step_s = 0.011 + 0.043
    assert forecast(paced).ttft_s == pytest.approx(8 * step_s + 0.011 + 350 % 43 / 1000, rel=0.04)
    assert forecast(paced._replace(lead_s=5.0)).ttft_s == pytest.approx(0.361)
    assert forecast(paced._replace(ends_s=())).ttft_s == pytest.approx(0.36)
    assert forecast(paced._replace(pace_s=0.001)).ttft_s == pytest.approx(21 * 0.027 + 0.011 + 0.014)


def test_attention_to_what_came_before_is_counted() -> None:
    """A prompt of 1,000 attends to half a million positions, however it is cut."""
    costs = Costs(token_s=1e-9, position_s=1e-6)
    for room in (1000, 100):
        seen = forecast(ALONE._replace(costs=costs, room=room, num_own=1000))
        assert seen.ttft_s == pytest.approx(0.5, rel=0.06)


def test_the_margin_is_an_upper_quantile_of_errors_as_shares_of_the_target() -> None:
    """One in twenty is above it; what had no target does not count."""
    rng = random.Random(4)
    calibration, num_above = Calibration(), 0
    for number in range(4000):
        error_s = rng.uniform(-0.4, 0.4)
        num_above += number >= 1000 and error_s > 2.0 * calibration.margin
        calibration.note(1.0, 1.0 + error_s, 2.0)
    assert 0.04 < num_above / 3000 < 0.06
    before = calibration.margin
    calibration.note(0.5, 5.0)
    assert calibration.margin == before


def test_the_margin_is_bounded() -> None:
    calibration = Calibration()
    for took_s in (50.0, 0.05):
        for _ in range(500):
            calibration.note(1.0, took_s, 1.0)
        assert 0.0 < calibration.margin <= 0.5
