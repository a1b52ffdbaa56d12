"""Several endpoints under equal loads, in turns, and the verdicts the intervals allow.

In every repeat each endpoint gets the same seeded load once, in an order that moves on by one each repeat, so that a
machine that changes speed changes it for all. A verdict needs an interval that leaves out 1 and enough repeats that
chance alone would rarely agree (stats.can_decide).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from ..result import Comparison, Ratio, Run
from .run import Load, Observe, run_load
from .stats import CONFIDENCE, can_decide, merge_warnings, ratio_of_medians
from .target import Target

# (metric, higher is better)
METRICS = (
    ("output_tokens_per_s", True),
    ("requests_per_s", True),
    ("goodput_requests_per_s", True),
    ("ttft_s.p50", False),
    ("ttft_s.p99", False),
    ("tpot_s.p50", False),
    ("itl_s.p50", False),
    ("itl_s.p99", False),
    ("e2el_s.p50", False),
    ("e2el_s.p99", False),
)


def value_of(run: Run, metric: str) -> float | None:
    """A figure by its dotted name."""
    name, _, part = metric.partition(".")
    value = getattr(run, name)
    return getattr(value, part) if part else value


async def compare(targets: Sequence[Target], load: Load, num_repeats: int, observe: Observe | None) -> Comparison:
    """The first target is the baseline."""
    runs: list[Run] = []
    for repeat in range(num_repeats):
        seeded = replace(load, seed=load.seed + repeat)
        shift = repeat % len(targets)
        for target in [*targets[shift:], *targets[:shift]]:
            runs.append(await run_load(target, seeded, observe=observe, repeat=repeat))
    return conclude(targets, runs, load)


def conclude(targets: Sequence[Target], runs: list[Run], load: Load) -> Comparison:
    by_name = {
        target.name: sorted((run for run in runs if run.name == target.name), key=lambda run: run.schedule["repeat"])
        for target in targets
    }
    baseline, *candidates = (target.name for target in targets)
    ratios = [
        ratio
        for candidate in candidates
        for metric, higher in METRICS
        if (ratio := make_ratio(metric, higher, by_name, baseline, candidate, load.seed)) is not None
    ]
    warnings = merge_warnings(runs)
    digests = {run.dataset["digest"] for run in runs if run.schedule["repeat"] == 0}
    if len(digests) > 1:
        warnings.append("The endpoints got different bodies (model name, prompt format or replies differ).")
    for name, own in by_name.items():
        if failed := sum(run.num_failed for run in own):
            warnings.append(f"{name} failed {failed} requests: its latencies are of those that succeeded.")
    if len(by_name[baseline]) and not can_decide(len(by_name[baseline])):
        warnings.append(f"{len(by_name[baseline])} repeats are too few for a verdict at {CONFIDENCE:.0%}.")
    return Comparison([{"name": t.name, **t.facts()} for t in targets], ratios, load.argv, warnings, runs)


def make_ratio(
    metric: str, higher_is_better: bool, runs: dict[str, list[Run]], baseline: str, candidate: str, seed: int
) -> Ratio | None:
    """None where a run of either has no such figure, or a zero one."""
    values = {name: [value_of(run, metric) for run in runs[name]] for name in (baseline, candidate)}
    own = [value for value in values[candidate] if value]
    other = [value for value in values[baseline] if value]
    if len(own) != len(runs[candidate]) or len(other) != len(runs[baseline]):
        return None
    ratio, low, high = ratio_of_medians(other, own, seed)
    verdict = "undecided"
    if can_decide(len(own)) and not low <= 1.0 <= high:
        verdict = "better" if (ratio > 1.0) == higher_is_better else "worse"
    return Ratio(
        metric=metric,
        higher_is_better=higher_is_better,
        baseline=baseline,
        candidate=candidate,
        baseline_value=median(other),
        candidate_value=median(own),
        ratio=ratio,
        low=low,
        high=high,
        confidence=CONFIDENCE,
        verdict=verdict,
    )
