"""The plan of degradation: what is given up first as the load grows, and when it comes back."""

from __future__ import annotations

import pytest

from tokenmill.cluster.request_queue import Plan, Pressure


def told(pressure: Pressure, priority_class: int, need: float, now: float, num: int = 60) -> None:
    for _ in range(num):
        pressure.note(priority_class, need, now)


def test_answers_are_shortened_before_anybody_is_turned_away() -> None:
    """Level 1 at seven tenths of what can be served, level 2 at all of it; lower classes go first, equal ones stay."""
    pressure = Pressure()
    assert pressure.level(0.0) == 0
    told(pressure, 1, 0.8, 0.0)
    assert pressure.level(0.0) == 1 and pressure.shed_s(2, 0.0) == 0.0
    told(pressure, 1, 1.4, 0.0)
    assert pressure.level(0.0) == 2
    assert [pressure.shed_s(each, 0.0) > 0 for each in range(3)] == [False, False, True]


def test_a_level_is_left_well_below_where_it_was_entered() -> None:
    """A need that swings around the bound does not make the level swing."""
    pressure = Pressure(Plan(shorten_at=0.7, shed_at=1.0, relief=0.7))
    told(pressure, 0, 1.2, 0.0)
    seen = []
    for turn in range(40):
        told(pressure, 0, 0.9 if turn % 2 else 1.1, 0.0, num=8)
        seen.append(pressure.level(0.0))
    assert set(seen) == {2}
    told(pressure, 0, 0.6, 0.0)
    assert pressure.level(0.0) == 1, "shedding has ended, shortening has not: it goes on down to 0.49"
    told(pressure, 0, 0.4, 0.0)
    assert pressure.level(0.0) == 0


def test_pressure_fades_when_nobody_comes_and_the_time_told_is_when_it_has() -> None:
    """Who is turned away for a better class may come back at the time that it was told."""
    pressure = Pressure()
    told(pressure, 0, 1.5, 0.0)
    left_s = pressure.shed_s(1, 0.0)
    assert left_s > 1.0
    assert pressure.shed_s(1, left_s * 0.9) == pytest.approx(left_s * 0.1, rel=0.05)
    assert pressure.shed_s(1, left_s * 1.01) == 0.0 and pressure.mean(0, 100.0) < 1e-6


def test_one_call_alone_changes_nothing() -> None:
    pressure = Pressure()
    pressure.note(1, 2.0, 0.0)
    assert pressure.level(0.0) == 0
