"""Of an engine's front ends, what its hub keeps (`hub`)."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ..core.events import FromEngine
from ..core.ports import EngineEnd

MOST_BEHIND = 4096
"""Messages that wait for one front end; more: it does not read."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Seat:
    """A front end.

    close    ends its link, after which `receive` of the link raises EOFError
    ids      its name of a request -> the engine's
    loads    of adapters, by digest
    tickets  of KV that it has offered
    push     sends at once, where its link can (core.ports.Pushing)
    """

    number: int
    link: EngineEnd
    close: Callable[[], None]
    ids: dict[str, str] = field(default_factory=dict)
    loads: Counter[str] = field(default_factory=Counter)
    tickets: set[str] = field(default_factory=set)
    queue: deque[FromEngine] = field(default_factory=deque)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    is_draining: bool = False
    watches_kv: bool = False
    push: Callable[[FromEngine], None] | None = None

    def say(self, message: FromEngine) -> None:
        if self.push is not None:
            self.push(message)
            if self.is_draining:
                self.wake.set()
            return
        self.queue.append(message)
        self.wake.set()
        if len(self.queue) > MOST_BEHIND:
            _log.error("A front end has not read %d messages; its link is closed.", len(self.queue))
            self.queue.clear()
            self.close()

    @property
    def is_done(self) -> bool:
        return self.is_draining and not (self.ids or self.tickets or self.queue)


@dataclass(slots=True, eq=False)
class Held:
    """A request in the engine: its seat's name for it, and how often it was submitted and has not ended since."""

    seat: Seat
    name: str
    num_open: int = 1
