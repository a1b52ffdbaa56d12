"""What front ends know of KV that is wanted later, handed on to the store (`core.hints`)."""

from __future__ import annotations

from ....core.block import split_keys
from ....core.effects import PinBlocks, PromoteBlocks
from ....core.hints import KeepKV, PromoteKV
from ....core.tiers import TierKey
from .port import EnginePort
from .writes import Writes


class Hints:
    """Does nothing until a store with tiers was opened."""

    def __init__(self, state: EnginePort, writes: Writes) -> None:
        self._state = state
        self._writes = writes

    def keep(self, event: KeepKV, now: float) -> None:
        if self._state.has_tiers and event.keys:
            wanted = self._wanted(event.keys)
            self._state.outbox.jobs.append(PinBlocks(wanted, event.seconds, event.owner))
            if event.seconds:
                self._writes.want(wanted)

    def promote(self, event: PromoteKV, now: float) -> None:
        if self._state.has_tiers and event.keys:
            self._state.outbox.jobs.append(PromoteBlocks(self._wanted(event.keys)))

    def _wanted(self, keys: bytes) -> tuple[TierKey, ...]:
        """In the order of the prefix, as all that is said to a store."""
        num_groups = len(self._state.config.groups)
        return tuple((group, key) for key in split_keys(keys) for group in range(num_groups))
