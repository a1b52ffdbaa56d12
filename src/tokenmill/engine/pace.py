"""Predicts how long a step will take, from similar steps, and therefore when to plan the next one.

A plan made early misses requests that arrive before its step can start; a plan made late leaves the processors idle.
The time left for planning is therefore generous, and predictions are rather too short: they follow a shorter step at
once and a longer one slowly, so that one delayed step does little harm. What is to be expected of a step, and not at
least, is known to the cost model (`core.cost`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.work import lead_s

SHORT_S = 0.006
"""Steps below this are planned ahead at once: there is nothing to wait for."""

_GROWTH = 1.25

_RECENT_S, _RECENT_STEPS = 0.25, 4
"""After this long, and so many steps, without a request that came or went, none is waited for: to wait costs the step a
little, which is less of a long one."""


class Pace:
    """Durations of steps by the number of their tokens."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, float]] = {}  # by bit length: tokens and seconds of a step

    def note(self, num_tokens: int, duration_s: float) -> None:
        """A step has ended."""
        size = num_tokens.bit_length()
        known = self._known.get(size)
        if known is not None:
            duration_s = min(duration_s, _GROWTH * (known[1] * min(1.0, num_tokens / known[0])))
        self._known[size] = (num_tokens, duration_s)

    def note_alike(self, num_tokens: int, durations: Sequence[float]) -> None:
        """As `note` of steps of so many tokens, one after the other."""
        self.note(num_tokens, durations[0])
        size = num_tokens.bit_length()
        known_s = self._known[size][1]
        for duration_s in durations[1:]:
            known_s = min(duration_s, _GROWTH * known_s)
        self._known[size] = (num_tokens, known_s)

    def predict(self, num_tokens: int) -> float:
        """Seconds that a step of this many tokens takes: no less than one of fewer tokens, nor, for each token, than
        one of more. 0 where neither is known."""
        size = num_tokens.bit_length()
        if size in self._known:
            return self._scaled(size, num_tokens)
        below = max((known for known in self._known if known < size), default=size)
        above = min((known for known in self._known if known > size), default=size)
        return max(self._scaled(below, num_tokens), self._scaled(above, num_tokens))

    def is_recent(self, since_s: float, num_tokens: int) -> bool:
        """Whether a request that came or went so long before a step of so many tokens says that others will."""
        return since_s <= max(_RECENT_S, _RECENT_STEPS * self.predict(num_tokens))

    def _scaled(self, size: int, num_tokens: int) -> float:
        known_tokens, duration_s = self._known.get(size, (1, 0.0))
        return duration_s * min(1.0, num_tokens / known_tokens)

    def delay(self, num_tokens: int) -> float:
        """Seconds from the start of such a step to the planning of the next."""
        predicted_s = self.predict(num_tokens)
        if predicted_s < SHORT_S:
            return 0.0
        return predicted_s - lead_s(predicted_s)
