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

import math
import random
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter

from ....core.block import BlockKey
from ..replacement import TierBlock
from .admissions import Seen

FOLLOWED = 8192
"""Blocks of a full tier that are followed, at most; and as many times more that were given up as `BEYOND` says."""
BEYOND = 5
NUM_VINTAGES = 4
NUM_AGES, AGES_PER_OCTAVE = 48, 3
"""From 1 s to 14 hours."""
NUM_CLASSES = 3
LEARNT = 20.0
"""Intervals of a class that count as much as those of all classes together."""
UNKNOWN, ASSUMED = 1.0, 0.1
"""At ages to which few have come: so many intervals are assumed, with so large a share ending at each age, as if age
foretold as much again."""
_log2 = math.log2
_STARTS = [0.0, *(2 ** (age / AGES_PER_OCTAVE) for age in range(NUM_AGES))]
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


class Reuse:
    """How soon blocks are used again, measured.

        a use of a block   begins an interval, of the class of its uses so far (once, twice, more)
        its next use       ends the interval, at an age
        rate(uses, age)    most over T of   P(used within T from now) / E[seconds until then, at most T]

    Intervals are followed whether the block is still in the tier or not, so that what is learnt does not depend on
    what was given up. Of a large tier a sample by key is followed (Waldspurger et al., Efficient MRC construction with
    SHARDS, FAST 2015). Ages are in classes of a third of an octave. The share that ends at an age is of the intervals
    that began long enough ago (Kaplan and Meier, 1958); they are counted in vintages, of which the last few are kept:
    a load that changes is followed.

    num_blocks: that the tier has room for."""

    def __init__(self, num_blocks: int) -> None:
        self._mask = (1 << max(0, math.ceil(math.log2(max(1, num_blocks) / FOLLOWED)))) - 1
        followed = max(1, num_blocks // (self._mask + 1))
        self._most = max(1000, BEYOND * followed)
        self._fit_after = max(1000, followed // 4)
        self._vintage_after = max(8000, 2 * followed)
        self._open: OrderedDict[BlockKey, tuple[float, int]] = OrderedDict()
        self._vintages: list[_Vintage] = []
        self._num_new = 0
        # While nothing is known: Blankstein et al., Hyperbolic caching, ATC 2017.
        self._rates = [[(1.0 + kind) / (1.0 + start_s) for start_s in _STARTS[:-1]] for kind in range(NUM_CLASSES)]

    def rate(self, num_uses: int, age_s: float) -> float:
        rates = self._rates[num_uses - 1 if num_uses < NUM_CLASSES else NUM_CLASSES - 1]
        if age_s < 1.0:
            return rates[0]
        age = int(_log2(age_s) * AGES_PER_OCTAVE) + 1
        return rates[age] if age < NUM_AGES else rates[-1]

    def note(self, key: BlockKey, num_uses: int, now: float) -> None:
        """It was used, for the so manieth time since it has come."""
        if self._mask and zlib.crc32(key) & self._mask:
            return
        last = self._open.pop(key, None)
        if last is not None:
            began_s, kind = last
            for vintage in reversed(self._vintages):
                if began_s >= vintage.start_s:
                    vintage.ended[kind][_age_of(now - began_s)] += 1
                    break
        kind = _class_of(num_uses)
        self._open[key] = now, kind
        if len(self._open) > self._most:
            self._open.popitem(last=False)
        if not self._vintages:
            self._vintages = [_Vintage(now)]
        vintage = self._vintages[-1]
        vintage.begun[kind] += 1
        vintage.num_begun += 1
        self._num_new += 1
        if self._num_new >= self._fit_after:
            self._fit(now)

    def _fit(self, now: float) -> None:
        self._num_new = 0
        last = self._vintages[-1]
        if now > last.marks_s[-1]:
            last.marks_s.append(now)
            last.before.append(list(last.begun))
        else:
            last.before[-1] = list(last.begun)
        if last.num_begun >= self._vintage_after:
            self._vintages = [*self._vintages[1 - NUM_VINTAGES :], _Vintage(now)]
        begun = [[0.0] * NUM_AGES for _ in range(NUM_CLASSES)]
        ended = [[0] * NUM_AGES for _ in range(NUM_CLASSES)]
        for vintage in self._vintages:
            for kind in range(NUM_CLASSES):
                for age in range(NUM_AGES):
                    ended[kind][age] += vintage.ended[kind][age]
            for age in range(NUM_AGES):
                for kind, num in enumerate(vintage.begun_by(now - _STARTS[age])):
                    begun[kind][age] += num
        usual = _hazards(
            [sum(column) for column in zip(*begun, strict=True)], [sum(c) for c in zip(*ended, strict=True)]
        )
        self._rates = [_rates(_hazards(*counts, usual)) for counts in zip(begun, ended, strict=True)]


class _Vintage:
    """Intervals that began from `start_s` on. begun: by class; so many had by each of `marks_s`: `before`. ended: by
    class and age."""

    __slots__ = ("before", "begun", "ended", "marks_s", "num_begun", "start_s")

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.num_begun = 0
        self.begun = [0] * NUM_CLASSES
        self.marks_s = [start_s]
        self.before = [[0] * NUM_CLASSES]
        self.ended = [[0] * NUM_AGES for _ in range(NUM_CLASSES)]

    def begun_by(self, time_s: float) -> list[float]:
        """Between two marks, evenly."""
        mark = bisect_right(self.marks_s, time_s)
        if not mark:
            return [0.0] * NUM_CLASSES
        before = self.before[mark - 1]
        if mark == len(self.marks_s):
            return [float(each) for each in before]
        from_s, to_s = self.marks_s[mark - 1 : mark + 1]
        share = (time_s - from_s) / (to_s - from_s)
        return [one + share * (other - one) for one, other in zip(before, self.before[mark], strict=True)]


def _class_of(num_uses: int) -> int:
    return min(num_uses, NUM_CLASSES) - 1


def _age_of(age_s: float) -> int:
    if age_s < 1.0:
        return 0
    return min(NUM_AGES - 1, int(math.log2(age_s) * AGES_PER_OCTAVE) + 1)


def _hazards(begun: Sequence[float], ended: Sequence[int], usual: Sequence[float] | None = None) -> list[float]:
    """By age, the share of intervals that have come to this age which end at it. `usual`: what is assumed where there
    are few."""
    found: list[float] = []
    going = 1.0
    for age in range(NUM_AGES):
        num_going = begun[age] * going
        weight, assumed = (UNKNOWN, ASSUMED) if usual is None else (LEARNT, usual[age])
        found.append(min(1.0, (ended[age] + weight * assumed) / (num_going + weight)))
        going *= max(0.0, 1.0 - ended[age] / num_going) if num_going else 1.0
    return found


def _rates(hazards: Sequence[float]) -> list[float]:
    """By age, the most over T that is used in a second of keeping until a use, at most for T. An age is half over."""
    found: list[float] = []
    for age in range(NUM_AGES):
        going, used, kept_s, best = 1.0, 0.0, 0.0, 0.0
        for later in range(age, NUM_AGES - 1):
            long_s = (_STARTS[later + 1] - _STARTS[later]) * (0.5 if later == age else 1.0)
            hazard = hazards[later]
            used += going * hazard
            kept_s += going * long_s * (1.0 - hazard / 2)
            going *= 1.0 - hazard
            best = max(best, used / kept_s)
        found.append(best)
    return found
