"""Canaries, simulated over seeds: how often a good one is taken back, and how many calls a bad one has."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tokenmill.cluster.canary import CanaryJudge, Rules, Sample, Verdict, Version, choose

SEEDS = 200


def run(
    seed: int,
    num_calls: int,
    *,
    share: float = 0.05,
    errors: float = 0.01,
    slower: float = 1.0,
    misses: float | None = None,
    bad_after: int = 0,
    rules: Rules | None = None,
) -> tuple[int, Verdict] | None:
    """(calls of the canary since it was bad, verdict); None: it stayed. A stable version has 1 % errors, 2 % misses and
    times that vary by half."""
    rng = random.Random(seed)
    judge = CanaryJudge(rules or Rules())
    num_canary = 0
    for _ in range(num_calls):
        is_canary = rng.random() < share
        num_canary += is_canary
        is_bad = is_canary and num_canary > bad_after
        is_error = rng.random() < (errors if is_bad else 0.01)
        factor = slower if is_bad else 1.0
        meets = None if misses is None else rng.random() >= (misses if is_bad else 0.02)
        times = rng.lognormvariate(-1, 0.5) * factor, rng.lognormvariate(-3, 0.25) * factor
        verdict = judge.note(Sample(is_error, meets, *times), is_canary=is_canary)
        if verdict is not None:
            return num_canary - bad_after, verdict
    return None


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize("how", [{}, {"slower": 1.09}, {"misses": 0.02}])
def test_a_canary_that_is_as_good_stays(how: dict[str, float]) -> None:
    """Of 200, at most 1 % and the spread of that are taken back; times within the tolerance count as equal."""
    found = [run(seed, 800, share=0.25, **how) for seed in range(SEEDS)]  # type: ignore[arg-type]
    assert sum(each is not None for each in found) <= 6


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize(
    ("sign", "how", "most"),
    [
        ("errors", {"errors": 1.0}, 8),
        ("errors", {"errors": 0.2}, 80),
        ("targets", {"misses": 0.3}, 60),
        ("tpot", {"slower": 2.0}, 30),
        ("tpot", {"slower": 1.3}, 200),
    ],
)
def test_a_canary_that_is_worse_is_taken_back_soon(sign: str, how: dict[str, float], most: int) -> None:
    """By the sign that shows it, nine times of ten within so many of its calls, and always."""
    found = [run(seed, 20 * 4 * most, **how) for seed in range(SEEDS)]  # type: ignore[arg-type]
    numbers = sorted(each[0] for each in found if each is not None)
    assert len(numbers) == SEEDS and numbers[SEEDS * 9 // 10] <= most
    signs = Counter(each[1].sign for each in found if each is not None)
    assert signs[sign] == max(signs.values())


@pytest.mark.sampled(1 / 3)
def test_a_canary_that_turns_bad_is_found_as_one_that_was() -> None:
    """Evidence for it does not pile up: each window begins anew."""
    found = [run(seed, 4 * 800, share=0.25, errors=0.3, bad_after=400) for seed in range(SEEDS // 2)]
    numbers = sorted(each[0] for each in found if each is not None)
    assert len(numbers) == SEEDS // 2 and numbers[len(numbers) // 2] < 150


def test_sessions_keep_their_version_and_weights_hold() -> None:
    """A new seed deals anew; a change of weights moves no session that need not move."""
    versions = [Version("a", 95.0), Version("b", 5.0)]
    chosen = {str(number): choose("n", versions, str(number)) for number in range(20_000)}
    assert chosen == {session: choose("n", versions, session) for session in chosen}
    assert 0.04 < Counter(chosen.values())["b"] / len(chosen) < 0.06
    more = {session: choose("n", [Version("a", 90.0), Version("b", 10.0)], session) for session in chosen}
    assert all(more[session] == "b" for session, model in chosen.items() if model == "b")
    assert chosen != {session: choose("n", versions, session, seed=1) for session in chosen}
    back = [Version("a", 95.0), Version("b", 0.0)]
    assert {choose("n", back, session) for session in chosen} == {"a"}


def test_too_few_calls_are_no_reason() -> None:
    """A canary whose first calls fail has `min_samples` of them."""
    judge = CanaryJudge(Rules(min_samples=12))
    verdicts = []
    for _ in range(20):
        for _ in range(20):
            judge.note(Sample(False), is_canary=False)
        verdicts.append(judge.note(Sample(True), is_canary=True))
    assert [verdict is None for verdict in verdicts] == [True] * 11 + [False] * 9
