"""Several endpoints under equal loads, in turns, and the verdicts the intervals allow.

In every repeat each endpoint gets the same seeded load once, in an order that moves on by one each repeat, so that a
machine that changes speed changes it for all. With a warm phase it gets the load twice in its turn: "cold", when all
text is new to it, and "warm", when the text that requests share is known and the rest is new. A verdict needs an
interval that leaves out 1 and enough repeats that chance alone would rarely agree (stats.can_decide).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from ..result import Comparison, Figure, Ratio, Run
from .run import Load, Observe, run_load
from .stats import CONFIDENCE, can_decide, merge_warnings, ratio_of_medians
from .target import Target

COLD, WARM = "cold", "warm"

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
COUNTS = ("prefix_hit_share", "input_tokens", "output_tokens", "num_failed")
"""Figures beside the metrics: no ratio of them is a verdict, but they say whether equal work was done."""


@dataclass(frozen=True, slots=True)
class Side:
    """The runs of one endpoint in one phase, by repeat."""

    endpoint: str
    phase: str
    runs: list[Run]

    def values(self, metric: str) -> list[float | None]:
        return [value_of(run, metric) for run in self.runs]


def value_of(run: Run, metric: str) -> float | None:
    """A figure by its dotted name."""
    name, _, part = metric.partition(".")
    value = getattr(run, name)
    return getattr(value, part) if part else value


async def compare(
    targets: Sequence[Target], load: Load, num_repeats: int, observe: Observe | None, with_warm: bool = False
) -> Comparison:
    """The first target is the baseline."""
    runs: list[Run] = []
    for repeat in range(num_repeats):
        seeded = replace(load, seed=load.seed + repeat)
        phases = {COLD: seeded} | ({WARM: with_fresh_text(seeded)} if with_warm else {})
        shift = repeat % len(targets)
        for target in [*targets[shift:], *targets[:shift]]:
            for phase, phase_load in phases.items():
                run = await run_load(target, phase_load, observe=observe, repeat=repeat)
                runs.append(replace(run, schedule=run.schedule | {"phase": phase}))
    return conclude(targets, runs, load)


def with_fresh_text(load: Load) -> Load:
    """The load with its shared text as it is and all other drawn anew."""
    return replace(load, make_plan=lambda num, seed, rate: load.make_plan(num, seed, rate).with_fresh_text(WARM))


def conclude(targets: Sequence[Target], runs: list[Run], load: Load) -> Comparison:
    phases = list(dict.fromkeys(run.schedule["phase"] for run in runs))
    figures: list[Figure] = []
    ratios: list[Ratio] = []
    warnings = merge_warnings(runs)
    # Without objectives goodput is the request rate.
    metrics = [metric for metric in METRICS if load.objectives or not metric[0].startswith("goodput")]
    for phase in phases:
        sides = [_side(target.name, phase, runs) for target in targets]
        figures += [figure for side in sides for figure in make_figures(side, metrics)]
        baseline, *candidates = sides
        made = (make_ratio(*metric, baseline, candidate, load.seed) for candidate in candidates for metric in metrics)
        ratios += [ratio for ratio in made if ratio is not None]
        warnings += _uneven(sides)
    for target in targets:
        if failed := sum(run.num_failed for run in runs if run.name == target.name):
            warnings.append(f"{target.name} failed {failed} requests: its latencies are of those that succeeded.")
    num_repeats = len({run.schedule["repeat"] for run in runs})
    if runs and not can_decide(num_repeats):
        warnings.append(f"{num_repeats} repeats are too few for a verdict at {CONFIDENCE:.0%}.")
    endpoints = [{"name": target.name, **target.facts()} for target in targets]
    return Comparison(endpoints, figures, ratios, load.argv, list(dict.fromkeys(warnings)), runs)


def _side(name: str, phase: str, runs: Sequence[Run]) -> Side:
    own = [run for run in runs if run.name == name and run.schedule["phase"] == phase]
    return Side(name, phase, sorted(own, key=lambda run: run.schedule["repeat"]))


def _uneven(sides: Sequence[Side]) -> list[str]:
    """What keeps one phase of a comparison from being one of equal loads."""
    warnings = []
    if len({side.runs[0].dataset["digest"] for side in sides if side.runs}) > 1:
        warnings.append("The endpoints got different bodies (model name, prompt format or replies differ).")
    if any(run.num_failed for side in sides for run in side.runs):
        return warnings
    for field, words in (("input_tokens", "counted different prompts"), ("output_tokens", "wrote different lengths")):
        counts = {side.endpoint: sum(getattr(run, field) for run in side.runs) for side in sides}
        if len(set(counts.values())) > 1:
            named = ", ".join(f"{name} {count:,}" for name, count in counts.items())
            warnings.append(f"The endpoints {words} ({named} tokens): throughputs are not of equal work.")
    return warnings


def make_figures(side: Side, metrics: Sequence[tuple[str, bool]] = METRICS) -> list[Figure]:
    """Of every metric and count that all runs of a side have."""
    figures = []
    for metric in (*(name for name, _ in metrics), *COUNTS):
        values = [value for value in side.values(metric) if value is not None]
        if values and len(values) == len(side.runs):
            figures.append(Figure(side.endpoint, side.phase, metric, median(values), min(values), max(values)))
    return figures


def make_ratio(metric: str, higher_is_better: bool, baseline: Side, candidate: Side, seed: int) -> Ratio | None:
    """None where a run of either has no such figure, or a zero one."""
    own = [value for value in candidate.values(metric) if value]
    other = [value for value in baseline.values(metric) if value]
    if len(own) != len(candidate.runs) or len(other) != len(baseline.runs):
        return None
    ratio, low, high = ratio_of_medians(other, own, seed)
    verdict = "undecided"
    if can_decide(len(own)) and not low <= 1.0 <= high:
        verdict = "better" if (ratio > 1.0) == higher_is_better else "worse"
    return Ratio(
        phase=candidate.phase,
        metric=metric,
        higher_is_better=higher_is_better,
        baseline=baseline.endpoint,
        candidate=candidate.endpoint,
        baseline_value=median(other),
        candidate_value=median(own),
        ratio=ratio,
        low=low,
        high=high,
        confidence=CONFIDENCE,
        verdict=verdict,
    )
