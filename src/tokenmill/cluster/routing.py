"""Which engine gets a request: policies by name. Pure.

round_robin       each in turn
least_load        the one with the fewest tokens open
power_of_two      of two drawn at random, the one with fewer tokens open (Mitzenmacher, 2001)
session_affinity  the one that a session's name falls on, unless it has much more than its share
                  (rendezvous hashing with bounded loads)
prefix_affinity   the one with the longest cached prefix, where that is much of the prompt and loads are not far
                  apart; else the one with the fewest tokens open
kv_aware          the one that is predicted to give the first token first (`kv_aware`)
slo_aware         of those predicted to keep the targets, the one with the least to compute (`kv_aware`)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from random import Random
from typing import NamedTuple, Protocol

from ..core.request import Request
from .index import PrefixIndex
from .links import EngineLink

_BOUND = 1.25
"""An engine of a session has at most so many times its share of the tokens that are open."""
_MUCH = 0.3
"""A hit is followed for its own sake that is more than this of the prompt."""
_FAR, _FAR_TOKENS = 1.5, 65536
"""Loads are far apart where the largest is so many times the least, and more than it by so many tokens."""


class Route(NamedTuple):
    """num_hit: tokens of the request that the engine is expected to have in its cache. reason: a word or two for
    operators. source, num_source: the engine that it is to get KV of so many tokens from; None: of none."""

    link: EngineLink
    reason: str
    num_hit: int = 0
    source: int | None = None
    num_source: int = 0


class Routing(Protocol):
    """uses_keys: whether requests are to carry the keys of their blocks, and engines to tell of their caches.

    It may have a method `looks_at(request)`: of which engines it depends on what they have told after steps and of
    their caches (`EngineLink.stats`, answers in the making, the index), where `choose` is asked of the request next. To
    others it may look only for what they were given. Simulations then spare what is looked at by nobody."""

    uses_keys: bool

    def choose(self, request: Request, links: Mapping[int, EngineLink], now: float) -> Route:
        """One of `links`, of which there is one at least."""
        ...

    def leave(self, link: int) -> None:
        """It has gone."""
        ...

    def note_fetch(self, num_tokens: int, took_s: float) -> None:
        """An engine got KV of so many tokens from another one in this time."""
        ...


def least_loaded(links: Mapping[int, EngineLink]) -> EngineLink:
    """The one with the fewest tokens open; of equal ones, who joined first."""
    least = next(iter(links.values()))
    for link in links.values():
        if link.num_tokens < least.num_tokens or (link.num_tokens == least.num_tokens and link.number < least.number):
            least = link
    return least


class RoundRobin:
    uses_keys = False

    def __init__(self) -> None:
        self._last = -1

    def choose(self, request: Request, links: Mapping[int, EngineLink], now: float) -> Route:
        self._last = min((number for number in links if number > self._last), default=min(links))
        return Route(links[self._last], "turn")

    def leave(self, link: int) -> None:
        pass

    def note_fetch(self, num_tokens: int, took_s: float) -> None:
        pass

    def looks_at(self, request: Request) -> Iterable[int]:
        return ()


class LeastLoad:
    uses_keys = False

    def choose(self, request: Request, links: Mapping[int, EngineLink], now: float) -> Route:
        return Route(least_loaded(links), "load")

    def leave(self, link: int) -> None:
        pass

    def note_fetch(self, num_tokens: int, took_s: float) -> None:
        pass

    def looks_at(self, request: Request) -> Iterable[int]:
        return ()


class PowerOfTwo:
    uses_keys = False

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def choose(self, request: Request, links: Mapping[int, EngineLink], now: float) -> Route:
        drawn = self._random.sample(list(links), min(2, len(links)))
        return Route(least_loaded({number: links[number] for number in drawn}), "two")

    def leave(self, link: int) -> None:
        pass

    def note_fetch(self, num_tokens: int, took_s: float) -> None:
        pass

    def looks_at(self, request: Request) -> Iterable[int]:
        return ()


class SessionAffinity:
    """A request without a session has the name of its own."""

    uses_keys = False

    def choose(self, request: Request, links: Mapping[int, EngineLink], now: float) -> Route:
        if not request.session:
            return Route(least_loaded(links), "load")
        num_new = len(request.prompt_tokens)
        bound = _BOUND * (sum([link.num_tokens for link in links.values()]) + num_new) / len(links)
        name = request.session.encode("utf8")
        falls = sorted(links.values(), key=lambda link: _draw(name, link.name), reverse=True)
        for link in falls:
            if not link.num_tokens or link.num_tokens + num_new <= bound:
                return Route(link, "session" if link is falls[0] else "session full")
        return Route(least_loaded(links), "load")

    def leave(self, link: int) -> None:
        pass

    def note_fetch(self, num_tokens: int, took_s: float) -> None:
        pass

    def looks_at(self, request: Request) -> Iterable[int]:
        return ()


class PrefixAffinity:
    uses_keys = True

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def choose(self, request: Request, links: Mapping[int, EngineLink], now: float) -> Route:
        least = least_loaded(links)
        most = max([link.num_tokens for link in links.values()])
        size = least.ready.block_size
        num_tokens = len(request.prompt_tokens)
        for level in self._index.levels(request.keys):
            num_hit = min(level.num_blocks, (num_tokens - 1) // size) * size
            able = {number: links[number] for number in sorted(level.links) if number in links}
            if not able:
                continue
            if most - least.num_tokens > _FAR_TOKENS and most > _FAR * least.num_tokens:
                return Route(least, "load", num_hit if least.number in able else 0)
            if num_hit <= _MUCH * num_tokens:
                break
            return Route(least_loaded(able), "prefix", num_hit)
        return Route(least, "load")

    def leave(self, link: int) -> None:
        pass

    def note_fetch(self, num_tokens: int, took_s: float) -> None:
        pass

    def looks_at(self, request: Request) -> Iterable[int]:
        return {number for level in self._index.levels(request.keys) for number in level.links}


def _draw(name: bytes, link: str) -> bytes:
    return blake2b(name, key=link.encode("utf8")[:64], digest_size=8).digest()
