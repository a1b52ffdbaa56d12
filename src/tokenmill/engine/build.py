"""Puts an engine together. Live wiring and simulation call this same function."""

from __future__ import annotations

from collections.abc import Iterable

from ..core.config import EngineConfig
from ..core.effects import Event
from ..core.ports import Clock, EngineEnd, Executor
from .core import EngineCore
from .flight import Watcher
from .journal import Recorder
from .shell import EngineShell


def build_engine(
    config: EngineConfig,
    executor: Executor,
    link: EngineEnd,
    clock: Clock,
    record: Recorder | None = None,
    first: Iterable[Event] = (),
    flight: Watcher | None = None,
) -> EngineShell:
    """An engine whose `run()` serves `link`; nothing starts before that. `record` hears the story of its core, which is
    told of `first` before anything else. `flight` hears of its steps."""
    shell = EngineShell(EngineCore(config, record), executor, link, clock, flight)
    for event in first:
        shell.hear(event)
    return shell
