"""Prefixes on their way from one engine's cache to another's, without a request. Pure.

    source  <-- Offer(ticket, keys)      it holds the blocks until the ticket is released
    target  <-- Prefetch(number, ...)    it copies them into its cache; its answer is Prefetched
    source  <-- Release(ticket)          always, once: the copy is over, or one of the two has gone, or time is over

Without a source, the target loads the prefix from the tiers of its KV store.

An engine takes part in one copy at a time, and then in none for as long as that took. So a copy never takes more than
half of an engine's time, and a target never more than the part of its room that the policy allows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

from ..core.block import KEY_BYTES, split_keys
from ..core.moves import KVSource, Offer, Prefetch, Prefetched, Release
from ..core.request import Request
from .events import CopyEnded, Effects
from .index import PrefixIndex
from .links import EngineLink
from .pools import DECODE, kind_of
from .replication import CopyView, Replication
from .stores import STRIDE, Stores

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
