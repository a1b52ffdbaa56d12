"""Tells a recorded story to a fresh core and compares its plans."""

from __future__ import annotations

from collections.abc import Iterable

from ..core.config import EngineConfig
from .core import EngineCore
from .journal import Committed, Entry, Handled, Planned


def replay(config: EngineConfig, entries: Iterable[Entry]) -> int:
    """Returns the number of steps planned. Asserts that every plan is equal."""
    core = EngineCore(config)
    num_steps = 0
    for entry in entries:
        match entry:
            case Handled(event, now):
                core.handle(event, now)
            case Planned(recorded, now):
                plan = core.plan(now)
                assert plan == recorded, f"the replay planned {plan}, the recording {recorded}"
                num_steps += plan is not None
            case Committed(result, now):
                core.commit(result, now)
    return num_steps
