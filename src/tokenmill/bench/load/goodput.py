"""The highest request rate that meets an SLO: double or halve until it is bracketed, then bisect.

A rate passes if the wanted share of requests met every objective and the queue did not grow meanwhile: a server that
falls behind slowly can look fine in a short probe, so the second half's latencies must not be longer than the first
half's (stats.has_grown). Each probe draws its own text and arrivals; repeats of the whole search give the interval.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from ..quality_stats import wilson
from ..result import Goodput, Probe, RequestRow, Run
from .measure import e2el_s
from .stats import drift_s, has_grown, mean_interval, merge_warnings

Try = Callable[[float], Awaitable[Probe]]


@dataclass(frozen=True, slots=True)
class Search:
    """start_rate: the first tried. tolerance: stop when the bracket's ends are within this ratio of each other."""

    start_rate: float = 1.0
    min_rate: float = 0.01
    max_rate: float = 10_000.0
    tolerance: float = 0.05
    target_attainment: float = 0.9
    max_probes: int = 20


@dataclass(frozen=True, slots=True)
class Price:
    num_cores: int | None = None
    num_gpus: int | None = None
    cost_per_hour: float | None = None


def judge(rate: float, run: Run, target_attainment: float) -> Probe:
    """Whether `rate` passed, from its run."""
    attainment = run.slo.attainment or 0.0
    num_met = round(attainment * run.num_requests)
    interval = wilson(num_met, run.num_requests) if run.num_requests else None
    halves = latency_halves(run.requests)
    stable = not has_grown(halves)
    return Probe(
        request_rate=rate,
        attainment=attainment,
        attainment_low=interval.low if interval is not None else 0.0,
        attainment_high=interval.high if interval is not None else 1.0,
        stable=stable,
        drift_s=drift_s(halves),
        passed=stable and attainment >= target_attainment,
        run=replace(run, requests=[]),
    )


def latency_halves(rows: list[RequestRow]) -> tuple[list[float], list[float]]:
    """E2EL of the requests due in the first and in the second half of the run, in the order they were due."""
    ordered = sorted((row for row in rows if row.ok), key=lambda row: row.due_s)
    middle = len(ordered) // 2
    return _latencies(ordered[:middle]), _latencies(ordered[middle:])


def _latencies(rows: list[RequestRow]) -> list[float]:
    return [latency for row in rows if (latency := e2el_s(row)) is not None]


async def search(attempt: Try, limits: Search) -> list[Probe]:
    """All probes of one search, in order. The bracket is read off them with `bracket`."""
    probes: list[Probe] = []
    rate = min(max(limits.start_rate, limits.min_rate), limits.max_rate)
    while len(probes) < limits.max_probes:
        probes.append(await attempt(rate))
        low, high = bracket(probes)
        if low is None:
            rate = probes[-1].request_rate / 2
        elif high is None:
            rate = probes[-1].request_rate * 2
        elif high / low <= 1 + limits.tolerance:
            break
        else:
            rate = math.sqrt(low * high)
        if not limits.min_rate <= rate <= limits.max_rate:
            break
    return probes


def bracket(probes: list[Probe]) -> tuple[float | None, float | None]:
    """(highest rate that passed below every failure above it, lowest rate that failed above it).

    Noise can make a rate fail and a higher one pass: then the failure counts, so the answer is never the lucky one.
    """
    failed = sorted(probe.request_rate for probe in probes if not probe.passed)
    passed = [probe.request_rate for probe in probes if probe.passed]
    high = failed[0] if failed else None
    low = max((rate for rate in passed if high is None or rate < high), default=None)
    return low, high


def conclude(
    searches: list[list[Probe]], objectives: dict[str, float], limits: Search, price: Price, argv: list[str]
) -> Goodput:
    """The answer over all repeats of the search: the mean of the rates they found."""
    found = [bracket(probes)[0] or 0.0 for probes in searches]
    interval = mean_interval(found)
    probes = [probe for probes in searches for probe in probes]
    highs = [high for probes in searches if (high := bracket(probes)[1]) is not None]
    passed = [probe for probe in probes if probe.passed and probe.request_rate in found]
    best = max(passed, key=lambda probe: probe.request_rate, default=None)
    warnings = []
    if best is None:
        warnings.append(f"No rate from {limits.min_rate:g} requests per second up met the objectives.")
    elif not highs:
        warnings.append("Every rate passed: the answer is a lower bound (--max-rate, --max-probes).")
    if any(len(p) >= limits.max_probes for p in searches):
        warnings.append(f"The search stopped after {limits.max_probes} probes, before its tolerance was reached.")
    warnings += merge_warnings([probe.run for probe in probes if probe.passed])
    goodput = best.run.goodput_requests_per_s if best is not None else 0.0
    tokens = best.run.output_tokens_per_s if best is not None else 0.0
    per_hour = 3600.0 / price.cost_per_hour if price.cost_per_hour else None
    return Goodput(
        slo=objectives,
        target_attainment=limits.target_attainment,
        request_rate=interval.mean,
        request_rate_low=min(found),
        request_rate_high=max(highs, default=None),
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
