"""How far the load is from what can be served in time, and what is given up first. Pure.

Each call says how much of its tightest bound it would take (`Verdict.need`); by class of priority these are averaged
over the last calls, and fade when none come. The plan says what follows, and hysteresis keeps it from flapping.

    level 0  nothing
          1  answers are shortened, where their tenants allow it
          2  classes below the one that is not served in time are turned away
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..core.terms import NUM_PRIORITY_CLASSES

_WEIGHT = 1 / 8
_FADE_S = 5.0
_MOST = 2.0
_EVER = 1e-3


class Plan(NamedTuple):
    """shorten_at  the mean need from which answers are shortened
    shed_at     that of a class from which those below it are turned away
    relief      a measure ends where the need is below so much of where it began
    """

    shorten_at: float = 0.7
    shed_at: float = 1.0
    relief: float = 0.7


class Pressure:
    """Classes below 0 or above the last one count as those."""

    def __init__(self, plan: Plan | None = None) -> None:
        self.plan = plan or Plan()
        self._means = [0.0] * NUM_PRIORITY_CLASSES
        self._noted_s = [0.0] * NUM_PRIORITY_CLASSES
        self._is_shedding = [False] * NUM_PRIORITY_CLASSES
        self._is_shortening = False

    def note(self, priority_class: int, need: float, now: float) -> None:
        """A call of the class came."""
        place = _place(priority_class)
        mean = self.mean(place, now)
        self._means[place] = mean + _WEIGHT * (min(_MOST, need) - mean)
        self._noted_s[place] = now

    def mean(self, priority_class: int, now: float) -> float:
        place = _place(priority_class)
        mean = self._means[place]
        return mean * math.exp((self._noted_s[place] - now) / _FADE_S) if mean > _EVER else 0.0

    def level(self, now: float) -> int:
        is_shedding = any([self._sheds_below(place, now) for place in range(NUM_PRIORITY_CLASSES)])
        highest = max(self.mean(place, now) for place in range(NUM_PRIORITY_CLASSES))
        self._is_shortening = highest >= self._bound(self.plan.shorten_at, self._is_shortening)
        return 2 if is_shedding else int(self._is_shortening)

    def shed_s(self, priority_class: int, now: float) -> float:
        """Seconds until the class may come again, if no call of a better one comes; 0: it may now."""
        places = [place for place in range(_place(priority_class)) if self._sheds_below(place, now)]
        until = self.plan.shed_at * self.plan.relief
        return max((_FADE_S * math.log(max(1.01, self.mean(place, now) / until)) for place in places), default=0.0)

    def _sheds_below(self, place: int, now: float) -> bool:
        if self._means[place] > _EVER:
            mean, bound = self.mean(place, now), self._bound(self.plan.shed_at, self._is_shedding[place])
            self._is_shedding[place] = mean >= bound
        return self._is_shedding[place]

    def _bound(self, at: float, is_on: bool) -> float:
        return at * self.plan.relief if is_on else at


def _place(priority_class: int) -> int:
    return max(0, min(NUM_PRIORITY_CLASSES - 1, priority_class))
