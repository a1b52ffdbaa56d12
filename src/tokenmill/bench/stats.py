"""How sure a figure is, of load measurements and of quality: intervals, paired ratios, trends, comparisons of two runs.

Means over a few repeats get Student's t (1908), also on the logarithms of ratios of paired runs, whose mean is the
geometric mean ratio; Holm's step-down correction (1979) where many ratios are looked at together.

Whether a queue grew during a run is asked of blocks, since latencies of requests that follow one another rise and fall
together and a test that takes each as independent finds growth where there is none. The run is cut into NUM_BLOCKS
blocks in the order in which requests were due; the first NUM_WARMUP_BLOCKS, in which a queue that began empty fills,
are left out (batch means: Law, Simulation Modeling and Analysis). Growth is a trend of the blocks' mean latencies by
Mann and Kendall's test (Mann 1945), steeper than DRIFT_SHARE by Theil and Sen's slope (Sen 1968): answers then fall
behind by that share of the time that passes.

Shares get Wilson's interval (1927), because the usual p +/- 1.96 se is wrong near 0 and 1 and for small samples. Two
runs over the same questions get McNemar's exact test (1947): only questions that one run got right and the other wrong
tell them apart. The size of a difference gets a paired bootstrap (Efron): whole questions or whole text windows are
redrawn, so what hangs together stays together. Every draw comes from the seed given.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import NormalDist, fmean, median, stdev
from typing import TypeVar

import numpy as np

from .result import Interval, Run

CONFIDENCE = 0.95
VERDICT_CONFIDENCE = 0.97
"""Of a comparison's verdict: of a hundred comparisons of equals three give one."""


