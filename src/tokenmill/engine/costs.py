"""The cost of a step, measured from the results of steps that were mostly prompts.

    duration = token_s * tokens + position_s * (positions that they attend to)

fitted by least squares over recent steps. Pure: a result contains its duration, so a replay measures the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..core.step import PlanRow

_KEPT = 0.98
"""Of what a step says, after each later one: about fifty count."""

_ALIKE = 1e-3
"""Steps whose tokens attend to equally many positions, within this share of their spread, cannot tell the two apart."""


class StepCosts:
    """core.policy.Measured. `attention` is that of a block of positions."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of products: tokens, positions and durations
        self.attention = 0.0

    def note(self, rows: Iterable[PlanRow], duration_s: float) -> None:
        """A step of these rows has ended."""
        num_tokens = num_positions = 0
        for row in rows:
            num_new = row.num_tokens
            num_tokens += num_new
            num_positions += num_new * row.start + num_new * (num_new - 1) // 2
        tt, tp, pp, td, pd = (_KEPT * total for total in self._sums)
        tt += num_tokens * num_tokens
        tp += num_tokens * num_positions
        pp += num_positions * num_positions
        td += num_tokens * duration_s
        pd += num_positions * duration_s
        self._sums = (tt, tp, pp, td, pd)
        spread = tt * pp - tp * tp
        if spread > _ALIKE * tt * pp:
            token_s = (td * pp - pd * tp) / spread
            position_s = (pd * tt - td * tp) / spread
            if token_s > 0:
                self.attention = self._block_size * max(0.0, position_s) / token_s
