"""Least frequently used, with aging: a system prompt outlives a burst of long prompts that come once each.

LFU with dynamic aging (Arlitt et al., Evaluating content management techniques for web proxy caches, 2000): a block's
value is its uses and the age of the tier at its last use, which is the value of what was given up last. Values are
whole numbers, so that blocks of a value are in a ring, used longest ago first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from ..replacement import Ring, TierBlock
from .lru import oldest_leaf

MOST_USES = 1000


class LeastFrequentlyUsed:
    """`rank` of a block is its value. `_values`: a heap of those that have a ring."""

    def __init__(self, num_bytes: int) -> None:
        self._rings: dict[float, Ring] = {}
        self._values: list[float] = []
        self._age = 0.0

    def add(self, block: TierBlock, now: float) -> None:
        block.rank = value = self._age + min(block.num_uses, MOST_USES)
        ring = self._rings.get(value)
        if ring is None:
            ring = self._rings[value] = Ring()
            heapq.heappush(self._values, value)
        ring.append(block)

    def use(self, block: TierBlock, now: float) -> None:
        self.remove(block)
        self.add(block, now)

    def bare(self, block: TierBlock) -> None:
        pass

    def remove(self, block: TierBlock) -> None:
        self._rings[block.rank].remove(block)

    def victim(self, may: Callable[[TierBlock], bool], now: float) -> TierBlock | None:
        while self._values and self._rings[self._values[0]].first is None:
            del self._rings[heapq.heappop(self._values)]
        parent = None
        for value in self._in_order():
            found = oldest_leaf(self._rings[value], may)
            if found is not None and not found.num_children:
                self._age = value
                return found
            parent = parent or found
        return parent

    def _in_order(self) -> Iterator[float]:
        """Values, least first; mostly the first has what is wanted."""
        if self._values:
            yield self._values[0]
            yield from sorted(self._values)[1:]
