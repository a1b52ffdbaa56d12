"""How sure a quality figure is: Wilson intervals, clustered standard errors, and paired comparisons of two runs.

Wilson (1927) for shares, because the usual p +/- 1.96 se is wrong near 0 and 1 and for small samples. McNemar's exact
test (1947) for two runs over the same questions: only questions that one run got right and the other wrong tell them
apart. Paired bootstrap (Efron) for the size of a difference: whole questions or whole text windows are redrawn, so what
hangs together stays together. Every draw comes from the seed given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z_95 = 1.959963984540054
"""Two-sided 95 % point of the normal distribution."""

NUM_RESAMPLES = 10_000
_RESAMPLES_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95 % confidence interval, and how it was made."""

    low: float
    high: float
    method: str

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def wilson(num_right: int, num_items: int) -> Interval:
    """Of a share num_right / num_items, num_items >= 1."""
    assert 0 <= num_right <= num_items and num_items > 0, (num_right, num_items)
    share, z2 = num_right / num_items, Z_95**2
    centre = share + z2 / (2 * num_items)
    half = Z_95 * math.sqrt(share * (1 - share) / num_items + z2 / (4 * num_items**2))
    scale = 1 + z2 / num_items
    # At the ends the bounds are 0 and 1 exactly; rounding must not say otherwise.
    low = 0.0 if num_right == 0 else (centre - half) / scale
    high = 1.0 if num_right == num_items else (centre + half) / scale
    return Interval(low, high, "Wilson score")


def share_error(num_right: int, num_items: int) -> float:
    """Standard error of a share, as most harnesses print it: sqrt(p (1 - p) / (n - 1)). 0 for a single item."""
    share = num_right / num_items
    return math.sqrt(share * (1 - share) / (num_items - 1)) if num_items > 1 else 0.0


def clustered_mean(sums: Sequence[float], counts: Sequence[int]) -> tuple[float, float]:
    """(sum / count over all clusters, its standard error with clusters as the independent units).

    The ratio estimator: residuals sum_i - mean * count_i. One cluster gives an error of 0: nothing is known.
    """
    assert len(sums) == len(counts) > 0, (len(sums), len(counts))
    total = sum(counts)
    mean = sum(sums) / total
    num = len(sums)
    if num == 1:
        return mean, 0.0
    squares = sum((value - mean * count) ** 2 for value, count in zip(sums, counts, strict=True))
    return mean, math.sqrt(squares * num / (num - 1)) / total


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p of seeing discordant counts this uneven, were the two runs equally good."""
    num = only_first + only_second
    tail = sum(math.comb(num, k) for k in range(min(only_first, only_second) + 1))
    return min(1.0, 2 * tail / 2**num)


def paired_bootstrap(
    first: Sequence[float], second: Sequence[float], counts: Sequence[float], seed: int
) -> tuple[float, Interval]:
    """(difference of means second - first, its interval). Unit i holds sums first[i], second[i] over counts[i] values;
    with counts of 1 this is the plain paired bootstrap."""
    assert len(first) == len(second) == len(counts) > 0, (len(first), len(second), len(counts))
    deltas = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    sizes = np.asarray(counts, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(NUM_RESAMPLES // _RESAMPLES_AT_ONCE):
        picks = rng.integers(0, len(deltas), (_RESAMPLES_AT_ONCE, len(deltas)))
        means.append(deltas[picks].sum(axis=1) / sizes[picks].sum(axis=1))
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    method = f"paired bootstrap, {NUM_RESAMPLES} resamples, seed {seed}"
    return float(deltas.sum() / sizes.sum()), Interval(float(low), float(high), method)
