"""Several endpoints under equal loads, in turns, and the verdicts the intervals allow.

In every repeat each endpoint gets the same seeded load once, in an order that moves on by one each repeat, so that a
machine that changes speed changes it for all. With a warm phase it gets the load twice in its turn: "cold", when all
text is new to it, and "warm", when the text that requests share is known and the rest is new.

Who looks at ten figures finds one that differs by chance. So one metric is declared primary beforehand and has the
verdict: a paired t-test of the logarithms of the repeats' ratios. All others are secondary, corrected by Holm for their
number, at a level of their own, so that of a hundred comparisons of equals at most four give any verdict at all. Both
need enough repeats that chance alone would rarely agree (stats.can_decide).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from ...core.errors import ConfigError
from ..result import Comparison, Figure, Ratio, Run
from ..stats import VERDICT_CONFIDENCE, can_decide, holm, merge_warnings, paired_ratio
from .run import Load, Observe, run_load
from .schedule import Schedule
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
PRIMARY_LEVEL = 1 - VERDICT_CONFIDENCE
SECONDARY_LEVEL = 0.01
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


def choose_primary(schedule: Schedule, objectives: dict[str, float], asked: str | None) -> str:
    """The metric that decides: what was asked for, else throughput where the server sets the pace, and latency where
    the schedule does and all servers have the same throughput. Raises ConfigError."""
    names = [name for name, _ in metrics_of(objectives)]
    if asked is not None and asked not in names:
        raise ConfigError(f"--primary-metric is one of {', '.join(names)}, not {asked}.", param="primary_metric")
    return asked or ("e2el_s.p50" if schedule.is_paced else "output_tokens_per_s")


def metrics_of(objectives: dict[str, float]) -> list[tuple[str, bool]]:
    """Without objectives goodput is the request rate."""
    return [metric for metric in METRICS if objectives or not metric[0].startswith("goodput")]


async def compare(
    targets: Sequence[Target],
    load: Load,
    num_repeats: int,
    observe: Observe | None,
    with_warm: bool = False,
    primary: str = "output_tokens_per_s",
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
    return conclude(targets, runs, load, primary)


def with_fresh_text(load: Load) -> Load:
    """The load with its shared text as it is and all other drawn anew."""
    return replace(load, make_plan=lambda num, seed, rate: load.make_plan(num, seed, rate).with_fresh_text(WARM))


def conclude(targets: Sequence[Target], runs: list[Run], load: Load, primary: str) -> Comparison:
    phases = list(dict.fromkeys(run.schedule["phase"] for run in runs))
    figures: list[Figure] = []
    ratios: list[Ratio] = []
    warnings = merge_warnings(runs)
    metrics = metrics_of(load.objectives)
    for phase in phases:
        sides = [_side(target.name, phase, runs) for target in targets]
        figures += [figure for side in sides for figure in make_figures(side, metrics)]
        baseline, *candidates = sides
        made = (make_ratio(*metric, baseline, candidate) for candidate in candidates for metric in metrics)
        ratios += [ratio for ratio in made if ratio is not None]
        warnings += _uneven(sides)
    for target in targets:
        if failed := sum(run.num_failed for run in runs if run.name == target.name):
            warnings.append(f"{target.name} failed {failed} requests: its latencies are of those that succeeded.")
    num_repeats = len({run.schedule["repeat"] for run in runs})
    if runs and not can_decide(num_repeats):
        warnings.append(f"{num_repeats} repeats are too few for a verdict at {VERDICT_CONFIDENCE:.0%}.")
    if runs and primary not in {ratio.metric for ratio in ratios}:
        warnings.append(f"There is no verdict: not every run has a {primary}, the primary metric.")
    endpoints = [{"name": target.name, **target.facts()} for target in targets]
    ratios = decide(ratios, primary, num_repeats)
    return Comparison(endpoints, primary, figures, ratios, load.argv, list(dict.fromkeys(warnings)), runs)


def decide(ratios: Sequence[Ratio], primary: str, num_repeats: int) -> list[Ratio]:
    """The ratios with their verdicts, those of the primary metric first."""
    decided: list[Ratio] = []
    for is_primary, level in ((True, PRIMARY_LEVEL), (False, SECONDARY_LEVEL)):
        family = [ratio for ratio in ratios if (ratio.metric == primary) == is_primary]
        for ratio, p_value in zip(family, holm([ratio.p_value for ratio in family]), strict=True):
            verdict = "undecided"
            if can_decide(num_repeats) and p_value <= level:
                verdict = "better" if (ratio.ratio > 1.0) == ratio.higher_is_better else "worse"
            decided.append(replace(ratio, is_primary=is_primary, p_adjusted=p_value, verdict=verdict))
    return decided


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


def make_ratio(metric: str, higher_is_better: bool, baseline: Side, candidate: Side) -> Ratio | None:
    """Undecided as yet. None where a run of either has no such figure, or a zero one."""
    own = [value for value in candidate.values(metric) if value]
    other = [value for value in baseline.values(metric) if value]
    if not own or len(own) != len(candidate.runs) or len(other) != len(baseline.runs) or len(own) != len(other):
        return None
    found = paired_ratio(other, own, VERDICT_CONFIDENCE)
    return Ratio(
        phase=candidate.phase,
        metric=metric,
        higher_is_better=higher_is_better,
        baseline=baseline.endpoint,
        candidate=candidate.endpoint,
        baseline_value=median(other),
        candidate_value=median(own),
        ratio=found.ratio,
        low=found.low,
        high=found.high,
        confidence=VERDICT_CONFIDENCE,
        p_value=found.p_value,
        p_adjusted=found.p_value,
        is_primary=False,
        verdict="undecided",
    )
