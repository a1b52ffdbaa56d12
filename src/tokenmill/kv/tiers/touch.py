"""What follows when blocks are stored or fetched: they are younger in each tier, and may be worth writing below it.

Whoever uses a block of a prompt uses all before it, though it may have those in its pools and never asks for them. So
they are used too: a block is never older than what follows it, and the head of many prompts counts for each of them. A
block that was used a moment ago has been told of already.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ...core.block import BlockKey
from ...core.tiers import TierKey
from .contents import Contents
from .replacement import TierBlock
from .saves import Saver
from .space import TierSpace

MOMENT_S = 10.0


class Touches:
    def __init__(self, contents: Contents, savers: Collection[Saver]) -> None:
        self._contents = contents
        self._savers = savers

    def use(self, block: TierKey, now: float) -> None:
        """It was fetched, or stored again."""
        contents = self._contents
        for space in contents.spaces:
            if (found := space.find(block)) is not None:
                space.use(found, now)
                if space is contents.host:
                    self.consider(found, now)

    def consider(self, block: TierBlock, now: float) -> None:
        """A block of host memory has come, or was used."""
        for saver in self._savers:
            saver.consider(block, now)

    def use_before(self, blocks: Iterable[tuple[TierKey, BlockKey]], now: float) -> None:
        """What is before these blocks (with the block before each), which were used in this order."""
        last: TierKey | None = None
        for block, parent in blocks:
            if last != (block[0], parent):
                for space in self._contents.spaces:
                    self._use_before(space, block[0], parent, now)
            last = block

    def _use_before(self, space: TierSpace, group: int, key: BlockKey, now: float) -> None:
        blocks = space.blocks[group]
        while (found := blocks.get(key)) is not None and found.used_s < now - MOMENT_S:
            space.use(found, now)
            if space is self._contents.host:
                self.consider(found, now)
            key = found.parent
