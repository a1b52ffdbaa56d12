"""The highest request rate that meets an SLO, with an interval: bracket it, then probe both ends of the interval again.

A rate passes if the wanted share of requests met every objective, every percentile is within its goal, and the queue
did not grow meanwhile (`stats.drift`): a server that falls behind slowly can look fine in a short probe. A goal is a
share of requests too; of all shares a probe reports the one furthest from its target. The rate grows, or shrinks, until
one passes and one does not. Then as many probes as bisecting would take, and one, go in turns to the lower and the
upper quartile of the estimate: where the curve is steep that is bisection, and where a verdict is a matter of luck it
is a second and a third look at the same ends. Each probe draws its own text and arrivals.

The estimate: the share of requests that meet the objectives falls with the rate like a logistic curve of log rate,
whose place (the rate at which it crosses the target) and steepness are unknown: the psychometric curve of adaptive
testing (Watson and Pelli 1983, QUEST; Kontsevich and Tyler 1999 for the unknown slope). Every place and steepness on a
grid is weighed by the likelihood of what the probes saw; all are equally likely beforehand, on logarithmic scales.

Three things keep its interval honest. Requests that wait in one queue are late together: counts are divided by the
design effect (Kish 1965), how much more the blocks of a probe differ than independent requests would, pooled over the
probes, because a probe that by luck saw no late block would else count for too much. A probe whose queue grew attained
nothing, whatever its requests met so far. And a probe may lie: its weight against any curve is bounded by OUTLIER.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from statistics import fmean, mean, variance

import numpy as np

from ...core.errors import ConfigError
from ..result import Goodput, Interval, Probe, Run
from ..stats import drift, merge_warnings, steady_blocks, wilson
from .measure import OBJECTIVES, e2el_s, met, parse_objectives

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
class RateEstimate:
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


def estimate_rate(probes: Sequence[Evidence]) -> RateEstimate:
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
    return RateEstimate(np.exp(places).tolist(), cumulative.tolist(), effect)


Try = Callable[[float], Awaitable[Probe]]

LARGEST_SHARE = 0.999
"""A share of 1 has no odds: what is asked of every request is taken for 999 of 1,000."""

FAR, NEAR = 4.0, 2.0
"""Steps of the rate before there is a bracket: far where a probe shows no trace of the objective's limit."""


@dataclass(frozen=True, slots=True)
class Search:
    """start_rate: the first tried. tolerance: how near the ends of the interval should come to each other, as a ratio;
    fewer probes are made if they do, and no more than bisecting to it would take."""

    start_rate: float = 1.0
    min_rate: float = 0.01
    max_rate: float = 10_000.0
    tolerance: float = 0.05
    target_attainment: float = 0.9
    max_probes: int = 20

    @property
    def num_refinements(self) -> int:
        """Probes after the first bracket, whose ends are a factor NEAR apart, at best."""
        return 1 + max(1, math.ceil(math.log2(math.log(NEAR) / math.log1p(self.tolerance))))


@dataclass(frozen=True, slots=True)
class Goal:
    """A percentile that a rate is to keep: so many of all requests have the quantity within the limit, where those that
    failed have not."""

    name: str
    quantity: str
    share: float
    limit_s: float


def parse_goals(pairs: Sequence[str]) -> tuple[dict[str, float], tuple[Goal, ...]]:
    """["ttft:500", "tpot_p99:50"] -> objectives of each request, goals of a rate."""
    objectives, goals = [], list[Goal]()
    for pair in pairs:
        name, _, limit = pair.partition(":")
        quantity, of_percentile, percentile = name.partition("_p")
        if not of_percentile:
            objectives.append(pair)
            continue
        try:
            ((field, limit_s),) = parse_objectives([f"{quantity}:{limit}"]).items()
            if not _is_percentile(percentile) or name in [goal.name for goal in goals]:
                raise ValueError(percentile)
        except (ConfigError, ValueError):
            raise ConfigError(
                f"--goodput takes goals such as ttft_p99:MILLISECONDS, of {', '.join(OBJECTIVES)} and percentiles up"
                f" to p99.9, each once, got {pair}.",
                param="goodput",
            ) from None
        goals.append(Goal(name, field, float(f"{percentile}e-2"), limit_s))
    return parse_objectives(objectives), tuple(goals)


