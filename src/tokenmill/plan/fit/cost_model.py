"""Fits the cost model of `sim.calibrated` to steps: least squares of relative errors, of which those much larger than
usual count only so much.

A stall of the machine lengthens a step by an amount that says nothing of its work, so errors beyond `_FAR` times their
usual size are cut to that. What else runs on a machine makes all steps slower for a while, so each span of time has a
speed beside it: one that the cost model cannot explain, since it is fitted first without.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.cost import non_negative, read_share
from ...core.step_records import LogFacts, Machine, TimedStep
from ...sim.calibrated import NOT_KNOWN, Beside, Calibrated, Curve, Kind, kind_of, shares, sharing_of
from .observed import Observed

TOKEN_KNOTS = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
ROW_KNOTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
DRAWN_KNOTS = (0, 1, 8, 64)
_ROUNDS = 12
_FAR, _NEAR = 3.0, 0.02
"""Relative errors count as at most so many times the median amount, or this, whichever is more."""
_LAW_FIRST = 3
"""Rounds in which all spans are taken for equally fast."""
_HELD = 20
"""Steps that hold the speed of a span to that of the others."""
_SURE = 1e-4
"""See core.least_squares.non_negative."""
_SURE_OF_EXPERTS = 1e-5
"""What a curve of tokens and the share of the experts could explain alike, experts do: theirs is a known curve, and it
holds between the sizes of steps that were measured."""
_NUM_FIXED = 3


class Fitted(NamedTuple):
    """cost_model: without its lines and errors. slowness: of each span, how many times as long as by the cost model its
    steps took; 1 of all seconds together."""

    cost_model: Calibrated
    slowness: tuple[float, ...]


def fit_cost_model(
    spans: Sequence[Sequence[Observed]], facts: LogFacts, token_knots: Sequence[int] = TOKEN_KNOTS
) -> Fitted:
    """The cost model of the steps of these spans of time, at least one."""
    seen = [each for span in spans for each in span]
    steps = [each.step for each in seen]
    places = np.repeat(np.arange(len(spans)), [len(span) for span in spans])
    knots = [
        _knots(token_knots, [step.num_tokens for step in steps]),
        _knots(ROW_KNOTS, [step.num_rows for step in steps]),
        _knots(DRAWN_KNOTS, [step.num_drawn for step in steps]),
    ]
    measured = np.array([step.duration_s for step in steps])
    chosen = facts.chosen_experts
    quantities = np.array([_quantities(step, knots, chosen) for step in steps])
    events = np.array([each[1:] for each in seen])
    num_held = int((events[:, :2].sum(axis=1) > 0).sum())
    if num_held:
        quantities = np.concatenate((quantities, events), axis=1)
    found, slowness = _solve(quantities, measured, places, len(spans), has_experts=chosen > 0)
    num_fixed = _NUM_FIXED + (chosen > 0)
    ends = [num_fixed, *(num_fixed + n for n in np.cumsum([len(each) for each in knots]).tolist())]
    tokens, rows, drawn = (
        Curve(each, found[low:high]) for each, (low, high) in zip(knots, pairwise(ends), strict=True)
    )
    beside, crowded_s = NOT_KNOWN, 0.0
    if num_held:
        request_s, end_s, token_s, told_s, crowded_s = found[ends[-1] :]
        beside = Beside(request_s, end_s, token_s, told_s, num_held).times(sharing_of(facts))
    machine = Machine(**{each.name: getattr(facts, each.name) for each in fields(Machine)})
    step_s, position_s, context_s = found[:_NUM_FIXED]
    cost_model = Calibrated(
        machine,
        step_s,
        position_s,
        context_s,
        tokens,
        rows,
        drawn,
        _kinds(steps),
        beside=beside,
        crowded_s=crowded_s,
        experts_s=found[_NUM_FIXED] if chosen else 0.0,
    )
    return Fitted(cost_model, tuple(slowness.tolist()))


def _knots(knots: Sequence[int], numbers: Sequence[int]) -> list[float]:
    """Those between which something was measured."""
    values = np.array(numbers)
    kept = [float(low) for low, high in pairwise(knots) if ((values > low) & (values <= high)).any()]
    return sorted({0.0, *kept})


def _quantities(step: TimedStep, knots: Sequence[Sequence[float]], chosen: float) -> list[float]:
    """chosen: the share of the experts that a token chooses; 0: there are none."""
    experts = [read_share(chosen, step.num_tokens)] if chosen else []
    return [
        1.0, step.num_positions, step.num_context, *experts, *shares(knots[0], step.num_tokens),
        *shares(knots[1], step.num_rows), *shares(knots[2], step.num_drawn),
    ]  # fmt: skip


def _solve(
    quantities: NDArray[np.float64],
    measured: NDArray[np.float64],
    places: NDArray[np.int64],
    num_spans: int,
    *,
    has_experts: bool,
) -> tuple[list[float], NDArray[np.float64]]:
    """Coefficients, of which none is negative, and the slowness of each span. The first round weighs errors by what was
    measured, the others by what was predicted: else steps that happened to be short would count for more than those
    that happened to be long."""
    sure = [_SURE] * quantities.shape[1]
    if has_experts:
        sure[_NUM_FIXED] = _SURE_OF_EXPERTS
    scale, wanted = measured, np.ones(len(measured))
    found, slowness = np.zeros(quantities.shape[1]), np.ones(num_spans)
    for number in range(_ROUNDS):
        scaled = quantities / scale[:, None]
        found = np.array(non_negative((scaled.T @ scaled).tolist(), (scaled.T @ wanted).tolist(), sure))
        scale = np.maximum(quantities @ found, 0.01 * measured)
        if number >= _LAW_FIRST:
            slowness = slowness_of(measured / scale, places, num_spans)
            slowness /= (scale * slowness[places]).sum() / scale.sum()
        off = measured / (scale * slowness[places]) - 1
        most = max(_NEAR, _FAR * float(np.median(np.abs(off))))
        wanted = 1 + np.clip(off, -most, most)
    coefficients: list[float] = found.tolist()
    return coefficients, slowness


def slowness_of(ratios: NDArray[np.float64], places: NDArray[np.int64], num_spans: int) -> NDArray[np.float64]:
    """Of each span, how many times as long as predicted its steps took; `ratios` says it of each step, which is of the
    span in `places`. A span of few steps is held near 1."""
    found = np.ones(num_spans)
    for span in range(num_spans):
        these = ratios[places == span]
        if len(these):
            found[span] = np.median(these) ** (len(these) / (len(these) + _HELD))
    return found


def _kinds(steps: Sequence[TimedStep]) -> tuple[Kind, ...]:
    """What was seen."""
    contexts: dict[tuple[int, int], list[float]] = defaultdict(list)
    for step in steps:
        contexts[kind_of(step.work)].append(step.num_context / step.num_rows)
    return tuple(Kind(*key, len(found), min(found), max(found)) for key, found in sorted(contexts.items()))
