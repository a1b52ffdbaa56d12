"""The steps of a server that tells nothing of itself, made out from when tokens reached the clients of `bench` runs.

A server that batches continuously gives each request that draws one token a step, and sends the tokens of a step
together. So what comes before anybody's next token, and without a pause, is one step's; the time from one such bunch to
the next is what a step took, and first tokens tell in which step a prompt was finished. How a prompt was spread over
steps is not seen: it is taken to lie in the last ones before its first token, as many of its tokens in each as fit
beside the rows that draw; steps where another split is as likely are left out. What a server does alone after a pause
begins unseen; how long a call is on its way there and back follows from what such a prompt should have taken by the
cost model of all other steps.

What comes out has the form of a step log, to which `cost_model` is fitted as to any other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from ...core.cost import Work
from ...core.errors import ConfigError
from ...core.step_records import TimedStep
from ...sim.calibrated import Calibrated

_NEAR = 0.8
"""Events further apart than this part of the usual time between tokens are of two steps, even of different requests."""
_STALL = 8.0
"""A step that takes so many times the usual time between tokens without a prompt is none: nobody knows what was."""
_TIMED = 0.9
"""Of a run's tokens, at least, must have an event of their own: those that are part of a character have none."""


@dataclass(slots=True)
class Heard:
    """One answered request: when it was sent, its tokens' times, its lengths."""

    sent_s: float
    times: Sequence[float]
    num_prompt: int
    num_cached: int


class Token(NamedTuple):
    at_s: float
    request: int
    place: int  # in its answer, from 0


class Part(NamedTuple):
    """A step's work; rows of it that draw alone."""

    work: Work
    num_decodes: int


class Alone(NamedTuple):
    """A prompt that found the server with nothing to do: from its sending to its first token."""

    ttft_s: float
    parts: tuple[Part, ...]


class Seen(NamedTuple):
    """steps: that were seen from begin to end. alone: what their cost model tells the way of a call by."""

    steps: tuple[TimedStep, ...]
    alone: tuple[Alone, ...]


def read_run(run: Mapping[str, Any], name: str) -> list[Heard]:
    """The answered requests of a bench run, of file `name`. Raises ConfigError for what is no run of one, or does not
    have the time of each token."""
    found: list[Heard] = []
    num_tokens = 0
    lacks = ConfigError(
        f"{name} lacks the time of each token: measure without --no-event-times, against a server that sends one token"
        " an event.",
        param="black_box",
    )
    try:
        for row in run["requests"]:
            if not row["ok"] or row["input_tokens"] is None or not row["output_tokens"]:
                continue
            times = row["event_s"]
            if not times or max(row["event_tokens"] or (1,)) > 1:
                raise lacks
            num_tokens += row["output_tokens"] - 1  # a last one may be half a character, and have no event
            since_s = row["first_s"] - times[0]  # events are told by their distance from a time of the request's own
            times = [at_s + since_s for at_s in times]
            found.append(Heard(float(row["sent_s"]), times, row["input_tokens"], row["cached_tokens"] or 0))
    except (KeyError, TypeError, ValueError) as error:
        told = f"{name} is no result of tokenmill bench serve with its requests."
        raise ConfigError(told, param="black_box") from error
    if not found:
        raise ConfigError(f"{name} has no answered request.", param="black_box")
    if sum(len(each.times) for each in found) < _TIMED * num_tokens:
        raise lacks
    return found


def steps_of(heard: Sequence[Heard], step_tokens: int) -> Seen:
    """Of one run. step_tokens: most tokens of a step."""
    found = list(_steps(heard, step_tokens))
    steps = [each for each in found if isinstance(each, TimedStep)]
    return Seen(tuple(steps), tuple(each for each in found if isinstance(each, Alone)))


def ways_of(alone: Sequence[Alone], cost_model: Calibrated) -> list[float]:
    """Seconds that a call and its first token are under way, where the cost model says what the prompt took."""
    return [each.ttft_s - sum(cost_model.predict(part.work) for part in each.parts) for each in alone]


def _usual_s(heard: Sequence[Heard]) -> float:
    """Between a request's tokens."""
    pauses = [b - a for each in heard for a, b in zip(each.times, each.times[1:], strict=False)]
    return median(pauses) if pauses else 0.0


def _bunches(heard: Sequence[Heard], near_s: float) -> Iterator[list[Token]]:
    """Tokens that came together, by time. A request has one of each step."""
    tokens = sorted(
        Token(at_s, request, place) for request, each in enumerate(heard) for place, at_s in enumerate(each.times)
    )
    bunch: list[Token] = []
    there: set[int] = set()
    for token in tokens:
        if bunch and (token.request in there or token.at_s - bunch[-1].at_s > near_s):
            yield bunch
            bunch, there = [], set()
        bunch.append(token)
        there.add(token.request)
    if bunch:
        yield bunch