def t_two_sided(t: float, freedom: int) -> float:
    """Probability that Student's t of `freedom` degrees, at least 1, is as far from 0 as t on either side (Abramowitz
    and Stegun 26.7.3 and 26.7.4)."""
    assert freedom >= 1, freedom
    angle = math.atan(abs(t) / math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for i in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (i - 1) / i
        total += term
    within = math.sin(angle) * total
    return 1.0 - (2 / math.pi * (angle + within) if odd else within)


def t_point(confidence: float, freedom: int) -> float:
    """The t beyond which, on either side, 1 - confidence lies."""
    low, high = 0.0, 1.0
    while t_two_sided(high, freedom) > 1 - confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_two_sided(middle, freedom) > 1 - confidence else (low, middle)
    return high


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Mean and its interval; a single value is its own interval, and says nothing about spread."""
    mean = fmean(values)
    if len(values) < 2:
        return Interval(mean, mean, mean, confidence, list(values))
    half = t_point(confidence, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half, confidence, list(values))


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """Geometric mean ratio and its interval; p_value of the ratio being 1."""

    ratio: float
    low: float
    high: float
    p_value: float


def paired_ratio(baseline: Sequence[float], candidate: Sequence[float], confidence: float) -> PairedRatio:
    """candidate / baseline; values of equal index were measured in one turn, and are above 0. One turn tells nothing:
    its p_value is 1."""
    assert len(baseline) == len(candidate) > 0, (len(baseline), len(candidate))
    logs = [math.log(own / other) for own, other in zip(candidate, baseline, strict=True)]
    found = mean_interval(logs, confidence)
    p_value = 1.0
    if len(logs) > 1:
        spread = stdev(logs) / math.sqrt(len(logs))
        # Runs without any spread differ beyond doubt, or not at all.
        p_value = t_two_sided(found.mean / spread, len(logs) - 1) if spread else float(found.mean == 0.0)
    return PairedRatio(math.exp(found.mean), math.exp(found.low), math.exp(found.high), p_value)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values adjusted for their number: one below a level is a find at that level among all of them."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, least = [0.0] * len(p_values), 0.0
    for place, i in enumerate(order):
        least = max(least, min(1.0, p_values[i] * (len(order) - place)))
        adjusted[i] = least
    return adjusted


def can_decide(num_repeats: int) -> bool:
    """Enough repeats that all of them pointing one way by chance alone is rarer than 1 - CONFIDENCE."""
    return 2.0 ** (1 - num_repeats) <= 1 - CONFIDENCE


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


NUM_BLOCKS = 10
NUM_WARMUP_BLOCKS = 2
DRIFT_SHARE = 0.03
DRIFT_CONFIDENCE = 0.99
"""Of Mann and Kendall's test. With the slope asked for besides, fewer than 2 of 100 runs at up to 0.9 of a queue's
capacity are said to drift (tests/unit/test_bench_virtual.py)."""

MIN_PER_BLOCK = 2

T = TypeVar("T")


def steady_blocks(ordered: Sequence[T]) -> list[Sequence[T]]:
    """The blocks after the first ones; of few values as many blocks as there are values. None is empty."""
    num = min(NUM_BLOCKS, len(ordered))
    cut = [ordered[i * len(ordered) // num : (i + 1) * len(ordered) // num] for i in range(num)]
    return cut[NUM_WARMUP_BLOCKS:] or cut[-1:]


@dataclass(frozen=True, slots=True)
class Drift:
    """slope: seconds by which latency grows in a second; None where there is too little to tell. z: of the trend."""

    slope: float | None
    z: float

    @property
    def has_grown(self) -> bool:
        limit = NormalDist().inv_cdf(DRIFT_CONFIDENCE)
        return self.slope is not None and self.slope > DRIFT_SHARE and self.z > limit


def drift(points: Sequence[tuple[float, float]]) -> Drift:
    """Of (due, latency) in the order of due, seconds."""
    if len(points) < NUM_BLOCKS * MIN_PER_BLOCK:
        return Drift(None, 0.0)
    cut = steady_blocks(points)
    at = [fmean(due for due, _ in block) for block in cut]
    level = [fmean(latency for _, latency in block) for block in cut]
    pairs = list(combinations(range(len(cut)), 2))
    slopes = [(level[j] - level[i]) / (at[j] - at[i]) for i, j in pairs if at[j] > at[i]]
    if not slopes:
        # All due at once: there is no time in which a queue could grow.
        return Drift(None, 0.0)
    return Drift(median(slopes), kendall_z(level))


def kendall_z(values: Sequence[float]) -> float:
    """Standard normal, with continuity correction, under no trend; positive where values rise."""
    num = len(values)
    score = sum((later > earlier) - (later < earlier) for earlier, later in combinations(values, 2))
    spread = math.sqrt(num * (num - 1) * (2 * num + 5) / 18)
    return (score - math.copysign(1, score)) / spread if score else 0.0


Z_95 = 1.959963984540054
"""Two-sided 95 % point of the normal distribution."""

NUM_RESAMPLES = 10_000
_RESAMPLES_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class ConfidenceInterval:
    """A 95 % confidence interval, and how it was made."""

    low: float
    high: float
    method: str

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def wilson(num_right: int, num_items: int) -> ConfidenceInterval:
    """Of a share num_right / num_items, num_items >= 1."""
    assert 0 <= num_right <= num_items and num_items > 0, (num_right, num_items)
    share, z2 = num_right / num_items, Z_95**2
    centre = share + z2 / (2 * num_items)
    half = Z_95 * math.sqrt(share * (1 - share) / num_items + z2 / (4 * num_items**2))
    scale = 1 + z2 / num_items
    # At the ends the bounds are 0 and 1 exactly; rounding must not say otherwise.
    low = 0.0 if num_right == 0 else (centre - half) / scale
    high = 1.0 if num_right == num_items else (centre + half) / scale
    return ConfidenceInterval(low, high, "Wilson score")


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
) -> tuple[float, ConfidenceInterval]:
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
    return float(deltas.sum() / sizes.sum()), ConfidenceInterval(float(low), float(high), method)
