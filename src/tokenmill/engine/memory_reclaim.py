"""Gives memory of the pools back to the system: that of free blocks where the engine has had no work for some time, and
of cached ones too where the machine is short of memory.

    Relax    blocks that nobody uses are lent; job GiveBack
    its end  they are free again, and handed out after those that have memory

A block that is used again is committed when it is first touched, as at the start. The machine is looked at from
outside (`background`): the core knows neither time nor memory.
"""

from __future__ import annotations

from ..core.effects import GiveBack, JobEnded, Relax
from .state import EngineState

SHARE = 16
"""Of a pool's blocks, one in so many is given back at once: what is evicted for that was written to tiers before."""

NOTHING = GiveBack(0, ())


class MemoryReclaim:
    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._num_given = 0
        self._giving = NOTHING

    def has_spare(self, evicts: bool) -> bool:
        """Whether a Relax would find anything."""
        return self._giving == NOTHING and any(pool.has_spare(evicts) for pool in self._state.blocks.pools)

    def relax(self, event: Relax, now: float) -> None:
        if not self.has_spare(event.evicts):
            return
        lent, left = [], event.num_bytes
        for pool, group in zip(self._state.blocks.pools, self._state.config.groups, strict=True):
            size = max(group.bytes_per_block, 1)
            most = min(-(-left // size), max(pool.num_blocks // SHARE, 1))
            blocks = pool.lend(most, event.evicts) if left > 0 else []
            left -= len(blocks) * size
            lent.append(tuple(blocks))
        self._num_given += 1
        self._giving = GiveBack(self._num_given, tuple(lent))
        self._state.outbox.jobs.append(self._giving)

    def end(self, event: JobEnded, now: float) -> None:
        """Also where it failed: then it is only memory. It may be told twice."""
        if event.job == self._giving:
            for pool, blocks in zip(self._state.blocks.pools, self._giving.blocks, strict=True):
                pool.take_back(blocks)
            self._giving = NOTHING
