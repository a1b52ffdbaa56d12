"""What probes at several rates say of the highest rate that meets an objective: an estimate and an interval, always.

The share of requests that meet the objectives falls with the rate like a logistic curve of log rate, whose place (the
rate at which it crosses the target) and steepness are unknown: the psychometric curve of adaptive testing (Watson and
Pelli 1983, QUEST; Kontsevich and Tyler 1999 for the unknown slope). Every place and steepness on a grid is weighed by
the likelihood of what the probes saw; both are equally likely beforehand, on logarithmic scales.

Three things keep the interval honest. Requests that wait in one queue are late together: counts are divided by the
design effect (Kish 1965), how much more the blocks of a probe differ than independent requests would, pooled over the
probes, because a probe that by luck saw no late block would else count for too much. A probe whose queue grew attained
nothing, whatever its requests met so far. And a probe may lie: its weight against any curve is bounded by OUTLIER.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

import numpy as np

CONFIDENCE = 0.95
OUTLIER = 0.02
"""Share of probes that may say anything, such as one during which the machine did something else."""

STEEPNESS = np.geomspace(3.0, 100.0, 12)
"""Change of the log odds over a change of the rate by a factor e: from a queue with one server and tight objectives to
a step. """
NUM_PLACES = 1500
HOPELESS = 0.3
"""A probe that attained less says that its rate is too high, not how the curve runs near the target."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A probe: shares of requests that met the objectives, block by block, of num requests in all. target: the share to
    be attained, above 0 and below 1."""

    rate: float
    num: int
    shares: Sequence[float]
    has_grown: bool
    target: float

    @property
    def attainment(self) -> float:
        return 0.0 if self.has_grown else fmean(self.shares)


@dataclass(frozen=True, slots=True)
class Belief:
    rates: list[float]
    cumulative: list[float]
    design_effect: float

    def quantile(self, share: float) -> float:
        """The rate below which the sought one lies with this probability."""
        return self.rates[min(int(np.searchsorted(self.cumulative, share)), len(self.rates) - 1)]

    @property
    def interval(self) -> tuple[float, float]:
        tail = (1 - CONFIDENCE) / 2
        return self.quantile(tail), self.quantile(1 - tail)


def log_odds(share: float) -> float:
    return math.log(share / (1 - share))


def design_effect(probes: Sequence[Evidence]) -> float:
    """Variance of the probes' shares as their blocks show it, over that of independent requests; at least 1."""
    seen = independent = 0.0
    for probe in probes:
        share = fmean(probe.shares)
        if not probe.has_grown and share >= HOPELESS and len(probe.shares) > 1:
            seen += probe.num * variance(probe.shares) / len(probe.shares)
            independent += share * (1 - share)
    return max(1.0, seen / independent) if independent else 1.0


def believe(probes: Sequence[Evidence]) -> Belief:
    """What all the probes, at least one, say together."""
    assert probes and all(0 < probe.target < 1 for probe in probes), probes
    passed = [probe.rate for probe in probes if probe.attainment >= probe.target]
    failed = [probe.rate for probe in probes if probe.attainment < probe.target]
    ends = [max(passed, default=failed[0] if failed else 1.0), min(failed, default=passed[0] if passed else 1.0)]
    places = np.linspace(math.log(min(ends) / 2), math.log(max(ends) * 2), NUM_PLACES)
    effect = design_effect(probes)
    weights = np.zeros((len(STEEPNESS), NUM_PLACES))
    for probe in probes:
        share, num = probe.attainment, max(1.0, probe.num / effect)
        if share < HOPELESS:
            num = min(num, float(len(probe.shares)))
        odds = log_odds(probe.target) - STEEPNESS[:, None] * (math.log(probe.rate) - places[None, :])
        likelihood = -num * (share * np.logaddexp(0.0, -odds) + (1 - share) * np.logaddexp(0.0, odds))
        best = num * sum(part * math.log(part) for part in (share, 1 - share) if part > 0)
        weights += np.log((1 - OUTLIER) * np.exp(likelihood - best) + OUTLIER)
    by_place = np.exp(weights - weights.max()).sum(axis=0)
    cumulative = np.cumsum(by_place) / by_place.sum()
    return Belief(np.exp(places).tolist(), cumulative.tolist(), effect)
