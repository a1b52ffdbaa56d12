"""Virtual token counters, by example."""

from __future__ import annotations

from tokenmill.core.fairness import Shares


def backlogged(shares: Shares, name: str, weight: float = 1.0) -> None:
    shares.open(name, weight)
    shares.wait(name)


def test_who_comes_back_is_lifted_to_the_least_of_those_that_wait() -> None:
    """Service is not saved up by staying away, and what one has had beyond the others is not forgotten."""
    shares = Shares()
    for name in ("a", "b"):
        backlogged(shares, name)
    shares.charge("a", 100)
    shares.charge("b", 300)
    backlogged(shares, "new")
    assert [shares[name].served for name in ("a", "b", "new")] == [100, 300, 100]
    shares.stop_waiting("b")
    shares.wait("b")
    assert shares["b"].served == 300
    assert shares.debt("b", shares.least()) == 200 and shares.debt("new", shares.least()) == 0


def test_service_that_nobody_waited_for_puts_nobody_behind() -> None:
    """Where none waits, who comes first of all starts level with who has had most."""
    shares = Shares()
    backlogged(shares, "a")
    shares.stop_waiting("a")
    shares.charge("a", 10_000)
    backlogged(shares, "b")
    shares.wait("a")
    assert shares["a"].served == shares["b"].served == 10_000


def test_a_heavier_account_is_charged_less_for_the_same_service() -> None:
    """By its weight, that of its latest request."""
    shares = Shares()
    shares.open("a", 1.0)
    shares.open("a", 4.0)
    shares.charge("a", 100)
    assert shares["a"].served == 25


def test_within_the_tolerance_accounts_are_equal() -> None:
    """Only what lies beyond it counts as debt."""
    shares = Shares(tolerance=50)
    for name in "abc":
        backlogged(shares, name)
    shares.charge("b", 50)
    shares.charge("c", 51)
    assert [shares.debt(name, shares.least()) for name in "abc"] == [0, 0, 1]


def test_those_beside_who_waits_count_where_they_have_had_less() -> None:
    """A sequence that runs and wants more of a step is among those that are compared."""
    shares = Shares()
    backlogged(shares, "a")
    shares.charge("a", 100)
    shares.open("b")
    assert (shares.least(), shares.least(["b"])) == (100, 0)


def test_accounts_without_debt_are_forgotten() -> None:
    """However many come and go, few are kept: those with requests, and those that had more than the others."""
    shares = Shares()
    backlogged(shares, "stays")
    shares.charge("stays", 10)
    for number in range(1000):
        name = f"t{number}"
        backlogged(shares, name)
        shares.charge(name, 1000 if number == 500 else 0)
        shares.stop_waiting(name)
        shares.close(name)
    assert "t500" in shares and sum(f"t{number}" in shares for number in range(1000)) <= 70
    shares.stop_waiting("stays")
    shares.close("stays")
    assert "t500" not in shares and "stays" not in shares
