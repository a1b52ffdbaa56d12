"""Routing by predicted time to the first token: what waits before the prompt, and what of it is not cached. Pure.

    cost of an engine = base_s + token_s * tokens to compute + position_s * positions that these attend to

with what decodes there take in all three (`load.pace`), and coefficients as the engine measures its own steps. What an
engine would load from the tiers of its KV store (`stores`) counts with the seconds that takes instead, as far as it is
worth it. The engines that hold a prefix, and of all others those that would begin first, are scored; no other can be
better, so the choice is that of scoring all. The idea: Mooncake's conductor (FAST'25, algorithm 1); the bound is our
own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from functools import partial
from heapq import nsmallest
from itertools import islice
from math import inf
from typing import NamedTuple

from ..core.block import KEY_BYTES
from ..core.cost import Costs
from ..core.request import Request
from .index import PrefixIndex
from .links import EngineLink
from .load import pace, positions
from .routing import Route
from .stores import Stop, Stores

_ASSUMED = Costs(step_s=1e-2, row_s=1e-5, token_s=1e-4)
"""While no engine has told what its steps take."""
_AGAIN = 64


class Ranked(NamedTuple):
    """What a prompt may expect of an engine (`load.pace`)."""

    base_s: float
    number: int
    token_s: float
    position_s: float
    each_s: float

    def cost_s(self, num_new: int, num_positions: float) -> float:
        """Seconds to the first token of a prompt that has so much to compute."""
        return self.base_s + self.token_s * num_new + self.position_s * num_positions


class Ranking:
    """order  by base_s, then by number
    floor_s, floor_position_s   no engine's token or position takes less
    """

    def __init__(self) -> None:
        self.order: list[Ranked] = []
        self.floor_s = self.floor_position_s = 0.0
        self._of: dict[int, Ranked] = {}
        self._links: dict[int, EngineLink] = {}
        self._changed: set[int] = set()
        self._left = 0

    def __getitem__(self, number: int) -> Ranked:
        return self._of[number]

    @property
    def unsettled(self) -> set[int]:
        """Those that have changed since."""
        return self._changed

    def settle(self, links: Mapping[int, EngineLink]) -> None:
        """Take in what has changed; these are known from now on."""
        if not links.keys() <= self._links.keys():
            for number in [number for number in links if number not in self._links]:
                self._links[number] = links[number]
                self._changed.add(number)
                links[number].load.watch(partial(self._changed.add, number))
        if self._changed:
            for number in self._changed:
                if number in self._links:
                    self._put(number, self._links[number])
            self._changed.clear()
        self._left -= 1
        if self._left < 0 and self.order:
            self._left = _AGAIN
            self.floor_s = min([each.token_s for each in self.order])
            self.floor_position_s = min([each.position_s for each in self.order])

    def leave(self, number: int) -> None:
        if number in self._of:
            self._take(number)
            del self._links[number]

    def _put(self, number: int, link: EngineLink) -> None:
        ready, costs = link.ready, link.costs if link.costs.is_known else _ASSUMED
        num_kv_tokens = ready.num_blocks * ready.block_size
        made = pace(link.load, costs, ready.max_num_batched_tokens, ready.max_num_seqs, num_kv_tokens)
        if number in self._of:
            self._take(number)
        ranked = self._of[number] = Ranked(made[0], number, *made[1:])
        insort(self.order, ranked)
        self.floor_s = min(self.floor_s, ranked.token_s)
        self.floor_position_s = min(self.floor_position_s, ranked.position_s)

    def _take(self, number: int) -> None:
        at = bisect_left(self.order, self._of.pop(number))
        del self.order[at]


_FEW = 16
"""So many engines are scored without looking at their order."""
_FIRST = 4
"""Of the engines of one store, so many are scored."""


_FETCH_S, _FETCH_TOKEN_S = 0.01, 2e-6
"""What it takes to have KV sent by another engine: as such, and for each token before one was seen."""
_LATELY = 1 / 16
Hits = list[tuple[int, frozenset[int] | set[int]]]
"""(tokens, who holds so many), most first."""


class Scored(NamedTuple):
    """Ties go to who joined first."""

    cost_s: float
    number: int
    num_hit: int


class Loaded(NamedTuple):
    """The first token of an engine that loads what it has not of the first `num_hit` tokens."""

    cost_s: float
    number: int
    num_hit: int
    tier: str


class KVAware:
    """index, stores: fed by whoever has them."""

    uses_keys = True

    def __init__(self, index: PrefixIndex, stores: Stores | None = None) -> None:
        self._index = index
        self._stores = stores or Stores()
        self._ranking = Ranking()
        self._fetch_token_s = _FETCH_TOKEN_S

    def leave(self, link: int) -> None:
        self._ranking.leave(link)

    def looks_at(self, request: Request) -> Iterable[int]:
        return {*self._ranking.unsettled, *[each for level in self._index.levels(request.keys) for each in level.links]}

    def choose(self, request: Request, links: Mapping[int, EngineLink], now: float) -> Route:
        self._ranking.settle(links)
        hits = self._hits(request, links)
        best: Scored | None = None
        for num_hit, members in hits:
            best = self._best(request, links, num_hit, members, best)
        best = self._best(request, links, 0, None, best)
        assert best is not None, "no engine to choose"
        if request.adapter:
            best = min([best, *self._with_adapter(request, links, hits)], key=lambda each: each[:2])
        loaded = self._load(request, links, hits, best) if self._stores.is_known and request.keys else None
        if loaded is not None:
            return Route(links[loaded.number], loaded.tier, loaded.num_hit)
        number = best.number
        held = next((num_hit for num_hit, members in hits if number in members), 0)
        route = Route(links[number], "prefix" if held else "load", held)
        return self._fetch(request, links, hits, best) or route

    def _load(self, request: Request, links: Mapping[int, EngineLink], hits: Hits, best: Scored) -> Loaded | None:
        """The engine that would have its first token soonest with KV from the tiers of its store, where that is sooner
        than `best`. Looked at are those of the stores that hold most, those that hold some of it themselves, and those
        that would begin first."""
        stores, ranking = self._stores, self._ranking
        levels = stores.levels(request.keys)
        if not levels or request.pooling is not None or request.sampling.prompt_logprobs is not None:
            return None
        size = next(iter(links.values())).ready.block_size
        keys = request.keys[: levels[0].num_blocks * KEY_BYTES]
        among: dict[int, None] = {}
        for level in levels:
            if len(level.links) > _FIRST:
                among.update(self._soonest(links, level.links))
                continue
            for store in level.links:
                among.update(self._first_of(stores.links_of(store), links))
        for _, members in hits:
            if len(members) <= _FEW:
                among.update(dict.fromkeys(members))
        if stores.are_linked:
            among.update(self._soonest(links, None))
        found: Loaded | None = None
        limit_s = best.cost_s
        least_s = ranking.floor_s * max(1, _num_tokens(request) - len(keys) // KEY_BYTES * size)
        stops: dict[tuple[int | None, int], tuple[Stop, ...]] = {}
        for number in among:
            if number not in links or ranking[number].base_s + least_s >= limit_s:
                continue
            num_hit = next((num_hit for num_hit, members in hits if number in members), 0)
            where = stores.store_of(number), num_hit // size
            if where not in stops:
                stops[where] = stores.stops(number, keys, num_hit // size)
            for stop in stops[where]:
                scored = self._score(number, min(stop.end * size, _num_tokens(request) - 1), _num_tokens(request))
                cost_s = scored.cost_s + stop.load_s
                if cost_s < limit_s or (found is not None and (cost_s, number) < found[:2]):
                    found, limit_s = Loaded(cost_s, number, scored.num_hit, stop.tier), cost_s
        return found

    def _soonest(self, links: Mapping[int, EngineLink], among: frozenset[int] | set[int] | None) -> dict[int, None]:
        """The few engines of these stores, None: of any, that would begin first."""
        of, able = self._stores.store_of, (each.number for each in self._ranking.order if each.number in links)
        return dict.fromkeys(islice((number for number in able if among is None or of(number) in among), _FIRST))

    def _first_of(self, members: set[int], links: Mapping[int, EngineLink]) -> dict[int, None]:
        """The few that would begin first."""
        able = [self._ranking[number] for number in members if number in links]
        return dict.fromkeys(each.number for each in (nsmallest(_FIRST, able) if len(able) > _FIRST else able))

    def note_fetch(self, num_tokens: int, took_s: float) -> None:
        """An engine got KV of so many tokens from another one in this time."""
        if num_tokens:
            self._fetch_token_s += _LATELY * (max(0.0, took_s - _FETCH_S) / num_tokens - self._fetch_token_s)

    def _fetch(self, request: Request, links: Mapping[int, EngineLink], hits: Hits, best: Scored) -> Route | None:
        """The engine that would have its first token soonest if it took the longest prefix from one that holds it,
        where that is sooner than `best`."""
        if not hits or request.output_tokens or request.handoff or request.pooling is not None:
            return None
        num_source, members = hits[0]
        sources = [number for number in nsmallest(_FEW, members) if number in links]
        sources = [number for number in sources if links[number].ready.worker.kv_address]
        num_blocks = num_source // next(iter(links.values())).ready.block_size
        sources = [number for number in sources if self._index.has_told(number, request.keys, num_blocks)]
        if not sources or request.sampling.prompt_logprobs is not None:
            return None
        num_new = _num_tokens(request) - num_source
        num_positions = positions(num_new, num_source)
        own_s = _FETCH_S + self._fetch_token_s * num_source
        soonest = next((each for each in self._ranking.order if each.number in links), self._ranking[best.number])
        costs = [
            (own_s + each.cost_s(num_new, num_positions), each.number)
            for each in (self._ranking[best.number], soonest)
            if each.number not in members
        ]
        if not costs or min(costs)[0] >= best.cost_s:
            return None
        source = min(sources, key=lambda number: (links[number].num_tokens, number))
        return Route(links[min(costs)[1]], "fetch", 0, source, num_source)

    def most_cached(
        self, request: Request, links: Mapping[int, EngineLink], ttft_s: float, tpot_s: float
    ) -> Route | None:
        """Of the engines that are predicted to be in time, and have been asked of by `choose`, who holds most."""
        num_tokens = _num_tokens(request)
        for num_hit, members in [*self._hits(request, links), (0, None)]:
            num_new = num_tokens - num_hit
            num_positions = positions(num_new, num_hit)
            for each in self._ranking.order:
                if each.base_s > ttft_s:
                    break
                if each.number not in links or (members is not None and each.number not in members):
                    continue
                if each.cost_s(num_new, num_positions) <= ttft_s and each.each_s <= tpot_s:
                    return Route(links[each.number], "slo", num_hit)
        return None

    def score_all(self, request: Request, links: Mapping[int, EngineLink]) -> Scored:
        """The best of all, the slow way; for tests."""
        self._ranking.settle(links)
        hits = self._hits(request, links)
        scored = []
        for number in links:
            num_hit = next((num_hit for num_hit, members in hits if number in members), 0)
            scored.append(self._score(number, num_hit, _num_tokens(request)))
        if request.adapter:
            scored += self._with_adapter(request, links, hits)
        return min(scored)

    def _hits(self, request: Request, links: Mapping[int, EngineLink]) -> Hits:
        if not request.keys:
            return []
        size = next(iter(links.values())).ready.block_size
        most = (_num_tokens(request) - 1) // size
        return [(min(level.num_blocks, most) * size, level.links) for level in self._index.levels(request.keys)]

    def _with_adapter(self, request: Request, links: Mapping[int, EngineLink], hits: Hits) -> list[Scored]:
        """Engines that have requests of the same adapter: the rows of one share the reading of it, which is counted as
        much as a step without prompts."""
        found = []
        for number, link in links.items():
            if request.adapter in link.adapters:
                num_hit = next((num_hit for num_hit, members in hits if number in members), 0)
                scored = self._score(number, num_hit, _num_tokens(request))
                found.append(scored._replace(cost_s=scored.cost_s - self._ranking[number].each_s))
        return found

    def _score(self, number: int, num_hit: int, num_tokens: int) -> Scored:
        num_new = num_tokens - num_hit
        return Scored(self._ranking[number].cost_s(num_new, positions(num_new, num_hit)), number, num_hit)

    def _best(
        self,
        request: Request,
        links: Mapping[int, EngineLink],
        num_hit: int,
        members: frozenset[int] | set[int] | None,
        best: Scored | None,
    ) -> Scored | None:
        """The better of `best` and the best of `members` (None: all), which have so many tokens at least."""
        num_tokens, ranking = _num_tokens(request), self._ranking
        if members is not None and len(members) <= _FEW:
            for number in members:
                if number in links:
                    scored = self._score(number, num_hit, num_tokens)
                    best = scored if best is None or scored[:2] < best[:2] else best
            return best
        num_new = num_tokens - num_hit
        num_positions = positions(num_new, num_hit)
        floor_s = ranking.floor_s * num_new + ranking.floor_position_s * num_positions
        best_s, best_number = (inf, 0) if best is None else best[:2]
        limit_s = best_s - floor_s
        for base_s, number, token_s, position_s, _ in ranking.order:
            if base_s > limit_s:
                break
            cost_s = base_s + token_s * num_new + position_s * num_positions
            if cost_s > best_s or (cost_s == best_s and number >= best_number):
                continue
            if number in links and (members is None or number in members):
                best_s, best_number, limit_s = cost_s, number, cost_s - floor_s
                best = Scored(cost_s, number, num_hit)
        return best


class SLOAware:
    """Of the engines that are predicted to keep a request's targets, the one that has most of its prefix, so that the
    least is computed; of equal ones the soonest. Where none is, or without targets, as KVAware."""

    uses_keys = True

    def __init__(self, index: PrefixIndex, stores: Stores | None = None) -> None:
        self._by_cost = KVAware(index, stores)

    def leave(self, link: int) -> None:
        self._by_cost.leave(link)

    def note_fetch(self, num_tokens: int, took_s: float) -> None:
        self._by_cost.note_fetch(num_tokens, took_s)

    def looks_at(self, request: Request) -> Iterable[int]:
        return self._by_cost.looks_at(request)

    def choose(self, request: Request, links: Mapping[int, EngineLink], now: float) -> Route:
        route = self._by_cost.choose(request, links, now)
        terms = request.terms
        if not (terms.ttft_s or terms.tpot_s):
            return route
        left_s = request.arrival_s + terms.ttft_s - now if terms.ttft_s else inf
        found = self._by_cost.most_cached(request, links, left_s, terms.tpot_s or inf)
        return route._replace(reason="late") if found is None else found


def _num_tokens(request: Request) -> int:
    return len(request.prompt_tokens) + len(request.output_tokens)
