"""Which prefixes are copied to a further engine before a request needs them there, and the copies under way. Pure.

    rate   requests a second whose longest cached prefix it is, of late
    load   of an engine's time, what such requests take at that rate: what is left of their prompts to compute, or,
           where that is more, the rows that their answers are drawn in
    hot    the load is more than a part of the time of all engines that have it, or are being sent it

Hot prefixes are copied, the hottest first, from the engine that has least to do to the one that would begin first with
a prompt, if that is sooner than any that has it, has room to spare, and computing the prefix takes longer than to copy
it. An engine that gets it sooner from the tiers of its KV store gets it from there. What was copied is the prefix
cache's to keep: nothing is ever taken back, and an engine that gave a copy up gets no other of it for a while.

Copies of hot prefixes: Mooncake's scheduler (Qin et al., FAST'25); the measure of load is our own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf
from typing import NamedTuple, Protocol

from ..core.block import KEY_BYTES, BlockKey, split_keys
from ..core.config import OwnPolicy
from ..core.moves import KVSource, Offer, Prefetch, Prefetched, Release
from ..core.request import Request
from .events import CopyEnded, Effects
from .index import PrefixIndex
from .links import EngineLink
from .load import pace, positions
from .pools import DECODE, kind_of, predicted_load
from .stores import STRIDE, Stores

POLICIES = ("on", "off")

_LATELY_S = 5.0
_FEW = 4
"""Requests before a rate is known."""
_FULL = 0.15
"""Of its time, the most that an engine should have to do with one prefix: steps as such are not counted, which requests
share as far as they come together."""
_ROOM = 0.125
"""Of the target's room, the most that a prefix may take."""
_USED = 0.75
"""Of the target's room, the most that may be used with it, by requests and their predicted answers."""
_WORTH = 2.0
"""Computing a prefix takes so many times as long as copying it, or it is not copied."""
_REST_S = 30.0
_MOST = 512
"""Prefixes that are counted."""


class CopyProposal(NamedTuple):
    """keys: of all blocks of the prefix, joined. source: None: the tiers of the target's store."""

    keys: bytes
    source: EngineLink | None
    target: EngineLink


class CopyView(NamedTuple):
    """links     engines that compute prompts
    holders   who of them has the blocks with these keys, is expected to, or is being sent them
    may_send  whether an engine has them for certain, and can send them now
    may_take  whether an engine can be sent something now
    copy_s    what it takes to copy so many tokens
    load_s    what it takes an engine to load a prefix from the tiers of its store; inf: they do not have it
    """

    links: Sequence[EngineLink]
    holders: Callable[[bytes], set[int]]
    may_send: Callable[[EngineLink, bytes], bool]
    may_take: Callable[[EngineLink], bool]
    copy_s: Callable[[int], float]
    load_s: Callable[[EngineLink, bytes], float]


class Replication(Protocol):
    """Which prefixes are copied where. A policy."""

    def note(self, keys: bytes, num_new: int, now: float) -> None:
        """A request comes that begins with these blocks, which some engine has cached, and with so many tokens more."""
        ...

    @property
    def is_wanted(self) -> bool:
        """Whether `propose` could have something to say."""
        ...

    def propose(self, view: CopyView, now: float) -> Iterator[CopyProposal]: ...


@dataclass(slots=True)
class _Heat:
    """weight    requests, those long ago less
    begun_s   when the first one came
    num_new   tokens that a request has beside the prefix, on average
    """

    keys: bytes
    weight: float
    begun_s: float
    at_s: float
    num_new: float

    def faded(self, now: float) -> float:
        return self.weight * exp((self.at_s - now) / _LATELY_S)

    def rate(self, now: float) -> float:
        """Requests a second."""
        return self.faded(now) / (_LATELY_S * (1 - exp(min(-1e-3, (self.begun_s - now) / _LATELY_S))))


