"""Between front ends and the KV store of the machine, of which only workers are clients: what the store tells of its
blocks goes over the links to the front ends that asked.

    front end  -- WatchTiers -->  RelayedLink  -->  TierEventRelay  -- watch -->  store
               <- TierEvents --                             <----------

Workers of one machine would all tell the same, so a front end asks one of them (`cluster.stores`). The store's messages
are numbered without gaps. When a front end asks, all that listen get a snapshot first, marked as such. The engine hears
nothing of this. Nothing is kept for a front end that reads too slowly: it notices the gap in the numbers, and asks
again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from ...core.effects import Event
from ...core.events import FromEngine, ToEngine
from ...core.ports import EngineEnd
from ...core.tiers import TierEvents, WatchTiers
from .publisher import TierEventPublisher

MOST_BEHIND = 256
"""Messages that wait for one front end."""

Watch = Callable[[Callable[[TierEvents], None] | None], None]
"""Of a store's client: tell this one from now on, at first all that there is; None: nobody."""


class TierEventRelay:
    """Of one worker. watch: of its store; None: it has none, and nothing is told."""

    def __init__(self, watch: Watch | None = None) -> None:
        self._watch = watch
        self._links: list[RelayedLink] = []
        self._log: TierEventPublisher | None = None

    def over(self, link: EngineEnd) -> RelayedLink:
        """The same link, for one front end."""
        return RelayedLink(link, self)

    def begin(self, link: RelayedLink) -> None:
        if link not in self._links:
            self._links.append(link)
        self.ask()

    def publish(self, log: TierEventPublisher) -> None:
        """Tell others than front ends, too."""
        self._log = log
        self.ask()

    def ask(self) -> None:
        """Have the store tell all, where somebody listens: it may have been joined just now."""
        if self._watch is not None and (self._links or self._log is not None):
            self._watch(self._hear)

    def before(self, hear: Callable[[Event], None]) -> Callable[[Event], None]:
        """What hears that a store has been joined: the store is asked, too."""

        def told(event: Event) -> None:
            self.ask()
            hear(event)

        return told

    def end(self, link: RelayedLink) -> None:
        if link in self._links:
            self._links.remove(link)
            if not self._links and self._log is None and self._watch is not None:
                self._watch(None)

    def _hear(self, message: TierEvents) -> None:
        for link in list(self._links):
            link.tell(message)
        if self._log is not None:
            self._log.take(message)


class RelayedLink:
    """core.ports.EngineEnd on a link to a front end, whose wish to hear of tiers does not reach the engine."""

    def __init__(self, link: EngineEnd, relay: TierEventRelay) -> None:
        self._link = link
        self._relay = relay
        self._told: deque[TierEvents] = deque()
        self._wake = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None

    async def receive(self) -> ToEngine:
        try:
            while isinstance(message := await self._link.receive(), WatchTiers):
                self._take(message)
        except BaseException:
            self.close()
            raise
        return message

    async def send(self, message: FromEngine) -> None:
        await self._link.send(message)

    def tell(self, message: TierEvents) -> None:
        if len(self._told) >= MOST_BEHIND:
            self._told.clear()
        self._told.append(message)
        self._wake.set()

    def close(self) -> None:
        """Nothing is told any more. The link itself is its maker's to close."""
        self._relay.end(self)
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _take(self, message: WatchTiers) -> None:
        if not message.is_wanted:
            self.close()
            return
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="tier-link")
        self._relay.begin(self)

    async def _write(self) -> None:
        with contextlib.suppress(EOFError):  # who reads the link hears of it, too
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._told:
                    await self._link.send(self._told.popleft())
