"""S3-FIFO: what comes once goes soon; three queues, without an order that uses change.

    small   a tenth of the tier: what is new; from its end to main if it was used since, else out
    main    from its end out, or back to its head as often as it was used since, thrice at most
    ghosts  keys of what went from small, as many as main has blocks: who comes again goes into main

Yang et al., FIFO queues are all you need for cache eviction, SOSP 2023. Here a block that others follow is passed over.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from ....core.tiers import TierKey
from ..replacement import Ring, TierBlock
from .lru import oldest_leaf

SMALL_SHARE = 0.1
MOST_USES = 3

_MAIN = 4
"""`rank` of a block: its uses, and this in main."""


class S3Fifo:
    def __init__(self, num_bytes: int) -> None:
        self._small, self._main = Ring(), Ring()
        self._small_bytes = self._main_bytes = 0
        self._most_small = int(num_bytes * SMALL_SHARE)
        self._ghosts: OrderedDict[TierKey, int] = OrderedDict()
        self._ghost_bytes = 0

    def add(self, block: TierBlock, now: float) -> None:
        ghost = self._ghosts.pop(block.block, 0)
        self._ghost_bytes -= ghost
        if ghost:
            self._put_main(block, 0)
        else:
            block.rank = 0
            self._small.append(block)
            self._small_bytes += block.num_bytes

    def use(self, block: TierBlock, now: float) -> None:
        if block.rank % _MAIN < MOST_USES:
            block.rank += 1

    def bare(self, block: TierBlock) -> None:
        pass

    def remove(self, block: TierBlock) -> None:
        if block.rank >= _MAIN:
            self._main.remove(block)
            self._main_bytes -= block.num_bytes
        else:
            self._small.remove(block)
            self._small_bytes -= block.num_bytes

    def victim(self, may: Callable[[TierBlock], bool], now: float) -> TierBlock | None:
        while True:
            is_small = self._small_bytes > self._most_small or self._main.first is None
            block = oldest_leaf(self._small if is_small else self._main, may)
            if block is None or block.num_children:
                is_small = not is_small
                block = oldest_leaf(self._small if is_small else self._main, may) or block
            if block is None:
                return None
            is_small = block.rank < _MAIN
            uses = int(block.rank) % _MAIN
            if not uses:
                if is_small:
                    self._remember(block)
                return block
            self.remove(block)
            self._put_main(block, 0 if is_small else uses - 1)

    def _put_main(self, block: TierBlock, uses: int) -> None:
        block.rank = _MAIN + uses
        self._main.append(block)
        self._main_bytes += block.num_bytes

    def _remember(self, block: TierBlock) -> None:
        self._ghosts[block.block] = block.num_bytes
        self._ghost_bytes += block.num_bytes
        while self._ghost_bytes > self._main_bytes + self._most_small:
            self._ghost_bytes -= self._ghosts.popitem(last=False)[1]
