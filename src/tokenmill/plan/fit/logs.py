"""Fits a cost model of steps to step logs: parts of them are held out to tell its errors, by kinds of steps; then all
are used.

What passes around steps is fitted too: the engine's host time between two of them, and what a front end and its clients
take before a request and after a token. The latter two come from a run of `bench` beside the log: both have the times
of one machine's monotonic clock, and requests are matched by the lengths of their prompts, in their order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.cost import non_negative
from ...core.errors import ConfigError
from ...core.step_records import LogFacts, Machine, StepRecords, TimedRequest, TimedStep
from ...sim.calibrated import Calibrated, Error, Line
from .cost_model import Fitted, fit_cost_model, slowness_of
from .observed import Observed, observed

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


SHORT = 128
"""Tokens of a short step of prompts at most."""

_DECODES = ((1, "decode, 1 row"), (4, "decode, 2-4 rows"), (16, "decode, 5-16 rows"), (64, "decode, 17-64 rows"))
_CONTEXTS = ((256, "decode, context to 256"), (1024, "decode, context to 1024"))


def regime_of(step: TimedStep) -> str:
    """By rows of one token and of more."""
    if step.num_decode_rows == step.num_rows:
        return next((name for most, name in _DECODES if step.num_rows <= most), "decode, more rows")
    if step.num_decode_rows:
        return "mixed"
    return f"prefill, to {SHORT} tokens" if step.num_tokens <= SHORT else "prefill, more tokens"


def context_of(step: TimedStep) -> str:
    """By the mean context of its rows; "": it has chunks of prompts."""
    if step.num_decode_rows < step.num_rows:
        return ""
    mean = step.num_context / step.num_rows
    return next((name for most, name in _CONTEXTS if mean <= most), "decode, longer context")


NAMES = (*(name for _, name in _DECODES), "decode, more rows", f"prefill, to {SHORT} tokens", "prefill, more tokens",
         "mixed", *(name for _, name in _CONTEXTS), "decode, longer context")  # fmt: skip


def errors_of(cost_model: Calibrated, spans: Sequence[Sequence[Observed]]) -> tuple[Error, ...]:
    """Of each regime that has steps in these spans of time, and of all of them."""
    seen = [each for span in spans for each in span]
    steps = [each.step for each in seen]
    if not steps:
        return ()
    measured = np.array([step.duration_s for step in steps])
    predicted = np.array([each.predicted(cost_model) for each in seen])
    places = np.repeat(np.arange(len(spans)), [len(span) for span in spans])
    paced = predicted * slowness_of(measured / predicted, places, len(spans))[places]
    found = []
    for name in (*NAMES, "all"):
        these = [name in (regime_of(step), context_of(step), "all") for step in steps]
        if any(these):
            found.append(_error(name, measured[these], predicted[these], paced[these]))
    return tuple(found)


def _error(
    name: str, measured: NDArray[np.float64], predicted: NDArray[np.float64], paced: NDArray[np.float64]
) -> Error:
    off = predicted / measured - 1
    figures = (
        np.median(off),
        np.median(np.abs(off)),
        np.quantile(np.abs(off), 0.9),
        np.median(np.abs(paced / measured - 1)),
        predicted.sum() / measured.sum() - 1,
    )
    return Error(name, len(measured), *(round(float(each), 5) for each in figures))


NUM_BLOCKS, EACH = 25, 5
"""A log is cut into so many spans of busy time, and of so many one after the other the last is held out."""
LEAST_STEPS = 100


def fit(logs: Sequence[StepRecords], runs: Sequence[tuple[dict[str, Any], str]] = ()) -> Fitted:
    """The cost model of all steps of the logs, whose errors are of one that was fitted without those held out. Raises
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
    errors = errors_of(fit_cost_model(kept, facts).cost_model, held)
    gap = fit_line([point for each in seen for point in gaps([one.step for one in each])])
    front, back = _edges(logs, runs)
    cost_model, slowness = fit_cost_model(spans, facts)
    return Fitted(replace(cost_model, errors=errors, gap=gap, front=front, back=back), slowness)


def speed_factor(cost_model: Calibrated, steps: Sequence[Observed]) -> float:
    """How many times as long as by the cost model these steps took: what `Calibrated.scaled` takes."""
    return sum(each.step.duration_s for each in steps) / sum(each.predicted(cost_model) for each in steps)


def check_same_engine(machine: Machine | LogFacts, facts: LogFacts, name: str) -> None:
    """Raises ConfigError where steps of the two are not of one cost model."""
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
