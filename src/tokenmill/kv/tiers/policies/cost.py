"""Recompute seconds saved per second kept: the default, since it saves most on every trace of `scripts/kv_study.py`.

    worth = recompute seconds * most over T of   P(used within T | age, uses) / E[seconds until it is used, at most T]

A block is worth what its next use saves, over how long room must be given to it until then. How likely a use is, and
how soon, is measured: of blocks used once, twice or more, which share is used again at which age (`Reuse`). The best T
is the Gittins index of a bandit, where hit density (Beckmann et al., LHD: improving cache hit rate by maximizing hit
density, NSDI 2018) takes the whole life: what pauses for a while and is then used is kept through the pause, what is
past the age where most are used goes first, and in a tier that is too small for the pause, new blocks do.

Only blocks that no other follows are given up, since a block without those before it is of no use: a prompt loses its
end first. Of all these, the one of least worth in a sample, as LHD does: ages change worth without anybody's doing, so
that no order would last. The least of earlier samples are in it, as in the eviction pool of Redis: a quarter of the
draws saves as much. They are drawn by a seeded generator: equal runs choose equally.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from operator import itemgetter

from ..replacement import TierBlock
from .admissions import Seen
from .reuse import Reuse

SAMPLE, KEPT = 8, 16
"""Blocks that are weighed for each that is given up; most of those weighed before that are still among them."""

REMEMBERED = 2
"""Keys of so many times the blocks of a full tier: one that comes again counts as used again."""


class RecomputeSeconds:
    """`rank` of a block is its index in `_blocks`, of which the first `_num_leaves` are those that nothing follows, but
    for some that were when they came."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._blocks: list[TierBlock] = []
        self._num_leaves = 0
        self._reuse: Reuse | None = None
        self._seen: Seen | None = None
        self._best: dict[TierBlock, tuple[float, float]] = {}  # worth when it was weighed, last use by then
        self._draw: Callable[[], float] = partial(random.Random.random, random.Random(0))

    def add(self, block: TierBlock, now: float) -> None:
        block.rank = len(self._blocks)
        self._blocks.append(block)
        if not block.num_children:
            self.bare(block)
        if self._seen is None:
            self._seen = Seen(REMEMBERED * (self._num_bytes // block.num_bytes))
        if self._seen.note(block.block):
            block.num_uses = max(2, block.num_uses)
        self._note(block, now)

    def use(self, block: TierBlock, now: float) -> None:
        self._note(block, now)

    def bare(self, block: TierBlock) -> None:
        index = int(block.rank)
        if index >= self._num_leaves:
            self._swap(index, self._num_leaves)
            self._num_leaves += 1

    def remove(self, block: TierBlock) -> None:
        index = int(block.rank)
        if index < self._num_leaves:
            self._num_leaves -= 1
            self._swap(index, self._num_leaves)
            index = self._num_leaves
        self._swap(index, len(self._blocks) - 1)
        self._blocks.pop()

    def victim(self, may: Callable[[TierBlock], bool], now: float) -> TierBlock | None:
        blocks, found = self._blocks, None
        self._sample(now)
        weighed, self._best = sorted(self._best.items(), key=itemgetter(1)), {}
        for block, worth in weighed:
            index = int(block.rank)
            is_leaf = index < self._num_leaves and blocks[index] is block and not block.num_children
            if not is_leaf or block.used_s != worth[1]:
                continue  # gone, followed or used since
            if found is None and may(block):
                found = block
                continue
            self._best[block] = worth
            if len(self._best) == KEPT:
                break
        return found or next((block for block in blocks if may(block)), None)

    def _sample(self, now: float) -> None:
        """Weigh some of the blocks that nothing follows: of few all."""
        blocks, draw, rate = self._blocks, self._draw, self._reuse.rate if self._reuse else None
        num_tried = 0
        while num_tried < SAMPLE and self._num_leaves and rate is not None:
            index = num_tried if self._num_leaves <= SAMPLE else int(draw() * self._num_leaves)
            if index >= self._num_leaves:
                break
            block = blocks[index]
            if block.num_children:
                self._num_leaves -= 1
                self._swap(index, self._num_leaves)
                continue
            num_tried += 1
            worth = block.recompute_s / block.kind.num_bytes * rate(block.num_uses, now - block.used_s)
            self._best[block] = worth, block.used_s

    def _note(self, block: TierBlock, now: float) -> None:
        if self._reuse is None:
            self._reuse = Reuse(self._num_bytes // block.num_bytes)
        self._reuse.note(block.key, block.num_uses, now)

    def _swap(self, one: int, other: int) -> None:
        blocks = self._blocks
        first, second = blocks[one], blocks[other]
        blocks[one], blocks[other] = second, first
        first.rank, second.rank = other, one
