"""How sure a figure is: intervals over repeats, ratios of runs that took turns, and whether a queue grew.

Student's t for means over a few repeats; the paired bootstrap (Efron) for ratios of medians; Mann and Whitney's rank
test, normal approximation, for drift. Draws are seeded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import NormalDist, fmean, median, stdev

from ..result import Interval, Run
from .histogram import rank
from .plan import generator

CONFIDENCE = 0.95
NUM_RESAMPLES = 4000
DRIFT_RATIO = 1.25
DRIFT_CONFIDENCE = 0.99

# Two-sided 95 % points of Student's t by degrees of freedom; beyond the table the next smaller entry is used, which
# makes an interval slightly too wide and never too narrow.
_T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}
_T_95 |= {12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000, 120: 1.980}


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean and its 95 % interval; a single value is its own interval, and says nothing about spread."""
    mean = fmean(values)
    if len(values) < 2:
        return Interval(mean, mean, mean, CONFIDENCE, list(values))
    freedom = len(values) - 1
    factor = _T_95[max(key for key in _T_95 if key <= freedom)]
    half = factor * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half, CONFIDENCE, list(values))


def ratio_of_medians(baseline: Sequence[float], candidate: Sequence[float], seed: int) -> tuple[float, float, float]:
    """(candidate / baseline, low, high) of medians over repeats; values of equal index were measured in one turn and
    are redrawn together."""
    assert len(baseline) == len(candidate) > 0, (len(baseline), len(candidate))
    rng = generator(seed, "bootstrap")
    turns = range(len(baseline))
    ratios = []
    for _ in range(NUM_RESAMPLES):
        picks = rng.choices(turns, k=len(baseline))
        ratios.append(median(candidate[i] for i in picks) / median(baseline[i] for i in picks))
    ratios.sort()
    tail = (1 - CONFIDENCE) / 2
    low, high = ratios[rank(len(ratios), tail) - 1], ratios[rank(len(ratios), 1 - tail) - 1]
    return median(candidate) / median(baseline), low, high


def merge_warnings(runs: Sequence[Run]) -> list[str]:
    """One warning of each kind (texts that differ in their numbers only), and how many runs had it."""
    by_kind: dict[str, list[str]] = {}
    for run in runs:
        for warning in run.warnings:
            by_kind.setdefault(re.sub(r"[0-9.]+", "#", warning), []).append(warning)
    return [
        found[0] if len(runs) == 1 else f"{found[0]} (In {len(found)} of {len(runs)} runs.)"
        for found in by_kind.values()
    ]


def can_decide(num_repeats: int) -> bool:
    """Enough repeats that all of them pointing one way by chance alone is rarer than 1 - CONFIDENCE."""
    return 2.0 ** (1 - num_repeats) <= 1 - CONFIDENCE


def drift_s(halves: tuple[Sequence[float], Sequence[float]]) -> float | None:
    """Median latency of the second half less that of the first; None where a half is empty."""
    first, second = halves
    return median(second) - median(first) if first and second else None


def has_grown(halves: tuple[Sequence[float], Sequence[float]]) -> bool:
    """The second half's latencies are longer: by DRIFT_RATIO in the median, and beyond chance."""
    first, second = halves
    if not first or not second or median(second) <= DRIFT_RATIO * median(first):
        return False
    return rank_test(first, second) > NormalDist().inv_cdf(DRIFT_CONFIDENCE)


def rank_test(first: Sequence[float], second: Sequence[float]) -> float:
    """z of the second sample being larger (Mann-Whitney, mid-ranks for ties)."""
    merged = sorted([(value, 0) for value in first] + [(value, 1) for value in second])
    rank_sum, i = 0.0, 0
    while i < len(merged):
        end = i
        while end < len(merged) and merged[end][0] == merged[i][0]:
            end += 1
        rank_sum += (i + 1 + end) / 2 * sum(side for _, side in merged[i:end])
        i = end
    n, m = len(first), len(second)
    mean, spread = m * (n + m + 1) / 2, math.sqrt(n * m * (n + m + 1) / 12)
    return (rank_sum - mean) / spread if spread else 0.0
