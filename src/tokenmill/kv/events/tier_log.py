"""Tells others than front ends which blocks are in the tiers of the engine's store, too (`core.kv_events.TokenEvent`).

Told are blocks that have been told with their tokens before (`token_log`): so none of requests with a salt, nor what
others put into a store that is shared. Their tokens are not told again.
"""

from __future__ import annotations

from collections.abc import Callable

from ...core.block import BlockKey, split_keys
from ...core.kv_events import CLEARED, REMOVED, STORED, TokenEvent
from ...core.tiers import TierEvent, TierEvents
from .token_log import TokenLog


class TierLog:
    """log: of the engine's own pool."""

    def __init__(self, log: TokenLog, block_size: int, hear: Callable[[tuple[TokenEvent, ...]], None]) -> None:
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
