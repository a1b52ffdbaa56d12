"""Tells which blocks of an engine are published and which no longer (`core.kv_events`): front ends by key, others with
the tokens of each block.

What happens in a step goes in one message, as its result is committed. Nothing is kept while nobody listens.
"""

from __future__ import annotations

from collections.abc import Callable

from ...core.block import BlockKey, split_keys
from ...core.effects import Outbox
from ...core.kv_events import CLEARED, REMOVED, STORED, EventRuns, KVEvent, KVEvents, TokenEvent, WatchKV
from ...core.sequence import Sequence
from ...core.tiers import TierEvent, TierEvents
from ..blocks.groups import KVBlocks


class KVEventPublisher:
    """To front ends. A front end that asks is told at first all that is published; all others that listen hear it
    too, and take it for what it is.

    kv.blocks.radix.Listener to the pool of layers that see everything; a model without such layers tells of
    nothing.
    """

    def __init__(self, blocks: KVBlocks, outbox: Outbox) -> None:
        self._pool = blocks.full_pool
        self._outbox = outbox
        self._seq = 0
        self._runs = _runs()

    def watch(self, event: WatchKV, now: float) -> None:
        if self._pool is None:
            return
        if self in self._pool.listeners:
            self._pool.listeners.remove(self)
        self._runs = _runs()
        if event.is_wanted:
            self._pool.listeners.append(self)
            self._runs.events.append(KVEvent(CLEARED))
            for node in self._pool.nodes():
                self.stored(node.key, b"" if node.parent is None else node.parent.key, node.depth)
            self.flush()

    def stored(self, key: BlockKey, parent: BlockKey, depth: int) -> None:
        self._runs.store("", key, parent, depth)

    def removed(self, key: BlockKey) -> None:
        self._runs.remove("", key)

    def flush(self) -> None:
        """Send the events so far."""
        runs = self._runs
        if runs.is_empty:
            return
        self._outbox.answers.append(KVEvents(self._seq, runs.take()))
        self._seq += 1


class TokenEventPublisher:
    """To others than front ends. Blocks of requests with a salt are never told, nor are those from the first on that
    holds anything but tokens. Nor are blocks that came by their keys alone, until a request without a salt
    publishes more after them: what a store or a peer sends has no tokens here. A block is told after those before
    it, and its end before theirs.

    kv.blocks.radix.Listener to the pool of layers that see everything; a model without such layers tells of nothing.
    The first event is CLEARED.
    """

    def __init__(self, blocks: KVBlocks, hear: Callable[[tuple[TokenEvent, ...]], None]) -> None:
        self._hear = hear
        self._block_size = blocks.block_size
        self._told: set[BlockKey] = set()
        self._gone: list[BlockKey] = []  # after the last of the events
        self._events = [TokenEvent(CLEARED)]
        pool = blocks.full_pool
        self._table = -1 if pool is None else blocks.pools.index(pool)
        if pool is not None:
            pool.listeners.append(self)

    def published(self, seq: Sequence) -> None:
        """Blocks of the sequence may have been."""
        request = seq.request
        if request.cache_salt or self._table < 0:
            return
        end = seq.tables[self._table].num_published
        if request.embeds:
            end = min(end, request.embeds[0].start // self._block_size)
        first = end
        told, keys, size = self._told, seq.keys, self._block_size
        while first and keys[first - 1] not in told:
            first -= 1
        if first < end:
            new, parent = tuple(keys[first:end]), keys[first - 1] if first else None
            told.update(new)
            self._close_gone()
            tokens = tuple(seq.tokens[first * size : end * size])
            self._events.append(TokenEvent(STORED, new, parent, tokens, size, request.adapter))

    def stored(self, key: BlockKey, parent: BlockKey, depth: int) -> None:
        """Heard of with its tokens by `published`."""

    def removed(self, key: BlockKey) -> None:
        if key not in self._told:
            return
        self._told.remove(key)
        self._gone.append(key)

    def has_told(self, key: BlockKey) -> bool:
        """Whether it was told of and is there."""
        return key in self._told

    def flush(self, now: float) -> None:
        """Send the events so far."""
        self._close_gone()
        if self._events:
            events, self._events = tuple(self._events), []
            self._hear(events)

    def _close_gone(self) -> None:
        if self._gone:
            self._events.append(TokenEvent(REMOVED, tuple(self._gone)))
            self._gone.clear()


class TierEventPublisher:
    """Tells the same of blocks in the tiers of the engine's store, of those alone that `log`, which is of the engine's
    own pool, has told with their tokens before: so none of requests with a salt, nor what others put into a store that
    is shared. Their tokens are not told again."""

    def __init__(
        self, log: TokenEventPublisher, block_size: int, hear: Callable[[tuple[TokenEvent, ...]], None]
    ) -> None:
        self._log = log
        self._block_size = block_size
        self._hear = hear
        self._told: dict[str, set[BlockKey]] = {}

    def take(self, message: TierEvents) -> None:
        """What the store says; a snapshot says again what was told, and what is not in it has gone."""
        events: list[TokenEvent] = []
        before: dict[str, set[BlockKey]] = {}
        for event in message.events:
            if event.kind == CLEARED:
                before, self._told = self._told, {}
            else:
                events += self._event(event, before)
        for tier, keys in before.items():
            if gone := keys - self._told.get(tier, set()):
                events.append(TokenEvent(REMOVED, tuple(sorted(gone)), tier=tier))
        if events:
            self._log.flush(0.0)
            self._hear(tuple(events))

    def _event(self, event: TierEvent, before: dict[str, set[BlockKey]]) -> list[TokenEvent]:
        told = self._told.setdefault(event.tier, set())
        keys = list(split_keys(event.keys))
        if event.kind == REMOVED:
            gone = tuple(key for key in keys if key in told)
            told.difference_update(gone)
            return [TokenEvent(REMOVED, gone, tier=event.tier)] if gone else []
        known = before.get(event.tier, set())
        here = [key for key in keys if key in known or self._log.has_told(key)]
        new = tuple(key for key in here if key not in told and key not in known)
        told.update(here)
        return [TokenEvent(STORED, new, None, (), self._block_size, tier=event.tier)] if new else []


def _runs() -> EventRuns[KVEvent]:
    return EventRuns(lambda kind, tier, keys, parent, depth: KVEvent(kind, keys, parent, depth))
