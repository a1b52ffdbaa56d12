"""Chooses an engine for each request, by a policy that has a name, and keeps what the policies need to know. Pure.

Where there are several engines and the policy looks at prefixes, engines are asked to tell of their caches, and
requests are to carry the keys of their blocks (`keys`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ..core.config import Kind, OwnPolicy
from ..core.events import ToEngine
from ..core.kv_events import KVEvents, WatchKV
from ..core.policy import Admission
from ..core.request import Request
from ..core.tiers import TierEvents
from .index import PrefixIndex
from .kv_aware import KVAware, SLOAware
from .links import EngineLink
from .pools import Disaggregation
from .replication import Replication
from .rescheduling import Rescheduling
from .routing import LeastLoad, PowerOfTwo, PrefixAffinity, RoundRobin, Route, Routing, SessionAffinity
from .stores import Stores

ADMISSION = Kind("admission", Admission)
OF_GATEWAYS = {
    "routing_policy": Kind("routing", Routing, ("index", "stores")),
    "disaggregation": Kind("disaggregation", Disaggregation),
    "migration": Kind("migration", Rescheduling),
    "replication": Kind("replication", Replication),
}


_BY_NAME: dict[str, Callable[[PrefixIndex, Stores], Routing]] = {
    "kv_aware": KVAware,
    "slo_aware": SLOAware,
    "prefix_affinity": lambda index, stores: PrefixAffinity(index),
    "session_affinity": lambda index, stores: SessionAffinity(),
    "least_load": lambda index, stores: LeastLoad(),
    "power_of_two": lambda index, stores: PowerOfTwo(),
    "round_robin": lambda index, stores: RoundRobin(),
}
ROUTING_POLICIES = tuple(_BY_NAME)
USUAL_ROUTING = "kv_aware"


def make_routing(name: str, index: PrefixIndex, stores: Stores | None = None) -> Routing:
    """One of ROUTING_POLICIES, or one's own, which may ask for `index` and `stores`."""
    stores = stores or Stores()
    routing: Routing = (
        name.make(index=index, stores=stores) if isinstance(name, OwnPolicy) else _BY_NAME[name](index, stores)
    )
    return routing


class Router:
    """index: what engines have told of their caches
    stores    what KV stores have told of their tiers
    name      of the policy
    has_keys  whether requests are to carry the keys of their blocks
    """

    def __init__(self, name: str = USUAL_ROUTING) -> None:
        self.index = PrefixIndex()
        self.stores = Stores()
        self.has_keys = False
        self.choose_by(name)

    def choose_by(self, name: str) -> None:
        """The policy from now on, as in `make_routing`. Before engines come."""
        self.name = name
        self._routing = make_routing(name, self.index, self.stores)
        self._looks_at = _looks_at_of(self._routing)

    def join(self, links: Mapping[int, EngineLink]) -> list[tuple[int, ToEngine]]:
        """An engine has come; what engines are to be told."""
        self.has_keys = self._routing.uses_keys and len(links) > 1
        asked = [number for number in links if number not in self.index] if self.has_keys else []
        for number in asked:
            self.index.join(number)
        asks: list[tuple[int, ToEngine]] = [(number, WatchKV(True)) for number in asked]
        for number in asked:
            asks += self.stores.join(number, links[number].ready)
        return asks

    def leave(self, link: int) -> list[tuple[int, ToEngine]]:
        """It has gone; what others are to be told."""
        self.index.leave(link)
        self._routing.leave(link)
        return self.stores.leave(link)

    def hear(self, link: int, message: KVEvents | TierEvents) -> list[tuple[int, ToEngine]]:
        """What an engine tells of its cache or its store; what engines are to be told."""
        if isinstance(message, TierEvents):
            return self.stores.hear(link, message)
        return [] if self.index.apply(link, message) else [(link, WatchKV(True))]

    def choose(self, request: Request, links: Mapping[int, EngineLink], now: float) -> Route:
        if len(links) == 1:
            return Route(next(iter(links.values())), "only")
        return self._routing.choose(request, links, now)

    def looks_at(self, request: Request) -> Iterable[int] | None:
        """Of which engines the next choice, of this request, depends on what they have told after steps and of their
        caches; None: of all."""
        return None if self._looks_at is None else self._looks_at(request)

    def note_fetch(self, num_tokens: int, took_s: float) -> None:
        """An engine got KV of so many tokens from another one in this time."""
        self._routing.note_fetch(num_tokens, took_s)

    def hits(self, request: Request, size: int) -> dict[int, int]:
        """Tokens of the request that engines are expected to have in their caches, by number; the others have none.
        `size`: of their blocks."""
        most = (len(request.prompt_tokens) - 1) // size if size else 0
        levels = self.index.levels(request.keys) if request.keys else ()
        return {number: min(level.num_blocks, most) * size for level in levels for number in level.links}

    def given(self, request: Request, link: int) -> None:
        """The engine has it now, and no other that was given it."""
        if request.keys:
            self.index.expect(link, request.id, request.keys)

    def end(self, request: Request) -> None:
        """It is over."""
        if request.keys:
            self.index.settle(request.id)


def _looks_at_of(routing: Routing) -> Callable[[Request], Iterable[int]] | None:
    """Its method `looks_at`; None where it has none of its own: one that has another's may choose by more than that."""
    for kind in type(routing).__mro__:
        if "looks_at" in vars(kind):
            found: Callable[[Request], Iterable[int]] = routing.looks_at  # type: ignore[attr-defined]
            return found
        if "choose" in vars(kind):
            break
    return None