def _is_percentile(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal() and 0 < float(text) <= 100 * LARGEST_SHARE


def limits_of(objectives: dict[str, float], goals: Sequence[Goal]) -> dict[str, float]:
    """By quantity the most that is allowed of it anywhere: beyond it a request misses all that is asked of it."""
    limits = dict(objectives)
    for goal in goals:
        limits[goal.quantity] = max(goal.limit_s, limits.get(goal.quantity, 0.0))
    return limits


@dataclass(frozen=True, slots=True)
class Price:
    num_cores: int | None = None
    num_gpus: int | None = None
    cost_per_hour: float | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if self.cost_per_hour is not None and not 0 <= self.cost_per_hour < math.inf:
            raise ConfigError(f"--cost-per-hour must be 0 or more, got {self.cost_per_hour}.", param="cost_per_hour")


def judge(rate: float, run: Run, target_attainment: float, goals: Sequence[Goal] = ()) -> Probe:
    """Whether `rate` passed, from its run: what it misses by most, or keeps by least."""
    rows = sorted(run.requests, key=lambda row: row.due_s)
    points = [(row.due_s, latency) for row in rows if row.ok and (latency := e2el_s(row)) is not None]
    blank = replace(run, requests=[])
    probes = []
    if run.slo.objectives or not goals:
        probes.append(probe_of(rate, [row.met_slo for row in rows], points, target_attainment, blank))
    for goal in goals:
        within = [row.ok and met(row, goal.quantity, goal.limit_s) for row in rows]
        probes.append(replace(probe_of(rate, within, points, goal.share, blank), goal=goal.name))
    probe = min(probes, key=_margin)
    return replace(probe, stable=False, passed=False) if run.given_up else probe


def _margin(probe: Probe) -> tuple[bool, float]:
    """How far a share is from what is wanted of it, in odds, which no share of so many requests makes infinite."""
    share = (probe.attainment * probe.num_judged + 0.5) / (probe.num_judged + 1)
    return probe.passed, log_odds(share) - log_odds(min(probe.target, LARGEST_SHARE))


def probe_of(rate: float, met: Sequence[bool], points: Sequence[tuple[float, float]], target: float, run: Run) -> Probe:
    """met: whether each request met what `target` of them are to, in the order they were due; points: (due, latency) of
    those that were answered. The first requests, during which the queue fills, are left out of the shares."""
    cut = steady_blocks(met) if met else [[False]]
    trend = drift(points)
    shares = [fmean(block) for block in cut]
    evidence = Evidence(rate, sum(map(len, cut)), shares, trend.has_grown, target)
    # Of fractions, which a mean of rounded shares may miss by a hair: a share that is the target passes.
    attainment = float(mean(Fraction(sum(block), len(block)) for block in cut))
    low, high = _bounds(evidence, attainment)
    return Probe(
        request_rate=rate,
        attainment=attainment,
        attainment_low=low,
        attainment_high=high,
        block_shares=shares,
        num_judged=evidence.num,
        stable=not trend.has_grown,
        drift=trend.slope,
        passed=not trend.has_grown and attainment >= target,
        target=target,
        run=run,
    )


def evidence_of(probe: Probe) -> Evidence:
    target = min(probe.target, LARGEST_SHARE)
    return Evidence(probe.request_rate, probe.num_judged, probe.block_shares, not probe.stable, target)


def _bounds(evidence: Evidence, attainment: float) -> tuple[float, float]:
    """Wilson's interval, of as many independent requests as the blocks are worth."""
    num = max(1, round(evidence.num / design_effect([evidence])))
    interval = wilson(round(attainment * num), num)
    return interval.low, interval.high


async def search(attempt: Try, limits: Search) -> list[Probe]:
    """All probes of one search, in order."""
    probes: list[Probe] = []
    rate = min(max(limits.start_rate, limits.min_rate), limits.max_rate)
    left = limits.num_refinements
    while len(probes) < limits.max_probes:
        probes.append(await attempt(rate))
        if is_bracketed(probes):
            estimate = estimate_of(probes)
            low, high = estimate.interval
            if not left or high / low <= 1 + limits.tolerance:
                break
            left -= 1
            rate = estimate.quantile(0.75 if len(probes) % 2 else 0.25)
        else:
            last = probes[-1]
            is_far = last.attainment == 1.0 if last.passed else last.attainment < 0.5
            rate = last.request_rate * (FAR if is_far else NEAR) ** (1 if last.passed else -1)
            nearest = min(max(rate, limits.min_rate), limits.max_rate)
            if nearest == last.request_rate:
                break
            rate = nearest
    return probes


def is_bracketed(probes: Sequence[Probe]) -> bool:
    return len({probe.passed for probe in probes}) == 2


def estimate_of(probes: Sequence[Probe]) -> RateEstimate:
    return estimate_rate([evidence_of(probe) for probe in probes])


def conclude(
    searches: list[list[Probe]],
    objectives: dict[str, float],
    limits: Search,
    price: Price,
    argv: list[str],
    goals: Sequence[Goal] = (),
) -> Goodput:
    """The answer of all probes of all searches together; where they have no bracket, a bound."""
    probes = [probe for probes in searches for probe in probes]
    passed = [probe for probe in probes if probe.passed]
    warnings = []
    rate, low, high, interval = 0.0, 0.0, None, None
    if is_bracketed(probes):
        estimate = estimate_of(probes)
        rate = estimate.quantile(0.5)
        low, high = estimate.interval
        values = [estimate_of(one).quantile(0.5) for one in searches if is_bracketed(one)]
        interval = Interval(rate, low, high, CONFIDENCE, values)
        if high / low > 1 + 2 * limits.tolerance:
            warnings.append(
                f"The answer is known to within a factor of {high / low:.2f} only: longer probes (--probe-s) or"
                " further searches (--repeats) narrow it."
            )
    elif passed:
        rate = low = max(probe.request_rate for probe in passed)
        warnings.append("Every rate passed: the answer is a lower bound (--max-rate, --max-probes).")
    else:
        high = min(probe.request_rate for probe in probes)
        warnings.append(f"No rate from {high:g} requests per second up met the objectives.")
    if any(len(one) >= limits.max_probes for one in searches):
        warnings.append(f"A search stopped after {limits.max_probes} probes (--max-probes).")
    warnings += merge_warnings([probe.run for probe in passed])
    best = min(passed, key=lambda probe: abs(math.log(probe.request_rate / rate)), default=None)
    goodput = best.run.goodput_requests_per_s if best is not None else 0.0
    tokens = best.run.output_tokens_per_s if best is not None else 0.0
    per_hour = 3600.0 / price.cost_per_hour if price.cost_per_hour else None
    return Goodput(
        slo=objectives,
        goals={goal.name: goal.limit_s for goal in goals},
        target_attainment=limits.target_attainment,
        request_rate=rate,
        request_rate_low=low,
        request_rate_high=high,
        request_rate_interval=interval,
        goodput_requests_per_s=goodput,
        output_tokens_per_s=tokens,
        per_core=goodput / price.num_cores if price.num_cores else None,
        per_gpu=goodput / price.num_gpus if price.num_gpus else None,
        requests_per_dollar=goodput * per_hour if per_hour is not None else None,
        output_tokens_per_dollar=tokens * per_hour if per_hour is not None else None,
        num_cores=price.num_cores,
        num_gpus=price.num_gpus,
        cost_per_hour=price.cost_per_hour,
        argv=argv,
        warnings=warnings,
        probes=probes,
    )
