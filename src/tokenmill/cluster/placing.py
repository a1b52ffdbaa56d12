"""Gives requests to engines: a suspect alone, then what dead engines had, then what waits in the request queue. Pure.

`request_queue` says whose turn it is, `failures` who is tried alone, the routing policy which engine it is to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..core.block import KEY_BYTES, split_keys
from ..core.events import EngineStats, Ready
from ..core.kv_events import KVEvents
from ..core.moves import Prefetched
from ..core.request import Request
from ..core.tiers import TierEvents
from .entry import Entry
from .events import Cause, Effects, Telling
from .failures import Suspects
from .links import EngineLink, NewestCosts
from .load import Load
from .moves import FETCH, REST_S, Moves, NewTicket
from .pools import Pools, can_copy
from .replication import Copies, Replication
from .request_queue import RequestQueue
from .rescheduling import Rescheduling, View
from .router import Router
from .routing import Route
from .slots import Room


class Placing:
    """links     engines that serve, by number
    costs     what is assumed of those that have not told what their steps take
    entries   requests that are open, by id
    held      of these, those that a dead engine had and no other has yet
    suspects  those that may have killed an engine
    router    chooses among the engines that may get a request
    pools     whether one engine computes it, or two
    moves     requests on their way from one engine to another
    copies    prefixes on their way from one engine's cache to another's
    """

    def __init__(
        self,
        request_queue: RequestQueue,
        entries: Mapping[str, Entry],
        pools: Pools,
        new_ticket: NewTicket,
    ) -> None:
        self.links: dict[int, EngineLink] = {}
        self.costs = NewestCosts()
        self.held: dict[str, Entry] = {}
        self.suspects = Suspects()
        self.router = Router()
        self.pools = pools
        self.moves = Moves(self.links, self.held, new_ticket, self._find_decode, self.router.given)
        self.copies = Copies(self.links, self.router.index, self.router.stores, new_ticket, self.may_get)
        self._routes: dict[int, Route] = {}
        self._request_queue = request_queue
        self._entries = entries

    def join(self, number: int, ready: Ready, effects: Effects) -> None:
        """An engine serves from now on."""
        load = Load(ready.stats.prompt_tokens_computed)
        link = self.links[number] = EngineLink(number, ready, ready.worker.pool, ready.stats, load=load)
        self.costs.join(link)
        self.pools.note_links(self.links.values())
        effects.tells += self.router.join(self.links)

    def leave(self, link: EngineLink, cause: Cause, now: float, effects: Effects) -> set[str]:
        """It is gone. Requests that are to be given up because engines die of them."""
        number = link.number
        self.pools.note_links(self.links.values())
        self.costs.leave(number)
        effects.tells += self.router.leave(number)
        self.moves.lose(number, now, effects)
        self.copies.lose(number, now, effects)
        if self.suspects.link == number:
            self.suspects.link = None
        return self.suspects.leave(link, cause, now)

    def share(self) -> None:
        """Give out as many slots as engines have, from now on; while there is none, nobody asks."""
        readies = [link.ready for link in self.links.values() if link.ready.max_num_seqs and not link.is_leaving]
        if readies:
            room = Room(sum(each.max_num_seqs for each in readies), readies[0].max_num_batched_tokens, len(readies))
            self._request_queue.share(room)

    def step(self, link: EngineLink, stats: EngineStats) -> None:
        """An engine has told its state after a step."""
        before = link.stats
        link.step(stats)
        self.costs.step(link, before)

    def hear(self, link: int, message: Telling, now: float, effects: Effects) -> None:
        """What an engine tells of its cache, or of a move."""
        if isinstance(message, KVEvents | TierEvents):
            effects.tells += self.router.hear(link, message)
        elif isinstance(message, Prefetched):
            self.copies.hear(link, message, now, effects)
        else:
            self.moves.hear(link, message, now, effects)
            for ended in effects.moved:
                if ended.why == FETCH and not ended.error:
                    self.router.note_fetch(ended.num_tokens, ended.pause_s)

    def place(self, now: float, effects: Effects) -> None:
        """Give engines what they may have."""
        if len(self.suspects):
            self._try_suspects(effects)
        else:
            self.suspects.link = None
        for entry in [each for name, each in self.held.items() if name not in self.suspects]:
            links = self._open_links()
            if not links:
                return
            del self.held[entry.request.id]
            self._give(entry, links, now, effects)
        while self._request_queue.num_waiting and (links := self._open_links()):
            request = self._request_queue.choose()
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
        """Not one that tries a suspect, or is to, and none that leaves."""
        suspects = self.suspects
        return link.number != suspects.link and link.number not in suspects.trials and not link.is_leaving

    def strike(self, entry: Entry, now: float, effects: Effects) -> None:
        """It is over: no engine has it any more."""
        self.moves.drop(entry, now, effects)
        self.held.pop(entry.request.id, None)
        self.suspects.clear(entry)
        link = None if entry.link is None else self.links.get(entry.link)
        if link is not None:
            link.take_back(entry)
        self.router.end(entry.request)

    @property
    def waits_for_steps(self) -> bool:
        """Whether the next step of some engine may have something decided."""
        on_trial = len(self.suspects.trials) + len(self.suspects) > 0
        return on_trial or self._request_queue.num_waiting > 0 or len(self.held) > 0 or len(self.moves) > 0

    def looks_at(self, request: Request) -> Iterable[int] | None:
        """Of which engines a newcomer's place depends on what they have told after steps and of their caches, where
        nothing waits for a step; None: of all."""
        if self.pools.are_divided or self.copies.is_wanted:
            return None
        return self.router.looks_at(request) if len(self.links) > 1 else ()

    def check(self) -> None:
        """Assert what must hold between events; slow, for tests."""
        for link in self.links.values():
            link.check()
        for name, entry in self.held.items():
            assert entry.link is None and entry.ending is None and not self._request_queue.is_waiting(name)
        for number, tried in self.suspects.trials.items():
            assert tried.link == number and number in self.links, (number, tried)
        self.router.index.check()
        self.router.stores.check()
        self.copies.check()
        for name, number in self.router.index.given.items():
            assert self._entries[name].link in (number, None) or number not in self.links, (name, number)

    def _try_suspects(self, effects: Effects) -> None:
        """Each in an engine that is free; where no engine tries one, the one that is free first gets no more."""
        suspects = self.suspects
        suspects.link = None
        links = sorted(self._open_links(), key=lambda link: link.num_tokens)
        for link in links:
            entry = suspects.next(link.entries.values())
            if entry is not None:
                suspects.trials[link.number] = entry
                del self.held[entry.request.id]
                self._submit(entry, link, effects)
        if links and not suspects.trials:
            suspects.link = links[0].number

    def _open_links(self) -> list[EngineLink]:
        trying, trials = self.suspects.link, self.suspects.trials  # as `may_get` of each; there may be a thousand
        links = self.links.values()
        return [link for link in links if link.number != trying and link.number not in trials and not link.is_leaving]

    def _find_decode(self, entry: Entry, source: int, must: bool) -> EngineLink | None:
        return self.pools.find_decode(entry, self._open_links(), source, must)

    def _give(self, entry: Entry, links: list[EngineLink], now: float, effects: Effects) -> None:
        self._routes.clear()
        self.copies.note(entry.request, now)
        link, is_split = self.pools.choose(entry, links, self._choose, self._can_split, self._hits, now)
        route = self._routes.get(link.number) or Route(link, "cost", self._hits(entry.request).get(link.number, 0))
        if len(self.links) > 1:
            effects.routes.append((link.number, entry.request.id, route.reason))
        peer = None if route.source is None else self.links[route.source]
        if is_split:
            self.moves.split(entry, link, route.num_hit, now, effects)
        elif peer is not None and not entry.num_lives and can_copy(entry.request) and self.moves.can_send(peer):
            end = route.num_source // link.ready.block_size * KEY_BYTES
            self.moves.fetch(entry, link, peer, tuple(split_keys(entry.request.keys[:end])), now, effects)
        else:
            self._submit(entry, link, effects, route.num_hit)
            return
        self.router.given(entry.request, link.number)

    def _hits(self, request: Request) -> dict[int, int]:
        return self.router.hits(request, next(iter(self.links.values())).ready.block_size)

    def _choose(self, request: Request, links: Sequence[EngineLink], now: float) -> EngineLink:
        among = self.links if len(links) == len(self.links) else {link.number: link for link in links}
        route = self.router.choose(request, among, now)
        self._routes[route.link.number] = route
        return route.link

    def _can_split(self, link: EngineLink) -> bool:
        """Whether another engine may draw what follows a prompt that this one computes."""
        return self.moves.can_send(link) or self.router.stores.can_hand(link, self.links.values())

    def _submit(self, entry: Entry, link: EngineLink, effects: Effects, num_hit: int = 0) -> None:
        effects.submits.append((link.number, entry.submission()))
        link.give(entry, num_hit)
        self.router.given(entry.request, link.number)


EVERY_S = 0.1
"""Seconds between two reviews; each proposes a few moves, so this bounds moves a second."""


class Reviews:
    """policy  which requests go to another engine; None: none do
    replication  which prefixes are copied to further engines; None: none are
    next_s  when the next review is due
    """

    def __init__(self, placing: Placing) -> None:
        self.policy: Rescheduling | None = None
        self.next_s = 0.0
        self._placing = placing

    @property
    def is_wanted(self) -> bool:
        return self._placing.copies.is_wanted or (self.policy is not None and len(self._placing.links) > 1)

    @property
    def replication(self) -> Replication | None:
        return self._placing.copies.policy

    @replication.setter
    def replication(self, policy: Replication | None) -> None:
        self._placing.copies.policy = policy

    def review(self, now: float, effects: Effects) -> None:
        """Let some requests go to other engines, and some prefixes."""
        self.next_s = now + EVERY_S
        self._placing.copies.review(now, effects)
        if self.policy is None or len(self._placing.links) < 2:
            return
        placing, moves = self._placing, self._placing.moves

        def can_move(entry: Entry) -> bool:
            return moves.can_move(entry, now) and not placing.suspects.is_tried(entry)

        def num_moving(link: EngineLink) -> int:
            return sum(1 for _ in moves.at(link.number))

        view = View(tuple(placing.links.values()), placing.may_get, can_move, num_moving)
        for entry, target, why, is_waiting in list(self.policy.propose(view)):
            assert entry.link is not None, entry
            if is_waiting:
                effects.rerouted += 1
                entry.rests_until_s = now + REST_S
                placing.reroute(entry, target, effects)
            elif moves.can_send(placing.links[entry.link]):
                moves.migrate(entry, target, why, now, effects)
