"""Puts an engine together, and links one inside a process. Live wiring and simulation call the same function."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from ..core.config import EngineConfig
from ..core.effects import Event
from ..core.events import FromEngine, ToEngine
from ..core.ports import Clock, EngineEnd, Executor
from .core import EngineCore
from .journal import Recorder
from .recorders import Watcher
from .shell import EngineShell


class LocalEngineEnd:
    """core.ports.EngineEnd over queues. A None in a queue says that the other side is gone."""

    def __init__(self, inbound: asyncio.Queue[ToEngine | None], outbound: asyncio.Queue[FromEngine | None]) -> None:
        self._inbound = inbound
        self._outbound = outbound

    async def receive(self) -> ToEngine:
        message = await self._inbound.get()
        if message is None:
            raise EOFError("the front end is gone")
        return message

    async def send(self, message: FromEngine) -> None:
        self._outbound.put_nowait(message)

    def close(self) -> None:
        """Tell the front end that the engine is gone."""
        self._outbound.put_nowait(None)


class LocalFrontEnd:
    """core.ports.FrontEnd over queues."""

    def __init__(self, inbound: asyncio.Queue[FromEngine | None], outbound: asyncio.Queue[ToEngine | None]) -> None:
        self._inbound = inbound
        self._outbound = outbound

    async def send(self, message: ToEngine) -> None:
        self._outbound.put_nowait(message)

    async def receive(self) -> FromEngine:
        message = await self._inbound.get()
        if message is None:
            raise EOFError("the engine is gone")
        return message

    def close(self) -> None:
        """Tell the engine that the front end is gone."""
        self._outbound.put_nowait(None)


def local_link() -> tuple[LocalEngineEnd, LocalFrontEnd]:
    """The two ends of one link."""
    to_engine: asyncio.Queue[ToEngine | None] = asyncio.Queue()
    to_front: asyncio.Queue[FromEngine | None] = asyncio.Queue()
    return LocalEngineEnd(to_engine, to_front), LocalFrontEnd(to_front, to_engine)


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
