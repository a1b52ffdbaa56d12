"""What goes on beside a step: the front end and clients compute for a request that comes, one that ends and tokens that
go out. Where the step's threads have all cores, that holds the step up, and its duration says so.

How long such work takes is not in a log; when it begins is. An event counts for a step by the share of `WORK_S` from
its time on that lies within the step, so that one between two steps counts for both by half.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...core.step_records import FAILED, VOID, LogFacts, StepRecords, TimedStep
from ...sim.calibrated import Calibrated

WORK_S = 0.002


class Observed(NamedTuple):
    """A step; the requests that came and that ended within it, and the tokens that went out at its begin."""

    step: TimedStep
    arrived: float = 0.0
    ended: float = 0.0
    handed: float = 0.0

    def predicted(self, law: Calibrated) -> float:
        """Seconds, by the law."""
        return law.predict(self.step.work) + law.held_up_s(self.arrived, self.ended, self.handed)


def observed(log: StepRecords) -> list[Observed]:
    """The steps of a log that say what steps take."""
    steps = log.steps
    arrived = _within(steps, (request.arrival_s for request in log.requests))
    ended = _within(steps, (request.ended_s for request in log.requests))
    found = []
    for number, step in enumerate(steps):
        before = steps[number - 1] if number else None
        follows = before is not None and before.number + 1 == step.number
        handed = before.num_drawn if follows and before is not None else 0
        if not step.flags & (FAILED | VOID) and step.duration_s > 0 and step.num_tokens:
            found.append(Observed(step, arrived[number], ended[number], handed))
    return found


def holds_up(facts: LogFacts) -> bool:
    """Whether steps leave no core to others. A log that does not say how many there are is of one that had all."""
    return facts.threads >= facts.cores


def _within(steps: Sequence[TimedStep], times: Iterable[float]) -> list[float]:
    ends = [step.ended_s for step in steps]
    begins = [step.ended_s - step.duration_s for step in steps]
    found = [0.0] * len(steps)
    for time_s in times:
        i = bisect_right(ends, time_s)
        while i < len(steps) and begins[i] < time_s + WORK_S:
            found[i] += max(0.0, min(ends[i], time_s + WORK_S) - max(begins[i], time_s)) / WORK_S
            i += 1
    return found