class HotPrefixes:
    """See the module's text."""

    def __init__(self) -> None:
        self._heats: dict[BlockKey, _Heat] = {}
        self._rests: dict[tuple[BlockKey, int], float] = {}

    @property
    def is_wanted(self) -> bool:
        return bool(self._heats)

    def note(self, keys: bytes, num_new: int, now: float) -> None:
        key = keys[-KEY_BYTES:]
        heat = self._heats.get(key)
        if heat is None:
            if len(self._heats) >= _MOST:
                self._forget(sorted(self._heats, key=lambda each: self._heats[each].faded(now))[: _MOST // 2])
            self._heats[key] = _Heat(keys, 1.0, now, now, num_new)
            return
        heat.weight = heat.faded(now) + 1
        heat.at_s = now
        heat.num_new += (num_new - heat.num_new) / heat.weight

    def propose(self, view: CopyView, now: float) -> Iterator[CopyProposal]:
        if not any([link.costs.is_known for link in view.links]):
            return
        self._forget([key for key, heat in self._heats.items() if heat.faded(now) < 0.1])
        self._rests = {name: until_s for name, until_s in self._rests.items() if until_s > now}
        hot: list[tuple[float, BlockKey, set[int]]] = []
        for key, heat in self._heats.items():
            if heat.faded(now) < _FEW:
                continue
            holders = view.holders(heat.keys)
            loads = [_load(link, heat, now) for link in view.links if link.number in holders]
            if loads and sum(loads) / len(loads) > _FULL * len(holders):
                hot.append((-sum(loads) / len(loads) / len(holders), key, holders))
        for _, key, holders in sorted(hot):
            proposal = self._copy(self._heats[key], holders, view)
            if proposal is not None:
                self._rests[key, proposal.target.number] = now + _REST_S
                yield proposal

    def _copy(self, heat: _Heat, holders: set[int], view: CopyView) -> CopyProposal | None:
        sources = [link for link in view.links if link.number in holders and view.may_send(link, heat.keys)]
        copy_s = view.copy_s(_num_tokens(heat, view.links[0])) if sources else inf
        targets: list[tuple[float, int, EngineLink, bool]] = []
        for link in view.links:
            if link.number in holders or not view.may_take(link):
                continue
            load_s = view.load_s(link, heat.keys)
            if self._is_worth(link, heat, min(copy_s, load_s)):
                targets.append((_pace(link)[0], link.number, link, load_s < copy_s))
        if not targets:
            return None
        base_s, _, target, is_loaded = min(targets, key=lambda each: each[:2])
        if base_s >= min(_pace(link)[0] for link in view.links if link.number in holders):
            return None
        source = None if is_loaded else min(sources, key=lambda link: (link.num_tokens, link.number))
        return CopyProposal(heat.keys, source, target)

    def _is_worth(self, link: EngineLink, heat: _Heat, took_s: float) -> bool:
        num_tokens = _num_tokens(heat, link)
        if (heat.keys[-KEY_BYTES:], link.number) in self._rests:
            return False
        if num_tokens > _ROOM * link.num_slots or predicted_load(link) + num_tokens / link.num_slots > _USED:
            return False
        _, token_s, position_s, _ = _pace(link)
        return token_s * num_tokens + position_s * positions(num_tokens, 0) > _WORTH * took_s

    def _forget(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            del self._heats[key]


def replication_named(name: str) -> Replication | None:
    """One of POLICIES, or one's own."""
    if isinstance(name, OwnPolicy):
        own: Replication = name.make()
        return own
    return HotPrefixes() if name == "on" else None


def _pace(link: EngineLink) -> tuple[float, float, float, float]:
    ready = link.ready
    return pace(link.load, link.costs, ready.max_num_batched_tokens, ready.max_num_seqs, link.num_slots)


def _num_tokens(heat: _Heat, link: EngineLink) -> int:
    return len(heat.keys) // KEY_BYTES * link.ready.block_size


def _load(link: EngineLink, heat: _Heat, now: float) -> float:
    """Of the engine's time, what requests for the prefix would take there."""
    _, token_s, position_s, each_s = _pace(link)
    num_hit = _num_tokens(heat, link)
    prompt_s = token_s * heat.num_new + position_s * positions(round(heat.num_new), num_hit)
    rows_s = link.load.num_output * each_s / max(1, link.ready.max_num_seqs)
    return heat.rate(now) * max(prompt_s, rows_s)


# Prefixes on their way from one engine's cache to another's, without a request.
#
#     source  <-- Offer(ticket, keys)      it holds the blocks until the ticket is released
#     target  <-- Prefetch(number, ...)    it copies them into its cache; its answer is Prefetched
#     source  <-- Release(ticket)          always, once: the copy is over, or one of the two has gone, or time is over
#
# Without a source, the target loads the prefix from the tiers of its KV store.
#
# An engine takes part in one copy at a time, and then in none for as long as that took. So a copy never takes more than
# half of an engine's time, and a target never more than the part of its room that the policy allows.


_AT_ONCE = 4
"""Copies under way, and so the most that begin in one review."""
_LIMIT_S = 30.0
"""A copy is given up that takes longer."""
_COPY_S, _COPY_TOKEN_S = 0.01, 2e-6
"""What one takes: as such, and for each token before one was seen."""
_LATELY = 0.25


@dataclass(slots=True, eq=False)
class _Copy:
    keys: bytes
    source: int | None
    target: int
    ticket: str
    begun_s: float


class Copies:
    """policy  which prefixes are copied; None: none are

    links       engines that serve, by number
    index       what engines hold
    stores      what their KV stores hold
    new_ticket  makes a ticket nobody can guess; None: nothing is copied
    may_get     whether an engine may get requests
    """

    def __init__(
        self,
        links: Mapping[int, EngineLink],
        index: PrefixIndex,
        stores: Stores,
        new_ticket: Callable[[], str] | None,
        may_get: Callable[[EngineLink], bool],
    ) -> None:
        self.policy: Replication | None = None
        self._links = links
        self._index = index
        self._stores = stores
        self._new_ticket = new_ticket
        self._may_get = may_get
        self._of: dict[int, _Copy] = {}
        self._rests: dict[int, float] = {}
        self._num_begun = 0
        self._token_s = _COPY_TOKEN_S

    def __len__(self) -> int:
        return len(self._of)

    @property
    def is_wanted(self) -> bool:
        """Whether reviews are."""
        has_choice = self.policy is not None and self.policy.is_wanted and len(self._links) > 1
        return bool(self._of) or has_choice

    def note(self, request: Request, now: float) -> None:
        """A request comes that no engine has been given."""
        if self.policy is None or not request.keys or len(self._links) < 2:
            return
        size = next(iter(self._links.values())).ready.block_size
        num_tokens = len(request.prompt_tokens)
        num_blocks = min(self._index.num_held(request.keys), (num_tokens - 1) // size)
        if num_blocks:
            self.policy.note(request.keys[: num_blocks * KEY_BYTES], num_tokens - num_blocks * size, now)

    def review(self, now: float, effects: Effects) -> None:
        """Let some prefixes be copied."""
        for number in [number for number, copy in self._of.items() if now >= copy.begun_s + _LIMIT_S]:
            self._end(number, 0, "it took too long", now, effects)
        self._rests = {link: until_s for link, until_s in self._rests.items() if until_s > now}
        if self.policy is None or len(self._links) < 2:
            return
        links = tuple(link for link in self._links.values() if kind_of(link.pool) != DECODE)
        view = CopyView(links, self._holders, self._may_send, self._may_take, self._copy_s, self._load_s)
        for keys, source, target in self.policy.propose(view, now):
            if (source is None or self._may_send(source, keys)) and self._may_take(target):
                self._begin(keys, source, target, now, effects)

    def hear(self, link: int, message: Prefetched, now: float, effects: Effects) -> None:
        """Of the target: it has what it will get."""
        copy = self._of.get(message.number)
        if copy is not None and copy.target == link:
            num_tokens = message.num_blocks * self._links[link].ready.block_size
            if num_tokens and copy.source is not None:
                self._token_s += _LATELY * (max(0.0, now - copy.begun_s - _COPY_S) / num_tokens - self._token_s)
            error = message.error or ("" if num_tokens else "the source has it no more")
            self._end(message.number, num_tokens, error, now, effects)

    def lose(self, link: int, now: float, effects: Effects) -> None:
        """An engine has gone. A target whose source has gone says so itself."""
        for number in [number for number, copy in self._of.items() if copy.target == link]:
            self._end(number, 0, "its target has gone", now, effects)

    def check(self) -> None:
        """Assert what must hold between events; slow, for tests."""
        if self._links:
            assert all(copy.target in self._links for copy in self._of.values()), self._of
        ends = [end for copy in self._of.values() for end in (copy.source, copy.target) if end is not None]
        assert len(ends) == len(set(ends)) and len(self._of) <= _AT_ONCE, self._of

    def _begin(self, keys: bytes, source: EngineLink | None, target: EngineLink, now: float, effects: Effects) -> None:
        number, blocks = self._num_begun, tuple(split_keys(keys))
        self._num_begun += 1
        if source is None:
            self._of[number] = _Copy(keys, None, target.number, "", now)
            effects.tells.append((target.number, Prefetch(number, blocks)))
            return
        assert self._new_ticket is not None
        ticket = self._new_ticket()
        self._of[number] = _Copy(keys, source.number, target.number, ticket, now)
        worker = source.ready.worker
        kv_source = KVSource(worker.id, worker.incarnation, worker.kv_address, worker.host, ticket)
        effects.tells.append((source.number, Offer(ticket, "", blocks)))
        effects.tells.append((target.number, Prefetch(number, blocks, kv_source)))

    def _end(self, number: int, num_tokens: int, error: str, now: float, effects: Effects) -> None:
        copy = self._of.pop(number)
        took_s = now - copy.begun_s
        for link in (copy.source, copy.target):
            if link is not None:
                self._rests[link] = now + took_s
        if copy.source is not None and copy.source in self._links:
            effects.tells.append((copy.source, Release(copy.ticket)))
        effects.copied.append(CopyEnded(copy.source, copy.target, num_tokens, error, took_s))

    def _holders(self, keys: bytes) -> set[int]:
        coming = {copy.target for copy in self._of.values() if copy.keys == keys}
        return {number for number in self._index.holders(keys) if number in self._links} | coming

    def _is_free(self, link: EngineLink) -> bool:
        ends = {end for copy in self._of.values() for end in (copy.source, copy.target)}
        return link.number not in ends and link.number not in self._rests and len(self._of) < _AT_ONCE

    def _may_send(self, link: EngineLink, keys: bytes) -> bool:
        has_it = self._index.has_told(link.number, keys, len(keys) // KEY_BYTES)
        return has_it and self._is_free(link) and self._new_ticket is not None and bool(link.ready.worker.kv_address)

    def _may_take(self, link: EngineLink) -> bool:
        return self._is_free(link) and self._may_get(link)

    def _load_s(self, link: EngineLink, keys: bytes) -> float:
        stops = self._stores.stops(link.number, keys, 0) if self._stores.is_known else ()
        return stops[-1].load_s if stops and stops[-1].end + STRIDE > len(keys) // KEY_BYTES else inf

    def _copy_s(self, num_tokens: int) -> float:
        return _COPY_S + self._token_s * num_tokens
