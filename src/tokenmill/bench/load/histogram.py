"""Percentiles: exact over what fits in memory comfortably, from logarithmic buckets beyond that.

The histogram is HDR-like: each power of two is cut into SUB_BUCKETS equal parts, so a value is known to within
1 / (2 * SUB_BUCKETS) of itself whatever its size. Nearest-rank throughout: the q-quantile of n sorted values is the
value at rank ceil(q * n), so an exact percentile is a value that occurred.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..result import Distribution

Values = NDArray[np.float64]

MAX_EXACT = 1_000_000
SUB_BUCKETS = 1024
_ZERO = -(1 << 40)
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99_9": 0.999}


def quantile(ordered: Sequence[float], q: float) -> float:
    """Nearest-rank quantile of values in ascending order, of which there is at least one."""
    assert ordered, "no values"
    return ordered[rank(len(ordered), q) - 1]


def rank(num: int, q: float) -> int:
    """1-based rank of the q-quantile of num values. Floating error in q * num must not move it up by one."""
    return min(num, max(1, math.ceil(q * num - 1e-9)))


class Histogram:
    """Counts by logarithmic bucket. Values below zero (a clock can only give them by a defect) are refused."""

    def __init__(self) -> None:
        self.num = 0
        self._counts: Counter[int] = Counter()
        self._sum = 0.0
        self._sum_squares = 0.0
        self._min = math.inf
        self._max = -math.inf

    def add(self, value: float) -> None:
        assert value >= 0.0, f"a length of time of {value}"
        self.num += 1
        self._sum += value
        self._sum_squares += value * value
        self._min = min(self._min, value)
        self._max = max(self._max, value)
        bucket = _bucket(value)
        self._counts[bucket] += 1

    def add_all(self, several: Sequence[float] | Values) -> None:
        """As `add` of each."""
        values = np.asarray(several, np.float64)
        if not len(values):
            return
        least, most = float(values.min()), float(values.max())
        assert least >= 0.0, f"a length of time of {least}"
        self.num += len(values)
        # Added up one after the other, as `add` does.
        self._sum = _added(self._sum, values)
        self._sum_squares = _added(self._sum_squares, values * values)
        parts, powers = np.frexp(values)
        buckets = powers * SUB_BUCKETS + ((parts - 0.5) * (2 * SUB_BUCKETS)).astype(np.int64)
        if not least:
            buckets[values == 0.0] = _ZERO
        found, counts = np.unique(buckets, return_counts=True)
        for bucket, count in zip(found.tolist(), counts.tolist(), strict=True):
            self._counts[bucket] += count
        self._min, self._max = min(self._min, least), max(self._max, most)

    def quantile(self, q: float) -> float:
        wanted, seen = rank(self.num, q), 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= wanted:
                return min(self._max, max(self._min, _middle(bucket)))
        raise AssertionError(f"rank {wanted} of {seen}")

    def distribution(self, more: Sequence[float] = ()) -> Distribution:
        if not self.num:
            return Distribution(0)
        mean = self._sum / self.num
        std = math.sqrt(max(0.0, self._sum_squares / self.num - mean * mean))
        quantiles = {name: self.quantile(q) for name, q in QUANTILES.items()}
        others = {f"{percent:g}": self.quantile(percent / 100) for percent in more}
        return Distribution(self.num, mean=mean, std=std, min=self._min, max=self._max, more=others, **quantiles)


def _added(before: float, values: Values) -> float:
    return float(np.cumsum(np.concatenate(((before,), values)))[-1])


def _bucket(value: float) -> int:
    if value == 0.0:
        return _ZERO
    mantissa, exponent = math.frexp(value)
    return exponent * SUB_BUCKETS + int((mantissa - 0.5) * 2 * SUB_BUCKETS)


def _middle(bucket: int) -> float:
    if bucket == _ZERO:
        return 0.0
    exponent, part = divmod(bucket, SUB_BUCKETS)
    return math.ldexp(0.5 + (part + 0.5) / (2 * SUB_BUCKETS), exponent)


def describe(values: Iterable[float], max_exact: int = MAX_EXACT, more: Sequence[float] = ()) -> Distribution:
    """The distribution of `values`: exact up to `max_exact` of them. more: further percentiles, above 0 and to 100."""
    kept = array("d")
    iterator = iter(values)
    for value in iterator:
        kept.append(value)
        if len(kept) > max_exact:
            histogram = Histogram()
            for early in kept:
                histogram.add(early)
            for late in iterator:
                histogram.add(late)
            return histogram.distribution(more)
    if not kept:
        return Distribution(0)
    ordered = sorted(kept)
    mean = math.fsum(ordered) / len(ordered)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered))
    quantiles = {name: quantile(ordered, q) for name, q in QUANTILES.items()}
    others = {f"{percent:g}": quantile(ordered, percent / 100) for percent in more}
    return Distribution(len(ordered), mean=mean, std=std, min=ordered[0], max=ordered[-1], more=others, **quantiles)
