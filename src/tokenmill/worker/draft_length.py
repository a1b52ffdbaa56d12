"""When a model drafts, and how many tokens: as many as make the most tokens a second, by what was measured here.

With n drafts that are right with probabilities p (all before them included), a step gives 1 + sum of p tokens in the
time that the target takes to verify n and the drafter to make them. Verifying seldom costs the same for each: kernels
compute some numbers of rows for the price of fewer. So it is measured for each number of drafts a row. What lies
between those that were measured is assumed to lie on straight lines, and what was measured long ago to have become
cheaper, by which it is tried. Further drafts are assumed to be as likely as the drafter's have been lately.

What the drafter takes is more than what making these drafts does: it computes prompts, and a layer beside the target
computes all that this computes. So there is an account of what drafts have saved, and of what all of it took. A
drafter that has taken more is not called until a small share of the target's time has made up for that. Then it is
tried again, for a few steps: no texts can make it cost more than that share, however seldom it is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..core.speculation import MOST_SPECULATIVE_TOKENS

PATIENCE = 4
"""Proposals that may stay unused before there are fewer."""

LONGEST_REST = 32
"""Steps until a sequence that rests is tried again, at most."""

_SHARE = 0.01
"""Of the target's time, what a drafter may cost beyond what it saves."""
_TRIED = 16
"""Steps for which a drafter goes on that has cost more, and as many again where it has saved something in these."""
_MOST_SAVED, _MOST_LOST = 32, 64
"""Steps of the target's whose time is kept of what it has saved, to be lost where it is right no more; and what it may
have cost, for prompts, to go on where it saves something."""
_MOST_SPENT = 8
"""Times what the target's step took: a drafter that took longer was held up by something else."""

_NEW = 0.1
"""What a measured step counts, of what is known of such steps."""
_FAR = 1.5
"""A step that takes more times as long as was known counts as that: others delay it."""
_FADES = 1 / 512
"""Of what a number of drafts adds to a step, with each step of another number."""

_USUAL_CHANCE, _USUAL_CALL, _USUAL_DRAFT = 0.8, 0.3, 0.1
"""Until they are measured: how likely a draft is, and what a step of the drafter takes, and another draft that is
verified, of a step of the target's."""


@dataclass(slots=True, eq=False)
class Rest:
    """num_unused: proposals in a row of which nothing was verified: the engine does not find them worth it. num_left:
    steps until there is another."""

    num_unused: int = 0
    num_left: int = 0

    def note_step(self, has_drafts: bool) -> bool:
        """A step with drafts or without any; whether drafts are to be proposed after it."""
        if has_drafts:
            self.num_unused = self.num_left = 0
        elif self.num_left:
            self.num_left -= 1
        return not self.num_left

    def note_proposal(self) -> None:
        self.num_unused += 1
        if self.num_unused > PATIENCE:
            self.num_left = min(1 << min(self.num_unused - PATIENCE, 10), LONGEST_REST)


class DraftLength:
    """What steps and drafting take, by the size of the number of their rows, and how likely drafts are.

    balance_s  what drafts have saved, and what the drafter may cost, less what it took
    """

    def __init__(self) -> None:
        self.balance_s = 0.0
        self._pays = True
        self._num_tried, self._tried_s = 0, 0.0  # calls by which it is seen whether it saves something, and what it did
        self._chance = _USUAL_CHANCE
        self._calls: dict[int, float] = {}  # seconds by size of rows
        self._steps: dict[int, dict[int, float]] = {}  # and by drafts a row

    def note_step(self, num_rows: int, num_drafts: int, num_tokens: int, seconds: float) -> None:
        """The target has computed rows of one token and so many drafts, all together, which gave so many tokens."""
        known, number = self._steps.setdefault(num_rows.bit_length(), {}), round(num_drafts / num_rows)
        number = max(number, min(num_drafts, 1))
        _note(known, number, seconds)
        for other in known.keys() - {0, number}:
            known[other] -= _FADES * (known[other] - known.get(0, 0.0))
        if num_drafts and 0 in known:
            saved_s = num_tokens / num_rows * known[0] - min(seconds, _FAR * known[number])
            self.balance_s += saved_s
            self._tried_s += saved_s
        self.balance_s = min(self.balance_s, _MOST_SAVED * seconds)

    def note_share(self, seconds: float) -> None:
        """The target has computed for so long, prompts or other rows."""
        self.balance_s += _SHARE * seconds
        if self.balance_s >= 0:
            self._pays, self._num_tried, self._tried_s = True, 0, 0.0

    @property
    def pays(self) -> bool:
        """Whether the drafter is to be called."""
        return self._pays

    def note_spent(self, seconds: float, step_s: float, *, is_try: bool) -> None:
        """The drafter took so long behind a step of step_s. is_try: it drafted."""
        spent_s = min(seconds, _MOST_SPENT * step_s)
        self.balance_s -= spent_s
        if is_try:
            self._num_tried += 1
            self._tried_s -= spent_s
        if self._num_tried == _TRIED:
            self._pays = self.balance_s >= 0 or (self._tried_s > 0 and self.balance_s > -_MOST_LOST * step_s)
            self._num_tried, self._tried_s = 0, 0.0

    def note_call(self, num_rows: int, seconds: float, chances: Sequence[float]) -> None:
        """The drafter has computed a token for so many, of which each is right with such a chance."""
        _note(self._calls, num_rows.bit_length(), seconds)
        self._chance += _NEW * (sum(chances) / num_rows - self._chance)

    def costs(self, num_rows: int) -> list[float]:
        """What a step with 0, 1, ... drafts for each of so many rows takes, with making these drafts."""
        size = num_rows.bit_length()
        known = self._steps.get(size, {})
        plain_s = known.get(0)
        if plain_s is None:
            return [1 + (_USUAL_CALL + _USUAL_DRAFT) * num for num in range(MOST_SPECULATIVE_TOKENS + 1)]
        call_s = self._calls.get(size, _USUAL_CALL * plain_s)
        most = max(known)
        slope = max(0.0, (known[most] - plain_s) / most) if most else _USUAL_DRAFT * plain_s
        beyond = MOST_SPECULATIVE_TOKENS + 1
        points = sorted(known.items() | {(beyond, known[most] + slope * (beyond - most))})
        places, seconds = zip(*points, strict=True)
        nums = np.arange(beyond)
        return (np.interp(nums, places, seconds) + call_s * nums).tolist()

    def is_worth_more(self, costs: Sequence[float], chances: Sequence[float], most: int) -> bool:
        """Whether to go on behind drafts with these chances, each where those before it are right, with up to `most`
        in all."""
        num_right, together = 1.0, 1.0
        for chance in chances:
            together *= chance
            num_right += together
        rate = num_right / costs[len(chances)]
        for num in range(len(chances) + 1, most + 1):
            together *= self._chance
            num_right += together
            if num_right / costs[num] > rate:
                return True
        return False


def _note(known: dict[int, float], key: int, seconds: float) -> None:
    before = known.get(key)
    known[key] = seconds if before is None else before + _NEW * (min(seconds, _FAR * before) - before)
