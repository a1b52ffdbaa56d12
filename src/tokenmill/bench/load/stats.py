"""How sure a figure is: intervals over repeats, and ratios of runs that took turns.

Student's t (1908) for means over a few repeats, and on the logarithms of ratios of paired runs, whose mean is the
geometric mean ratio; Holm's step-down correction (1979) where many ratios are looked at together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from ..result import Interval, Run

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
