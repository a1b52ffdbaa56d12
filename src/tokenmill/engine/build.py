"""Puts an engine together. Live wiring and simulation call this same function."""

from __future__ import annotations

from ..core.config import EngineConfig
from ..core.ports import Clock, EngineEnd, Executor
from .core import EngineCore
from .journal import Recorder
from .shell import EngineShell


def build_engine(
    config: EngineConfig, executor: Executor, link: EngineEnd, clock: Clock, record: Recorder | None = None
) -> EngineShell:
    """An engine whose `run()` serves `link`; nothing starts before that. `record` hears the story of its core."""
    return EngineShell(EngineCore(config, record), executor, link, clock)
