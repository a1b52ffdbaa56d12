"""What passes around steps: the engine's host time between two of them, and what a front end and its clients take
before a request and after a token. The latter two come from a run of `bench` beside the log: both have the times of one
machine's monotonic clock, and requests are found by the lengths of their prompts, in their order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ...core.cost import non_negative
from ...core.errors import ConfigError
from ...core.step_records import StepRecords, TimedRequest, TimedStep
from ...sim.calibrated import Line

_CUT, _FAR, _ROUNDS = 0.9, 2.0, 4
"""Observations count as at most this quantile of them, and then as at most so many times what the line says: one that
had to wait for a processor says little of what it takes."""
_SURE = 1e-6
_LEAST = 8
"""Observations that a line needs."""
_ALONE_S = 0.02
"""Before a request, for which no other was sent."""
_APART_S = 5.0
"""Between a client's sending and the front end's having it, at most."""


class Point(NamedTuple):
    number: float
    seconds: float


def fit_line(points: Sequence[Point]) -> Line:
    """Of no negative coefficient; of too few points, no line."""
    if len(points) < _LEAST:
        return Line()
    numbers = np.array([point.number for point in points])
    seconds = np.clip([point.seconds for point in points], 0.0, None)
    quantities = np.stack((np.ones(len(numbers)), numbers), axis=1)
    products = (quantities.T @ quantities).tolist()
    most, found = np.quantile(seconds, _CUT), [0.0, 0.0]
    for _ in range(_ROUNDS):
        wanted = np.minimum(seconds, most)
        found = non_negative(products, (quantities.T @ wanted).tolist(), (_SURE, _SURE))
        most = _FAR * (quantities @ np.array(found))
    return Line(found[0], found[1], len(points))


def gaps(steps: Sequence[TimedStep]) -> list[Point]:
    """Of rows: from the end of the step before, or from when this one was planned, to its end, but for its own time."""
    return [
        Point(step.num_rows, step.ended_s - max(before.ended_s, step.planned_s) - step.duration_s)
        for before, step in pairwise(steps)
        if step.number == before.number + 1
    ]


class Passage(NamedTuple):
    """A client's request and the engine's. first_s: when its first token reached the client. log: which one has it."""

    sent_s: float
    first_s: float
    request: TimedRequest
    log: int = 0


def passages(run: Mapping[str, Any], logs: Sequence[StepRecords], name: str) -> list[Passage]:
    """Requests of a bench run, of file `name`, that a log has, too. Raises ConfigError for what is no run of one."""
    try:
        start_s = float(run["client"]["clock_start_s"])
        rows = [
            (start_s + row["sent_s"], start_s + row["first_s"], row["input_tokens"])
            for row in run["requests"]
            if row["ok"] and None not in (row["sent_s"], row["first_s"], row["input_tokens"])
        ]
    except (KeyError, TypeError, ValueError) as error:
        told = f"{name} is no result of tokenmill bench serve with its requests."
        raise ConfigError(told, param="run") from error
    by_length: dict[int, list[tuple[TimedRequest, int]]] = defaultdict(list)
    all_requests = ((request, number) for number, log in enumerate(logs) for request in log.requests)
    for request, number in sorted(all_requests, key=lambda one: one[0].arrival_s):
        if request.first_token_s and not request.num_preemptions:
            by_length[request.num_prompt].append((request, number))
    return list(_matched(sorted(rows), by_length))


def _matched(
    rows: Sequence[tuple[float, float, int]], by_length: dict[int, list[tuple[TimedRequest, int]]]
) -> Iterator[Passage]:
    for sent_s, first_s, num_prompt in rows:
        waiting = by_length.get(num_prompt, [])
        while waiting and waiting[0][0].arrival_s < sent_s:
            waiting.pop(0)
        if waiting and waiting[0][0].arrival_s < sent_s + _APART_S and waiting[0][0].first_token_s <= first_s:
            yield Passage(sent_s, first_s, *waiting.pop(0))


def fronts(found: Sequence[Passage], logs: Sequence[StepRecords]) -> list[Point]:
    """Of prompt tokens: from a client's sending to the request's first plan, of those that came alone to an idle
    engine, and so waited neither for a step nor for the front end to read others."""
    all_ends = [[step.ended_s for step in log.steps] for log in logs]
    all_begins = [[step.planned_s for step in log.steps] for log in logs]
    sent = sorted(passage.sent_s for passage in found)
    points = []
    for passage in found:
        begins, ends = all_begins[passage.log], all_ends[passage.log]
        if bisect_left(sent, passage.request.scheduled_s) - bisect_left(sent, passage.sent_s - _ALONE_S) > 1:
            continue
        at_s = passage.request.scheduled_s
        i = bisect_left(begins, at_s)  # the first step planned then or later
        if i == 0 or (ends[i - 1] < passage.sent_s):
            points.append(Point(passage.request.num_prompt, at_s - passage.sent_s))
    return points


def backs(found: Sequence[Passage], logs: Sequence[StepRecords]) -> list[Point]:
    """Of rows of the step: from the commit of a first token to the client's having it."""
    all_commits = [[step.committed_s for step in log.steps] for log in logs]
    points = []
    for passage in found:
        commits, steps = all_commits[passage.log], logs[passage.log].steps
        i = bisect_left(commits, passage.request.first_token_s)
        if i < len(steps):
            points.append(Point(steps[i].num_rows, passage.first_s - passage.request.first_token_s))
    return points
