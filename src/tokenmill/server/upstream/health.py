"""Whether an upstream is asked: down after a failed connection or some failed answers in a row, until a check succeeds.
Checks of one that is down come less and less often. Pure: the time is an argument.
"""

from __future__ import annotations

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
MOST_FAILURES = 3
"""Answers that fail one after the other before no more are asked for."""


class Health:
    """is_up: it may be asked; why: what was wrong last; next_check_s: when to look at it again."""

    def __init__(self, check_s: float) -> None:
        self._check_s = check_s
        self._delay_s = 0.0
        self._num_failures = 0
        self.is_up = True
        self.why = ""
        self.next_check_s = 0.0

    def succeeded(self, now: float) -> None:
        """It answered, whatever it was asked."""
        self.is_up = True
        self.why = ""
        self._num_failures = 0
        self._delay_s = 0.0
        self.next_check_s = now + self._check_s

    def failed(self, now: float, why: str, *, is_unreachable: bool) -> None:
        """is_unreachable: no answer would have come to anything else either."""
        self.why = why
        self._num_failures += 1
        if not self.is_up and not is_unreachable:
            return  # of a call from before
        if is_unreachable or self._num_failures >= MOST_FAILURES:
            self.is_up = False
            self._delay_s = min(max(2 * self._delay_s, FIRST_DELAY_S), LONGEST_DELAY_S)
            self.next_check_s = now + self._delay_s
