"""Fits a cost model of steps to step logs: parts of them are held out to tell its errors, then all of them are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...core.errors import ConfigError
from ...core.step_records import LogFacts, Machine, StepRecords
from ...sim.calibrated import Calibrated, Line
from .cost_model import Fitted, fit_law
from .edges import Point, backs, fit_line, fronts, gaps, passages
from .errors import errors_of
from .observed import Observed, observed

NUM_BLOCKS, EACH = 25, 5
"""A log is cut into so many spans of busy time, and of so many one after the other the last is held out."""
LEAST_STEPS = 100


def fit(logs: Sequence[StepRecords], runs: Sequence[tuple[dict[str, Any], str]] = ()) -> Fitted:
    """The law of all steps of the logs, whose errors are of one that was fitted without those held out. Raises
    ConfigError for logs of different engines, and of too few steps."""
    facts = logs[0].facts
    for log in logs[1:]:
        check_same_engine(facts, log.facts, "The first log")
    seen = [observed(log, logs) for log in logs]
    spans = [span for each in seen for span in spans_of(each)]
    held, kept = (
        [span for number, span in enumerate(spans) if (number % EACH == EACH - 1) == is_held]
        for is_held in (True, False)
    )
    num_steps = sum(map(len, spans))
    if num_steps < LEAST_STEPS or not any(held) or not any(kept):
        told = f"The logs have {num_steps} steps; a law needs {LEAST_STEPS}, over some time."
        raise ConfigError(f"{told} Send the server more requests.", param="log")
    errors = errors_of(fit_law(kept, facts).law, held)
    gap = fit_line([point for each in seen for point in gaps([one.step for one in each])])
    front, back = _edges(logs, runs)
    law, slowness = fit_law(spans, facts)
    return Fitted(replace(law, errors=errors, gap=gap, front=front, back=back), slowness)


def speed_factor(law: Calibrated, steps: Sequence[Observed]) -> float:
    """How many times as long as by the law these steps took: what `Calibrated.scaled` takes."""
    return sum(each.step.duration_s for each in steps) / sum(each.predicted(law) for each in steps)


def check_same_engine(machine: Machine | LogFacts, facts: LogFacts, name: str) -> None:
    """Raises ConfigError where steps of the two are not of one law."""
    for field in ("numerics_id", "processor", "isa", "threads"):
        mine, its = getattr(machine, field), getattr(facts, field)
        if mine != its:
            told = f"{name} and a log are of different engines: {field} is {mine} and {its}."
            raise ConfigError(f"{told} Calibrate each alone.", param="log")


def spans_of(seen: Sequence[Observed]) -> list[list[Observed]]:
    """By spans of busy time: neighbours are too alike for one to be a test of what the other taught, and a server that
    did nothing for an hour has learned nothing in it."""
    span_s = sum(each.step.duration_s for each in seen) / NUM_BLOCKS
    parts: list[list[Observed]] = [[] for _ in range(NUM_BLOCKS)]
    busy_s = 0.0
    for each in seen:
        parts[min(NUM_BLOCKS - 1, int(busy_s / span_s))].append(each)
        busy_s += each.step.duration_s
    return parts


def _edges(logs: Sequence[StepRecords], runs: Sequence[tuple[dict[str, Any], str]]) -> tuple[Line, Line]:
    """front and back."""
    before: list[Point] = []
    after: list[Point] = []
    for run, name in runs:
        found = passages(run, logs, name)
        before += fronts(found, logs)
        after += backs(found, logs)
    if runs and not after:
        told = f"No request of {runs[0][1]} is in the logs; it must be of the same load and machine."
        raise ConfigError(told, param="run")
    return fit_line(before), fit_line(after)
