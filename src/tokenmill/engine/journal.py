"""The story of an EngineCore, and its replay: plan parity between a live run and a later build.

The core is deterministic, so what it was told, in order, is the whole story. A replay tells it to a fresh core and
stops at the first plan that differs from the recorded one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..core.effects import Event
from ..core.step import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Handled:
    event: Event
    now: float


@dataclass(frozen=True, slots=True)
class Planned:
    """`plan` None: there was nothing to run."""

    plan: StepPlan | None
    now: float


@dataclass(frozen=True, slots=True)
class Committed:
    result: StepResult
    now: float


Entry = Handled | Planned | Committed
Recorder = Callable[[Entry], None]
"""Hears of events and results before they take effect, of plans once they are made."""
