"""The cost model: how long a step takes, fitted to the steps that were made. There is this one; the engine sizes its
steps by it, the front end predicts waits from it, and a simulation can charge by it.

    duration = step + row * rows + token * tokens + position * (positions that the tokens attend to)

in seconds, by least squares over recent steps, older ones counting less and less. Pure: a result contains its
duration, so a replay measures the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .step import PlanRow

_KEPT = 0.98
"""Of what a step says, after each later one: about fifty count."""
_SURE = 1e-6
"""What holds a coefficient at 0 until steps differ in its quantity, in units of the squared quantity."""
_NUM = 4


class Work(NamedTuple):
    """What a step has to do. num_positions: summed over its tokens, how many positions come before each."""

    num_rows: int
    num_tokens: int
    num_positions: int


def work_of(rows: Iterable[PlanRow]) -> Work:
    num_rows = num_tokens = num_positions = 0
    for row in rows:
        num_new = row.num_tokens
        num_rows += 1
        num_tokens += num_new
        num_positions += num_new * row.start + num_new * (num_new - 1) // 2
    return Work(num_rows, num_tokens, num_positions)


class Costs(NamedTuple):
    """Seconds for a step, and for each row, token and position of it. All 0: nothing is known yet."""

    step_s: float = 0.0
    row_s: float = 0.0
    token_s: float = 0.0
    position_s: float = 0.0

    def predict(self, work: Work) -> float:
        """Seconds that a step takes."""
        return (
            self.step_s
            + self.row_s * work.num_rows
            + self.token_s * work.num_tokens
            + self.position_s * work.num_positions
        )


class CostModel:
    """costs   as fitted to the steps so far
    error   share by which predictions were off lately, on average; 0 before the first
    """

    def __init__(self) -> None:
        self.costs = Costs()
        self.error = 0.0
        self._products = [[0.0] * _NUM for _ in range(_NUM)]
        self._targets = [0.0] * _NUM

    def note(self, work: Work, duration_s: float) -> None:
        """A step has ended."""
        if duration_s <= 0:
            return
        if self.costs.step_s or self.costs.token_s:
            off = abs(self.costs.predict(work) - duration_s) / duration_s
            self.error += (1 - _KEPT) * (off - self.error)
        facts = (1.0, float(work.num_rows), float(work.num_tokens), float(work.num_positions))
        weight = 1 / (duration_s * duration_s)  # relative errors count, not absolute ones
        for i, fact in enumerate(facts):
            row = self._products[i]
            for j, other in enumerate(facts):
                row[j] = _KEPT * row[j] + weight * fact * other
            self._targets[i] = _KEPT * self._targets[i] + weight * fact * duration_s
        self.costs = Costs(*_solve(self._products, self._targets))


def _solve(products: list[list[float]], targets: list[float]) -> list[float]:
    """Non-negative coefficients of least squared error, by coordinate descent: a few rounds are enough, because each
    fit starts near the last one's."""
    found = [0.0] * _NUM
    for _ in range(32):
        for i in range(_NUM):
            scale = products[i][i] * (1 + _SURE)
            if scale > 0:
                rest = targets[i] - sum(products[i][j] * found[j] for j in range(_NUM) if j != i)
                found[i] = max(0.0, rest / scale)
    return found
