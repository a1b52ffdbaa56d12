"""One end of a link between a front end and an engine: the messages of `core.events` over a pipe of frames.

Each end reads only its own clock. Messages carry ages (see `codec`), so the clocks of the two ends may differ by any
amount. A time that has crossed the link is late by the transmission time of the message.
"""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar, cast

from ..core.events import FromEngine, ToEngine
from ..core.ports import Clock
from .codec import decode, encode
from .framing import Pipe

Out = TypeVar("Out", ToEngine, FromEngine)
In = TypeVar("In", ToEngine, FromEngine)


class Link(Generic[Out, In]):
    """core.ports.FrontEnd is Link[ToEngine, FromEngine], EngineEnd the other way round."""

    def __init__(self, pipe: Pipe, clock: Clock, keeper: asyncio.Task[None] | None = None) -> None:
        """`keeper`: what watches the pipe, for as long as the link is open."""
        self._pipe = pipe
        self._clock = clock
        self._keeper = keeper

    async def send(self, message: Out) -> None:
        """Raises EOFError when the peer is gone. Waits while nobody has connected, or while the peer is far behind."""
        await self._pipe.send(encode(message, self._clock.now()))

    async def receive(self) -> In:
        """Raises EOFError once the peer is gone and everything that had arrived is taken."""
        return cast(In, decode(await self._pipe.receive(), self._clock.now()))

    def close(self) -> None:
        """What was sent arrives."""
        self._pipe.end()
        if self._keeper is not None:
            self._keeper.cancel()

    async def wait_ended(self) -> None:
        """Returns once no further message can come but those that had arrived."""
        await self._pipe.wait_ended()

    @property
    def why_ended(self) -> str:
        """A sentence; "" while the link is open."""
        return self._pipe.why_ended


FrontLink = Link[ToEngine, FromEngine]
EngineLink = Link[FromEngine, ToEngine]
