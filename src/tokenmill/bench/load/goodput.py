"""The highest request rate that meets an SLO, with an interval: bracket it, then look again at both ends of the doubt.

A rate passes if the wanted share of requests met every objective, every percentile is within its goal, and the queue
did not grow meanwhile (`trend`): a server that falls behind slowly can look fine in a short probe. A goal is a share of
requests too; of all shares a probe tells the one that is furthest from what is wanted of it. The rate grows, or
shrinks, until one passes and one does not. Then as many probes as bisecting would take, and one, go in turns to the
lower and the upper quartile of what is believed (`belief`): where the curve is steep that is bisection, and where a
verdict is a matter of luck it is a second and a third look at the same ends. Each probe draws its own text and
arrivals.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from statistics import fmean, mean

from ...core.errors import ConfigError
from ..quality.stats import wilson
from ..result import Goodput, Interval, Probe, Run
from .belief import CONFIDENCE, Belief, Evidence, believe, design_effect, log_odds
from .measure import OBJECTIVES, e2el_s, met, parse_objectives
from .stats import merge_warnings
from .trend import drift, steady_blocks

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
            belief = belief_of(probes)
            low, high = belief.interval
            if not left or high / low <= 1 + limits.tolerance:
                break
            left -= 1
            rate = belief.quantile(0.75 if len(probes) % 2 else 0.25)
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


def belief_of(probes: Sequence[Probe]) -> Belief:
    return believe([evidence_of(probe) for probe in probes])


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
        belief = belief_of(probes)
        rate = belief.quantile(0.5)
        low, high = belief.interval
        values = [belief_of(one).quantile(0.5) for one in searches if is_bracketed(one)]
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