def _steps(heard: Sequence[Heard], step_tokens: int) -> Iterator[TimedStep | Alone]:
    """Of one run."""
    usual_s = _usual_s(heard)
    bunches = list(_bunches(heard, _NEAR * usual_s))
    ends = [median(token.at_s for token in bunch) for bunch in bunches]  # some events come early or late
    chunks, unsure = _chunks(heard, bunches, ends, step_tokens)
    open_until = [0.0] * len(bunches)  # of all that were sent by a bunch's end, when the last token comes
    order = sorted(heard, key=lambda each: each.sent_s)
    place, last_s = 0, 0.0
    for number, end_s in enumerate(ends):
        while place < len(order) and order[place].sent_s < end_s:
            last_s = max(last_s, order[place].times[-1])
            place += 1
        open_until[number] = last_s
    for number, bunch in enumerate(bunches):
        parts = _parts(heard, bunch, chunks[number], step_tokens)
        is_idle = number == 0 or open_until[number - 1] <= bunches[number - 1][-1].at_s
        if is_idle:
            if len(bunch) == 1 and len(chunks[number]) == 1 and chunks[number][0][0] == bunch[0].request:
                yield Alone(bunch[0].at_s - heard[bunch[0].request].sent_s, tuple(parts))
            continue
        took_s = (ends[number] - ends[number - 1]) / len(parts)
        is_stall = not chunks[number] and took_s > _STALL * usual_s
        if number in unsure or is_stall or took_s <= 0:  # a client that was held up hears of two steps at once
            continue
        for place, part in enumerate(parts):
            yield _timed(part, ends[number - 1] + place * took_s, took_s)


def _chunks(
    heard: Sequence[Heard], bunches: Sequence[Sequence[Token]], ends: Sequence[float], step_tokens: int
) -> tuple[list[list[tuple[int, int, int]]], set[int]]:
    """Of each bunch's step, (request, where it begins, tokens) of prompts; and the steps of which that is not sure:
    where a prompt may have been begun in the step before, whose prompts left no room for all of it."""
    chunks: list[list[tuple[int, int, int]]] = [[] for _ in bunches]
    room = [step_tokens - sum(token.place > 0 for token in bunch) for bunch in bunches]
    firsts = [(number, token.request) for number, bunch in enumerate(bunches) for token in bunch if not token.place]
    unsure: set[int] = set()
    for number, request in firsts:
        each = heard[request]
        end, earliest = each.num_prompt, bisect_right(ends, each.sent_s)
        before = sum(num for _, _, num in chunks[number - 1]) if number else 0
        if before and number - 1 > earliest and end - each.num_cached > room[number - 1]:
            unsure |= {number - 1, number}
        at, left = number, end - each.num_cached - room[number]
        while left > 0 and at > earliest:  # back to where it must have begun
            at -= 1
            left -= max(0, room[at])
        start = each.num_cached
        for step in range(at, number + 1):
            num = end - start if step == number else min(end - start, max(0, room[step]) + max(0, left) * (step == at))
            if num:
                chunks[step].append((request, start, num))
                room[step] -= num
                start += num
    return chunks, unsure


def _parts(
    heard: Sequence[Heard], bunch: Sequence[Token], chunks: Sequence[tuple[int, int, int]], step_tokens: int
) -> list[Part]:
    """What the step did; where its prompts cannot have been one step's, what all of them did, of which only the last
    drew."""
    draws = [heard[token.request].num_prompt + token.place - 1 for token in bunch if token.place]
    num_new = sum(num for _, _, num in chunks)
    num_parts = max(1, -(-(len(draws) + num_new) // step_tokens))
    parts = []
    for number in range(num_parts):
        is_last = number == num_parts - 1
        rows = []
        for _, start, num in chunks:
            begin, end = number * num // num_parts, (number + 1) * num // num_parts
            rows += [(start + begin, end - begin)] if end > begin else []
        rows += [(start, 1) for start in draws] if is_last else []
        work = Work(
            len(rows),
            sum(num for _, num in rows),
            sum(num * start + num * (num - 1) // 2 for start, num in rows),
            sum(start for start, _ in rows),
            len(bunch) if is_last else 0,
        )
        parts.append(Part(work, len(draws) if is_last else 0))
    return parts


def _timed(part: Part, begin_s: float, took_s: float) -> TimedStep:
    num_rows, num_tokens, num_positions, num_context, num_drawn = (int(each) for each in part.work[:5])
    end_s = begin_s + took_s
    return TimedStep(
        0, begin_s, begin_s, end_s, took_s, end_s, num_rows, part.num_decodes, num_tokens, num_drawn, num_rows, 0, 0, 0,
        num_positions, num_context, 0,
    )  # fmt: skip
