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
            length.note_step(num_rows, num_drafts * num_rows, num_rows, seconds)
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
    length.note_step(num_rows, 3 * num_rows, num_rows, 100.0)
    for _ in range(20):
        length.note_step(num_rows, 3 * num_rows, num_rows, 1.05)
    assert usual == best(length, 0.9, num_rows=num_rows) == 3
    for _ in range(2000):
        length.note_step(num_rows, 3 * num_rows, num_rows, 1.05)
    assert best(length, 0.9, num_rows=num_rows) > 3
    assert length.costs(16)[:2] == DraftLength().costs(16)[:2]


def served(num_steps: int, drafter_s: float, gain: float, length: DraftLength | None = None) -> tuple[float, float]:
    """Steps of one row, of a second each, behind each of which a drafter is called where it pays. It takes so long, and
    has one token of the next step drafted, which is right so often and takes a tenth of a second. Seconds of all, and
    how many tokens came of them."""
    length = length or DraftLength()
    seconds = num_tokens = right = 0.0
    has_drafts = False
    for step in range(num_steps):
        step_s, tokens = 1.0, 1
        if has_drafts:
            step_s, right = 1.1, right + gain
            tokens += int(right)
            right -= int(right)
        length.note_share(step_s)
        length.note_step(1, int(has_drafts), tokens, step_s)
        has_drafts = length.pays and step > 0
        if has_drafts:
            length.note_spent(drafter_s, step_s, is_try=True)
            step_s += drafter_s
        seconds, num_tokens = seconds + step_s, num_tokens + tokens
    return seconds, num_tokens


@pytest.mark.parametrize(("drafter_s", "gain"), [(0.13, 0.0), (0.13, 0.2), (2.0, 0.9), (6.0, 1.0)])
def test_a_drafter_that_does_not_pay_costs_a_hundredth(drafter_s: float, gain: float) -> None:
    """Whatever it takes, and however often its drafts are right."""
    seconds, num_tokens = served(20_000, drafter_s, gain)
    assert 0.985 < num_tokens / seconds < 1.0


def test_a_drafter_that_pays_goes_on_and_one_that_begins_to_is_found() -> None:
    """A long prompt, which it took in before, holds it up no longer than it saves. What it saved it does not lose where
    it becomes worse."""
    length = DraftLength()
    length.note_spent(40.0, 20.0, is_try=False)
    seconds, num_tokens = served(1_000, 0.1, 0.6, length)
    assert num_tokens / seconds > 1.25
    before_s, before = served(3_000, 0.1, 0.0, length)
    assert before / before_s > 0.97
    seconds, num_tokens = served(10_000, 0.1, 0.6, length)
    assert num_tokens / seconds > 1.2
