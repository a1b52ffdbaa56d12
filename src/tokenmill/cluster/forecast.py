"""When a newcomer's first token would come, and how long each further one would take, from the cost model. Pure.

What counts is the load at the time it would run, not the present one (Mooncake, Qin et al., FAST'25): prompts before
its own are computed first, in chunks beside the rows that draw; meanwhile some of these end, and the prompts become
rows that draw. So its time is a walk over the steps to come, several alike at once.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from ..core.cost import Costs, Work
from ..core.policy import Forecast
from ..core.slo import paced_s

_LEAPS = 24
"""Steps are taken together so that a walk has about so many."""
_ANY = 0.5
"""With fewer rows that draw than this, on average, a step is not sized to their pace."""
_BUSIEST = 0.9
"""Prompts are expected to take at most so much of the time while an answer is drawn."""


class Scene(NamedTuple):
    """What a newcomer finds in one engine.

    costs        of its steps
    residual_s   until the step under way ends
    num_ahead    prompt tokens that are computed before its own
    num_own      its own, those not cached
    ends_s       when each row that draws ends at the latest, in order
    hazard       how likely a row ends before, in a second
    context      positions before a row that draws, on average
    usual        tokens of a usual prompt
    room         most tokens of prompts in a step
    least        so many they get in any case
    pace_s       the tightest target for a token of those that draw or will: steps with rows of them are sized to it
    lead_s       by how much the tightest of these is ahead of its pace
    num_rows     most rows
    inflow       prompt tokens that come in a second
    """

    costs: Costs
    residual_s: float = 0.0
    num_ahead: float = 0.0
    num_own: int = 1
    ends_s: Sequence[float] = ()
    hazard: float = 0.0
    context: float = 0.0
    usual: float = 1.0
    room: int = 1
    least: int = 1
    pace_s: float = 0.0
    lead_s: float = 0.0
    num_rows: int = 1
    inflow: float = 0.0

    def rows_left(self, at_s: float) -> float:
        """Of the rows that draw now, how many will at that time."""
        return (len(self.ends_s) - bisect_right(self.ends_s, at_s)) * math.exp(-self.hazard * at_s)

    def step_s(self, num_draws: float, num_new: float, length: float) -> float:
        """A step of rows that draw, and of so many tokens of prompts of that length."""
        num_prompts = max(1.0, num_new / max(1.0, length)) if num_new else 0.0
        behind = max(0.0, length - num_new) / 2
        context = num_draws * self.context
        return self.costs.predict(
            Work(
                num_draws + num_prompts,
                num_draws + num_new,
                context + num_new * (behind + min(num_new, length) / 2),
                context + num_prompts * behind,
            )
        )

    def room_beside(self, num_draws: float, lead_s: float) -> float:
        """Tokens of prompts in a step with rows that draw, and are so much ahead of their pace."""
        if not self.pace_s or num_draws < _ANY:
            return self.room
        alone_s = self.step_s(num_draws, 0, 0)
        token_s = (self.step_s(num_draws, self.room, self.usual) - alone_s) / self.room
        within_s = paced_s(self.pace_s, lead_s) - alone_s
        return max(self.least, min(self.room, within_s / token_s if token_s else self.room))


def forecast(scene: Scene) -> Forecast:
    if not scene.costs.is_known:
        return Forecast()
    at_s, joined, lead_s = scene.residual_s, 0.0, scene.lead_s - scene.residual_s
    num_left = scene.num_ahead
    leap = max(1, math.ceil(num_left / max(1, scene.room) / _LEAPS))
    while True:
        num_draws = min(scene.num_rows, scene.rows_left(at_s) + joined)
        room = max(1.0, scene.room_beside(num_draws, lead_s))
        if num_left < room:
            break
        times = min(leap, int(num_left // room))
        step_s = scene.step_s(num_draws, room, scene.usual)
        at_s += times * step_s
        num_left -= times * room
        joined = joined * math.exp(-scene.hazard * times * step_s) + times * room / scene.usual
        lead_s += times * (scene.pace_s - step_s)
        if joined >= 1:  # who has just got a first token is ahead of nothing
            lead_s = min(lead_s, 0.0)
        lead_s = max(lead_s, -scene.pace_s)
    wait_s = at_s
    # What is left of the others shares the first step of its own prompt.
    own = float(scene.num_own)
    while own > 0:
        num_new = min(own, max(1.0, room - num_left))
        step_s = scene.step_s(num_draws, num_new + num_left, scene.num_own)
        at_s += step_s
        own -= num_new
        lead_s = max(lead_s + scene.pace_s - step_s, -scene.pace_s)
        if num_left:
            joined += num_left / scene.usual
            num_left = 0.0
        if own > 0:
            num_draws = min(scene.num_rows, scene.rows_left(at_s) + joined)
            room = max(1.0, scene.room_beside(num_draws, lead_s))
    return Forecast(wait_s, at_s, _tpot_s(scene, min(scene.num_rows, num_draws + 1)))


def _tpot_s(scene: Scene, num_draws: float) -> float:
    """Draws wait for the prompts that come meanwhile, in steps that have room for so many."""
    alone_s = scene.step_s(num_draws, 0, 0)
    room = scene.room_beside(num_draws, 0.0)
    full_s = scene.step_s(num_draws, room, scene.usual)
    share = min(_BUSIEST, scene.inflow * (full_s - alone_s) / max(1, room))
    return min(full_s, alone_s / (1 - share))


_GAIN = 1 / 32
_MOST_OFF = 0.5
UPPER = 0.95
"""Of those that are let in by an upper quantile, as many are to have what was forecast by then."""
_STEP = 1 / 32
_FIRST, _LEAST, _MOST = 0.1, 0.03, 0.5
"""The margin before anything was compared, and its bounds."""


class Calibration:
    """By how much forecasts are off, from those that came true: what the walk leaves out, such as the time that
    messages take, and what is unlike lately.

    least_s: times up to it say nothing of the factor, since they are of little more than a step.

    factor  is to be put to the next forecasts
    margin  is to be added to them, as a share of the target, for an upper quantile. It follows the errors by steps
            (Robbins and Monro 1951): up for one above it, down for one below, by so much less as there are to be more
    """

    def __init__(self, least_s: float = 0.0) -> None:
        self._least_s = least_s
        self._log = 0.0
        self.margin = _FIRST

    @property
    def factor(self) -> float:
        return math.exp(self._log)

    def note(self, told_s: float, took_s: float, target_s: float = 0.0) -> None:
        """It was forecast, with the factor of then, and took so long, or as long at least. What had no target says
        nothing of the margin."""
        if min(told_s, took_s) > self._least_s:
            off = max(-1.0, min(1.0, math.log(took_s / told_s)))
            self._log = max(-_MOST_OFF, min(_MOST_OFF, self._log + _GAIN * off))
        if target_s:
            step = UPPER if took_s - told_s > self.margin * target_s else UPPER - 1
            self.margin = max(_LEAST, min(_MOST, self.margin + _STEP * step))
