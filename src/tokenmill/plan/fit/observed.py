"""What goes on beside a step: the front end and clients compute for a request that comes, one that ends, a step that is
told and tokens that go out, and other engines of the same machine compute steps of their own. Where all cores are
taken, that holds the step up, and its duration says so.

How long such work takes is not in a log; when it begins is. An event counts for a step by the share of `WORK_S` from
its time on that lies within the step, so that one between two steps counts for both by half. Where a step's own threads
leave cores free, it counts by the share of the step in which steps of other engines had these.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from ...core.step_records import FAILED, VOID, StepRecords, TimedStep
from ...sim.calibrated import Calibrated

WORK_S = 0.002
_SAME_CLOCK_S = 60.0
"""Logs whose clocks began further apart are of different starts of the machine."""
_MOST_OVER = 0.05
"""Of a step, in which more threads than cores may have wanted to compute. Nobody knows what others lost by that."""


class Observed(NamedTuple):
    """A step; the requests that came and that ended within it, the tokens that went out and the steps that the front
    end was told of; the share of it in which steps of other engines had all other cores."""

    step: TimedStep
    arrived: float = 0.0
    ended: float = 0.0
    handed: float = 0.0
    told: float = 0.0
    crowded: float = 0.0

    def predicted(self, cost_model: Calibrated) -> float:
        """Seconds, by the cost model."""
        held_s = cost_model.held_up_s(self.arrived, self.ended, self.handed, self.told)
        return cost_model.predict(self.step.work) + held_s + cost_model.crowd_s * self.crowded


def observed(log: StepRecords, logs: Sequence[StepRecords] = ()) -> list[Observed]:
    """The steps of a log that say what steps take. logs: of engines that may have run beside it, itself among them."""
    steps, facts = log.steps, log.facts
    beside = [each for each in logs if each is not log and abs(each.facts.unix_s - facts.unix_s) < _SAME_CLOCK_S]
    all_logs = (log, *beside)
    is_tight = facts.threads >= facts.cores
    arrived = _within(steps, ((request.arrival_s, 1) for each in all_logs for request in each.requests))
    ended = _within(steps, ((request.ended_s, 1) for each in all_logs for request in each.requests))
    commits = [(step.committed_s, step.num_drawn) for each in all_logs for step in each.steps]
    handed = _within(steps, commits)
    # A step that has all cores follows one that is told: what that takes is part of every step.
    told = [0.0] * len(steps) if is_tight else _within(steps, ((at_s, 1) for at_s, _ in commits))
    crowded, over = _crowded(steps, beside, facts.threads, facts.cores)
    found = []
    for number, step in enumerate(steps):
        if step.flags & (FAILED | VOID) or step.duration_s <= 0 or not step.num_tokens or over[number] > _MOST_OVER:
            continue
        share = 1.0 if is_tight else crowded[number]
        comes, ends, goes, tells = (share * each[number] for each in (arrived, ended, handed, told))
        found.append(Observed(step, comes, ends, goes, tells, crowded[number]))
    return found


def _within(steps: Sequence[TimedStep], events: Iterable[tuple[float, int]]) -> list[float]:
    """Of each step, how many of these (when, how many) are within it."""
    ends = [step.ended_s for step in steps]
    begins = [step.ended_s - step.duration_s for step in steps]
    found = [0.0] * len(steps)
    for time_s, num in events:
        i = bisect_right(ends, time_s)
        while i < len(steps) and begins[i] < time_s + WORK_S:
            found[i] += num * max(0.0, min(ends[i], time_s + WORK_S) - max(begins[i], time_s)) / WORK_S
            i += 1
    return found


def _crowded(
    steps: Sequence[TimedStep], beside: Sequence[StepRecords], threads: int, cores: int
) -> tuple[list[float], list[float]]:
    """Of each step, the shares of it in which steps beside had all cores that its own threads leave, and in which they
    wanted more than these."""
    changes = sorted(
        change
        for log in beside
        for step in log.steps
        for change in ((step.ended_s - step.duration_s, log.facts.threads), (step.ended_s, -log.facts.threads))
    )
    crowded, over = [0.0] * len(steps), [0.0] * len(steps)
    if not changes or not cores:
        return crowded, over
    times, taken = [at_s for at_s, _ in changes], [0]
    for _, change in changes:
        taken.append(taken[-1] + change)
    for number, step in enumerate(steps):
        begin_s, end_s = step.ended_s - step.duration_s, step.ended_s
        first, last = bisect_right(times, begin_s), bisect_right(times, end_s)
        borders = [begin_s, *times[first:last], end_s]
        for place, (low_s, high_s) in enumerate(pairwise(borders), first):
            share = (high_s - low_s) / max(1e-9, step.duration_s)
            num_over = threads + taken[place] - cores
            crowded[number] += share if num_over >= 0 and threads < cores else 0.0
            over[number] += share if num_over > 0 and taken[place] > 0 else 0.0
    return crowded, over
