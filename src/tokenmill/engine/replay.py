"""Repeats a recorded journal on a fresh core, and finds the first plan that differs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..core.config import EngineConfig
from ..core.step import StepPlan
from .core import EngineCore
from .journal import Committed, Entry, Handled, Planned


class Difference(NamedTuple):
    """Plans made at one point of the story. None: nothing was planned."""

    recorded: StepPlan | None
    replayed: StepPlan | None


class Replayed(NamedTuple):
    """`num_steps`: planned alike, from the beginning. `difference` None: all of them were."""

    num_steps: int
    difference: Difference | None = None


def replay(config: EngineConfig, entries: Iterable[Entry]) -> Replayed:
    """Stops at the first plan that differs: results of the recorded plans mean nothing after it."""
    core = EngineCore(config)
    num_steps = 0
    for entry in entries:
        match entry:
            case Handled(event, now):
                core.handle(event, now)
            case Planned(recorded, now):
                plan = core.plan(now)
                if plan != recorded:
                    return Replayed(num_steps, Difference(recorded, plan))
                num_steps += plan is not None
            case Committed(result, now):
                core.commit(result, now)
    return Replayed(num_steps)
