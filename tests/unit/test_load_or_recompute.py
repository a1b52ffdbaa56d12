"""What a load takes and is worth, by example."""

from __future__ import annotations

from tokenmill.core.cost import Costs
from tokenmill.core.tiers import DISK, HOST, TIERS, TierFacts
from tokenmill.kv.connector.scheduler.load_or_recompute import Computing, Place, Rates, Run, Speed, best_run, ends

HOST_DIGIT, DISK_DIGIT = TIERS.index(HOST) + 1, TIERS.index(DISK) + 1
MILLION = 1_000_000


def load(rates: Rates, number: int, took_s: float, num_bytes: int = MILLION, came: int = -1) -> None:
    now = 100.0 * number
    rates.begin(number, DISK_DIGIT, num_bytes, now)
    rates.end(number, num_bytes if came < 0 else came, now + took_s)


def expected_s(rates: Rates, num_bytes: int = MILLION) -> float:
    return rates.latency_s(DISK_DIGIT) + num_bytes * rates.byte_s(DISK_DIGIT)


def test_what_a_tier_takes_is_learnt_from_its_loads() -> None:
    """Slow ones at once, within a few loads even where the facts were wrong by hundreds; fast ones after some more."""
    rates = Rates((TierFacts(DISK, 0, 0.001, 1e9),))
    assert abs(expected_s(rates) - 0.002) < 1e-9
    for number in range(1, 6):
        load(rates, number, 1.0)
    assert 0.5 < expected_s(rates) < 2.0
    for number in range(6, 40):
        load(rates, number, 0.002)
    assert expected_s(rates) < 0.004


def test_a_load_that_ran_out_of_time_is_slow_and_one_that_missed_is_not_fast() -> None:
    rates = Rates((TierFacts(DISK, 0, 0.01, 1e8),))
    before = expected_s(rates)
    load(rates, 1, 0.0001, came=0)
    assert expected_s(rates) == before
    load(rates, 2, 1.0, came=10)
    assert expected_s(rates) > 5 * before


def test_a_slow_tier_is_tried_again_after_hundreds_of_refusals() -> None:
    rates = Rates((TierFacts(DISK, 0, 0.1, 1e6),))
    before = expected_s(rates)
    for _ in range(100):
        rates.relax([DISK_DIGIT, 0, -1], 0.0)
    assert 0.6 * before < expected_s(rates) < 0.8 * before
    assert rates.latency_s(HOST_DIGIT) == Rates(()).latency_s(HOST_DIGIT)


def test_a_tier_that_hung_is_tried_again_within_seconds() -> None:
    """One that is slow for good, from the beginning or from then on, is known as that after a few loads."""
    rates = Rates((TierFacts(DISK, 0, 0.001, 1e9),))
    for number in range(1, 6):
        load(rates, number, 0.002)
    load(rates, 6, 4.0)
    hung = expected_s(rates)
    assert hung > 0.01
    rates.relax([DISK_DIGIT], 604.0 + 4.9)
    assert expected_s(rates) > 0.99 * hung
    rates.relax([DISK_DIGIT], 604.0 + 5.1)
    assert expected_s(rates) < 0.0021
    slow = Rates((TierFacts(DISK, 0, 0.001, 1e9),))
    for each in (rates, slow):
        for number in range(7, 13):
            load(each, number, 4.0)
        each.relax([DISK_DIGIT], 1300.0)
        assert expected_s(each) > 2.0


def test_a_hang_of_many_loads_is_forgotten_as_one_of_a_single_load() -> None:
    """Expectations rise with each of them; what they are compared with does not. Loads as before end it."""
    rates = Rates((TierFacts(DISK, 0, 0.001, 1e9),))
    for number in range(1, 6):
        load(rates, number, 0.010)
    usual = expected_s(rates)
    for number in range(6, 12):
        load(rates, number, 0.300)
    assert expected_s(rates) > 0.2
    rates.relax([DISK_DIGIT], 1100.3 + 5.1)
    assert expected_s(rates) < usual
    for number in range(12, 16):
        load(rates, number, 0.010)
    for number in range(16, 18):
        load(rates, number, 0.300)
    load(rates, 18, 0.010)
    slow = expected_s(rates)
    rates.relax([DISK_DIGIT], 1900.0)
    assert expected_s(rates) > 0.99 * slow


def test_loads_under_way_are_waited_for_by_the_next() -> None:
    rates = Rates((TierFacts(DISK, 0, 0.1, 1e6),))
    assert rates.begin(1, DISK_DIGIT, MILLION, 0.0) == 1.1
    assert abs(rates.latency_s(DISK_DIGIT) - 1.2) < 1e-9
    rates.end(1, MILLION, 1.1)
    assert abs(rates.latency_s(DISK_DIGIT) - 0.1) < 1e-9


def run(digits: list[int], load_s: list[float], **more: object) -> Run:
    """Blocks of 10 tokens, a millisecond each; load_s: of a block, by digit."""
    computing = Computing(Costs(token_s=0.001), 0, 10 * len(digits) + 1, 1000, 0.0, **more)
    return best_run([Place(digits, 1)], 0, 10, computing, Speed([0.0] * 3, load_s))


def test_a_run_is_cut_where_its_next_piece_does_not_pay() -> None:
    assert run([1] * 4 + [2] * 4, [0, 0.001, 0.02]).end == 4
    assert run([1] * 4 + [2] * 4, [0, 0.001, 0.002]).end == 8
    assert run([2] * 2 + [1] * 6, [0, 0.001, 0.02]).end == 8  # what is behind pays for both
    assert run([2] * 8, [0, 0.001, 0.02]) == Run(0)


def test_what_is_computed_first_hides_a_load() -> None:
    assert run([2] * 8, [0, 0.001, 0.02], ahead_s=0.2).end == 8


def test_a_run_ends_at_a_hole_unless_a_window_hides_it() -> None:
    digits = [1, 1, -1, 1, 1, 1]
    assert ends([Place(digits, 1)], 0) == [1, 2]
    assert ends([Place(digits, 1, [0, 0, 0, 1, 2, 3, 4])], 0) == [1, 2, 5, 6]
