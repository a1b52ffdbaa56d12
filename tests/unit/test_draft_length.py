"""How many tokens a model drafts: as many as make the most tokens a second, by what steps have taken."""

from __future__ import annotations

import pytest

from tokenmill.worker.draft_length import DraftLength


def best(length: DraftLength, chance: float, *, num_rows: int = 1, most: int = 16) -> int:
    """Drafts of one sequence, all as likely."""
    costs, chances = length.costs(num_rows), [chance]
    while len(chances) < most and length.is_worth_more(costs, chances, most):
        chances.append(chance)
    return len(chances)


def measured(steps: dict[int, float], call_s: float, chance: float, num_rows: int = 1) -> DraftLength:
    length = DraftLength()
    for _ in range(60):
        for num_drafts, seconds in steps.items():
            length.note_step(num_rows, num_drafts * num_rows, seconds)
        length.note_call(num_rows, call_s, [chance] * num_rows)
    return length


def test_it_is_the_number_that_makes_most_tokens_a_second() -> None:
    """Four rows cost less than three: the drafter goes on past a number that does not pay."""
    rows = {0: 1.0, 1: 1.02, 2: 1.25, 3: 1.05, 4: 1.3, 5: 1.38, 6: 1.4}
    for chance in (0.94, 0.8, 0.5):
        rates = {
            num: sum(chance**place for place in range(num + 1)) / (seconds + 0.44 * num)
            for num, seconds in rows.items()
            if num
        }
        assert best(measured(rows, 0.44, chance), chance, most=6) == max(rates, key=rates.__getitem__)
    assert best(measured(rows, 0.44, 0.94), 0.94, most=6) == 3


def test_a_drafter_that_costs_nothing_goes_on_and_a_dear_one_does_not() -> None:
    rows = {0: 1.0, 4: 1.0, 8: 1.0}
    assert best(measured(rows, 0.001, 0.9), 0.9) == 16
    assert best(measured(rows, 0.9, 0.7), 0.7) == 1


@pytest.mark.parametrize("num_rows", [1, 4])
def test_what_delays_a_step_is_forgotten(num_rows: int) -> None:
    """And what nobody measures any more is tried again; each size of batches is known by itself."""
    rows = {0: 1.0, 3: 1.05, 6: 2.0}
    length = measured(rows, 0.3, 0.9, num_rows)
    usual = best(length, 0.9, num_rows=num_rows)
    length.note_step(num_rows, 3 * num_rows, 100.0)
    for _ in range(20):
        length.note_step(num_rows, 3 * num_rows, 1.05)
    assert usual == best(length, 0.9, num_rows=num_rows) == 3
    for _ in range(2000):
        length.note_step(num_rows, 3 * num_rows, 1.05)
    assert best(length, 0.9, num_rows=num_rows) > 3
    assert length.costs(16)[:2] == DraftLength().costs(16)[:2]
