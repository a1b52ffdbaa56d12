"""Tells front ends which blocks are published and which no longer (`core.kv_events`).

What happens in a step goes in one message, as its result is committed. Who asks is told at first all that is published;
so is everybody else who listens, who takes it for what it is. Nothing is kept while nobody listens.
"""

from __future__ import annotations

from ...core.block import BlockKey
from ...core.kv_events import CLEARED, REMOVED, STORED, KVEvent, KVEvents, WatchKV
from ...core.outbox import Outbox
from ..blocks.groups import KVBlocks


class KVLog:
    """kv.blocks.radix.Listener to the pool of layers that see everything; a model without such layers tells of
    nothing."""

    def __init__(self, blocks: KVBlocks, outbox: Outbox) -> None:
        self._pool = blocks.full_pool
        self._outbox = outbox
        self._seq = 0
        self._runs = _Runs()

    def watch(self, event: WatchKV, now: float) -> None:
        if self._pool is None:
            return
        if self in self._pool.listeners:
            self._pool.listeners.remove(self)
        self._runs = _Runs()
        if event.is_wanted:
            self._pool.listeners.append(self)
            self._runs.events.append(KVEvent(CLEARED))
            for node in self._pool.nodes():
                self.stored(node.key, b"" if node.parent is None else node.parent.key, node.depth)
            self.flush()

    def stored(self, key: BlockKey, parent: BlockKey, depth: int) -> None:
        self._runs.store(key, parent, depth)

    def removed(self, key: BlockKey) -> None:
        self._runs.remove(key)

    def flush(self) -> None:
        """Send what there is."""
        runs = self._runs
        if runs.is_empty:
            return
        self._outbox.answers.append(KVEvents(self._seq, runs.take()))
        self._seq += 1


class _Runs:
    """Events in the making: blocks that follow each other are one."""

    def __init__(self) -> None:
        self.events: list[KVEvent] = []
        self._kind = ""
        self._keys = bytearray()
        self._last = self._parent = b""
        self._depth = 0

    @property
    def is_empty(self) -> bool:
        return not self.events and not self._keys

    def store(self, key: BlockKey, parent: BlockKey, depth: int) -> None:
        if self._kind != STORED or parent != self._last:
            self._close()
            self._kind, self._parent, self._depth = STORED, parent, depth
        self._keys += key
        self._last = key

    def remove(self, key: BlockKey) -> None:
        if self._kind != REMOVED:
            self._close()
            self._kind = REMOVED
        self._keys += key

    def take(self) -> tuple[KVEvent, ...]:
        self._close()
        events, self.events = tuple(self.events), []
        return events

    def _close(self) -> None:
        if self._keys:
            is_stored = self._kind == STORED
            parent, depth = (self._parent, self._depth) if is_stored else (b"", 0)
            self.events.append(KVEvent(self._kind, bytes(self._keys), parent, depth))
            self._keys = bytearray()
        self._kind = ""
