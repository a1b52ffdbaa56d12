"""Gives requests to engines: a suspect alone, then what dead engines had, then what waits at the desk. Pure.

`desk` says whose turn it is, `suspects` who is tried alone, the routing policy which engine it is to be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..core.request import Request
from .desk import FrontDesk
from .entry import Entry
from .events import Effects
from .links import EngineLink
from .moves import Moves
from .pools import Pools
from .routing import LeastLoad
from .suspects import Suspects


class Placing:
    """links     engines that serve, by number
    entries   requests that are open, by id
    held      of these, those that a dead engine had and no other has yet
    suspects  those that may have killed an engine
    routing   chooses among the engines that may get a request
    pools     whether one engine computes it, or two
    moves     requests on their way from one engine to another
    """

    def __init__(
        self, desk: FrontDesk, entries: Mapping[str, Entry], pools: Pools, new_ticket: Callable[[], str] | None
    ) -> None:
        self.links: dict[int, EngineLink] = {}
        self.held: dict[str, Entry] = {}
        self.suspects = Suspects()
        self.routing = LeastLoad()
        self.pools = pools
        self.moves = Moves(self.links, self.held, new_ticket, self._find_decode)
        self._desk = desk
        self._entries = entries

    def place(self, now: float, effects: Effects) -> None:
        """Give engines what they may have."""
        if self.suspects.on_trial is None:
            self._try_next(effects)
        for entry in [each for name, each in self.held.items() if name not in self.suspects]:
            links = self._open_links()
            if not links:
                return
            del self.held[entry.request.id]
            self._give(entry, links, now, effects)
        while self._desk.num_waiting and (links := self._open_links()):
            request = self._desk.choose()
            if request is None:
                return
            self._give(self._entries[request.id], links, now, effects)

    def reroute(self, entry: Entry, link: EngineLink, effects: Effects) -> None:
        """Take a request from the engine that has it, and let this one begin with it anew."""
        assert entry.link is not None and entry.link != link.number, entry
        effects.aborts.append((entry.link, entry.request.id))
        self.links[entry.link].take_back(entry)
        self._submit(entry, link, effects)

    def may_get(self, link: EngineLink) -> bool:
        """Not the one that tries suspects, and none that leaves."""
        return link.number != self.suspects.link and not link.is_leaving

    def strike(self, entry: Entry, now: float, effects: Effects) -> None:
        """It is over: no engine has it any more."""
        self.moves.drop(entry, now, effects)
        self.held.pop(entry.request.id, None)
        self.suspects.clear(entry)
        link = None if entry.link is None else self.links.get(entry.link)
        if link is not None:
            link.take_back(entry)

    def _try_next(self, effects: Effects) -> None:
        suspects = self.suspects
        suspects.link = None
        links = self._open_links() if len(suspects) else []
        if not links:
            return
        link = min(links, key=lambda link: link.num_tokens)
        suspects.link = link.number
        entry = suspects.next(link.entries.values())
        if entry is not None:
            del self.held[entry.request.id]
            self._submit(entry, link, effects)

    def _open_links(self) -> list[EngineLink]:
        return [link for link in self.links.values() if self.may_get(link)]

    def _find_decode(self, entry: Entry, source: int, must: bool) -> EngineLink | None:
        return self.pools.find_decode(entry, self._open_links(), source, must)

    def _give(self, entry: Entry, links: list[EngineLink], now: float, effects: Effects) -> None:
        link, is_split = self.pools.choose(entry, links, self._choose, self.moves.can_send, now)
        if is_split:
            self.moves.split(entry, link, now, effects)
        else:
            self._submit(entry, link, effects)

    def _choose(self, request: Request, links: Sequence[EngineLink], now: float) -> EngineLink:
        return links[0] if len(links) == 1 else self.routing.choose(request, links, now)

    def _submit(self, entry: Entry, link: EngineLink, effects: Effects) -> None:
        effects.submits.append((link.number, entry.submission()))
        link.give(entry)
