"""Tells others than front ends which blocks are published, and of which tokens (`core.kv_events.TokenEvent`).

Blocks of requests with a salt are never told, nor are those from the first on that holds anything but tokens. Nor are
blocks that came by their keys alone, until a request without a salt publishes more after them: what a store or a peer
sends has no tokens here. A block is told after those before it, and its end before theirs.
"""

from __future__ import annotations

from collections.abc import Callable

from ...core.block import BlockKey
from ...core.kv_events import CLEARED, REMOVED, STORED, TokenEvent
from ...core.sequence import Sequence
from ..blocks.groups import KVBlocks


class TokenLog:
    """kv.blocks.radix.Listener to the pool of layers that see everything; a model without such layers tells of nothing.
    The first event is CLEARED."""

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
        """Tell what there is."""
        self._close_gone()
        if self._events:
            events, self._events = tuple(self._events), []
            self._hear(events)

    def _close_gone(self) -> None:
        if self._gone:
            self._events.append(TokenEvent(REMOVED, tuple(self._gone)))
            self._gone.clear()
