"""Least recently used: follows a load that changes, and needs to know nothing of blocks.

A block whose children are here is passed over, since they would be useless without it, and is met again right after
them: those that were passed are turned round. Where many prompts lie between each other this could go on; it ends after
`MOST_PASSED` blocks.
"""

from __future__ import annotations

from collections.abc import Callable

from ..replacement import Ring, TierBlock

MOST_PASSED = 1024


class LeastRecentlyUsed:
    def __init__(self, num_bytes: int) -> None:
        self._ring = Ring()

    def add(self, block: TierBlock, now: float) -> None:
        self._ring.append(block)

    def use(self, block: TierBlock, now: float) -> None:
        self._ring.remove(block)
        self._ring.append(block)

    def bare(self, block: TierBlock) -> None:
        pass

    def remove(self, block: TierBlock) -> None:
        self._ring.remove(block)

    def victim(self, may: Callable[[TierBlock], bool], now: float) -> TierBlock | None:
        return oldest_leaf(self._ring, may)


def oldest_leaf(ring: Ring, may: Callable[[TierBlock], bool]) -> TierBlock | None:
    """The first block of the ring that may be given up; one that others follow only where there is no other."""
    parents: list[TierBlock] = []
    found = None
    for block in ring:
        if not may(block):
            continue
        if not block.num_children or len(parents) == MOST_PASSED:
            found = block
            break
        parents.append(block)
    if found is None or found.num_children:
        return parents[0] if parents else None
    for block in parents:
        ring.remove(block)
        ring.insert_first(block)
    return found
