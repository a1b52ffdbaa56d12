"""Replays a journal that an engine wrote with this build's core, and says where their plans part.

`python -m tokenmill.sim.run --replay FILE`
"""

from __future__ import annotations

from ..core.step import StepPlan
from ..engine.journal import read_journal
from ..engine.replay import Difference, replay


def replay_file(path: str) -> tuple[str, bool]:
    """What is to be printed, and whether all plans are equal. Raises ValueError where `path` is no journal, OSError
    where it cannot be read."""
    with open(path, encoding="utf8") as file:
        num_steps, difference = replay(*read_journal(file))
    if difference is None:
        return f"{path}: all {num_steps} steps are planned as recorded", True
    return "\n".join((f"{path}: step {num_steps} differs from the recorded one", *_sides(difference))), False


def _sides(difference: Difference) -> list[str]:
    """Both plans, row by row; a row that is in both in the same place is told once."""
    recorded, replayed = map(_rows, difference)
    lines = []
    for index in range(max(len(recorded), len(replayed))):
        left, right = (rows[index] if index < len(rows) else "nothing" for rows in (recorded, replayed))
        lines += [f"  both      {left}"] if left == right else [f"  recorded  {left}", f"  replayed  {right}"]
    return lines


def _rows(plan: StepPlan | None) -> list[str]:
    if plan is None:
        return ["no step"]
    return [f"step {plan.step}, released {plan.released}", *map(str, plan.rows)]
