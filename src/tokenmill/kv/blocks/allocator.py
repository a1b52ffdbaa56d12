"""Counts the users of each physical block, keeps freed ids back until no step in flight can touch them, and says which
of the published blocks that nobody holds is evicted first.

    FREE -> in use (references > 0) -> quarantined (0 references, a step may still read or write it) -> idle -> FREE
    FREE -> lent (its memory goes back to the system) -> FREE, but handed out last

An idle block belongs to the caller, who returns it here or keeps it cached. Steps end in the order of their numbers.
Free ids are handed out last in, first out: recently used memory is used again, and pages of the pool that were never
touched stay uncommitted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush, nsmallest
from itertools import islice
from typing import Protocol

from ...core.policy import CachedBlock, Eviction, Measured
from .eviction.lru import LeastRecentlyUsed


class BlockAllocator:
    """References and quarantine of the block ids [0, num_blocks). Every operation is O(1) a block."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._free: list[int] = []
        self._bare: list[int] = []  # free and, as far as is known here, without memory; so are those never handed out
        self._num_lent = 0
        self._references: list[int] = []  # of those that were ever handed out, which are the lowest
        self._last_step: list[int] = []
        self._quarantine: dict[int, None] = {}  # in the order of release
        self._ended_step = -1

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._bare) + self._num_blocks - len(self._references)

    @property
    def num_lent(self) -> int:
        return self._num_lent

    @property
    def num_lendable(self) -> int:
        return len(self._free)

    @property
    def num_quarantined(self) -> int:
        """Blocks that nobody refers to, yet a step in flight may touch."""
        return len(self._quarantine)

    def take(self) -> int:
        """Hand out a free id with one reference."""
        if not self._free and not self._bare:
            block = len(self._references)
            assert block < self._num_blocks, f"all {self._num_blocks} blocks are in use"
            self._references.append(1)
            self._last_step.append(-1)
            return block
        block = self._free.pop() if self._free else self._bare.pop()
        self._references[block] = 1
        return block

    def take_again(self, block: int) -> None:
        """As `put` of an idle block, and `take`, which hands it out."""
        assert self._references[block] == 0 and block not in self._quarantine, f"block {block} is not idle"
        self._references[block] = 1

    def retain(self, block: int) -> None:
        """One more reference to a block that is in use, quarantined or idle."""
        self._references[block] += 1
        self._quarantine.pop(block, None)

    def release(self, blocks: Iterable[int], last_step: int) -> list[int]:
        """Drop a reference to each, held by a sequence whose last row is in `last_step` (-1: it never had one).

        Returns those that are idle now. With other references left, or in quarantine, a block is not."""
        references, last_steps, quarantine = self._references, self._last_step, self._quarantine
        idle = []
        for block in blocks:
            left = references[block] - 1
            assert left >= 0, f"block {block} released without a reference"
            references[block] = left
            if last_steps[block] < last_step:
                last_steps[block] = last_step
            if not left:
                if last_steps[block] <= self._ended_step:
                    idle.append(block)
                else:
                    quarantine[block] = None
        return idle

    def end_step(self, step: int) -> list[int]:
        """Note that every step up to `step` has ended; returns the blocks that leave quarantine idle, in the
        order of their release."""
        assert step > self._ended_step, (step, self._ended_step)
        self._ended_step = step
        idle = [block for block in self._quarantine if self._last_step[block] <= step]
        for block in idle:
            del self._quarantine[block]
        return idle

    def put(self, block: int) -> None:
        """Take back an idle block."""
        assert self._references[block] == 0 and block not in self._quarantine, f"block {block} is not idle"
        self._free.append(block)

    def lend(self, most: int) -> list[int]:
        """Free blocks that have memory, so many at most, those first that have been free for longest."""
        lent = self._free[:most]
        del self._free[:most]
        self._num_lent += len(lent)
        return lent

    def take_back(self, blocks: Sequence[int]) -> None:
        """Blocks that were lent, which have no memory any more."""
        self._num_lent -= len(blocks)
        self._bare += sorted(blocks, reverse=True)

    def check(self, references: list[int]) -> None:
        """Assert what must hold between calls, given how many tables name each block; O(num_blocks), for tests."""
        num_used = len(self._references)
        known = [*self._references, *[0] * (self._num_blocks - num_used)]
        assert known == references, f"references {known}, by the tables {references}"
        free = [*self._free, *self._bare]
        assert len(set(free)) == len(free) and max(free, default=-1) < num_used, "an id is free twice"
        for block in free:
            assert self._references[block] == 0 and block not in self._quarantine, f"block {block} is free and used"
        for block in self._quarantine:
            assert self._references[block] == 0 and self._last_step[block] > self._ended_step, f"{block} is held back"


class Leaf(CachedBlock, Protocol):
    """What is needed here of a block of the prefix tree."""

    @property
    def block(self) -> int: ...

    @property
    def num_children(self) -> int: ...


class Unreferenced(Protocol):
    """The published blocks of one pool that nobody holds, in the order in which they are evicted.

        LeastRecentFirst  least recently used, in O(1) without a heap
        LeastValueFirst   any other policy: a heap of leaves, O(log n) a block

    A parent outlives its children. A sequence that holds a block holds its parent too and releases the child first, so
    that a child always gets here before its parent: in the queue it stands before it. The heap holds only leaves; a
    parent joins them when its last child is gone. The heap tells the policy the value of the last evicted block: by
    adding it, a policy makes values age. With equal values, heap and queue give the same order.

    Costs are a block's."""

    def __len__(self) -> int: ...

    def __contains__(self, block: int) -> bool: ...

    def __iter__(self) -> Iterator[int]:
        """In the order of release."""
        ...

    def add(self, node: Leaf) -> None:
        """Nobody holds the block any more."""
        ...

    def discard(self, block: int) -> None:
        """The block, if it is here, is held again or unpublished."""
        ...

    def expose(self, node: Leaf) -> None:
        """The block has lost its last child."""
        ...

    def first(self) -> int:
        """The block to give up first: a leaf. It stays until it is discarded."""
        ...

    def upcoming(self, most: int) -> list[int]:
        """About those that would be given up first, one after the other."""
        ...


class LeastRecentFirst:
    def __init__(self) -> None:
        self._queue: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, block: int) -> bool:
        return block in self._queue

    def __iter__(self) -> Iterator[int]:
        return iter(self._queue)

    def add(self, node: Leaf) -> None:
        self._queue[node.block] = None

    def discard(self, block: int) -> None:
        self._queue.pop(block, None)

    def expose(self, node: Leaf) -> None:
        """It stands behind its children in any case."""

    def first(self) -> int:
        return next(iter(self._queue))

    def upcoming(self, most: int) -> list[int]:
        return list(islice(self._queue, most))


class LeastValueFirst:
    """_ranks: of each block (value, order of release). A heap entry that differs from it is out of date."""

    def __init__(self, policy: Eviction, measured: Measured) -> None:
        self._policy = policy
        self._measured = measured
        self._ranks: dict[int, tuple[float, int]] = {}
        self._leaves: list[tuple[tuple[float, int], int]] = []
        self._num_added = 0
        self._age = 0.0

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, block: int) -> bool:
        return block in self._ranks

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def add(self, node: Leaf) -> None:
        self._num_added += 1
        value = self._policy.value(node, self._age, self._measured.attention)
        self._ranks[node.block] = (value, self._num_added)
        if not node.num_children:
            heappush(self._leaves, (self._ranks[node.block], node.block))
        if len(self._leaves) > 2 * len(self._ranks) + 64:
            self._leaves = [entry for entry in self._leaves if self._is_valid(entry)]
            heapify(self._leaves)

    def discard(self, block: int) -> None:
        self._ranks.pop(block, None)

    def expose(self, node: Leaf) -> None:
        rank = self._ranks.get(node.block)
        if rank is not None:
            heappush(self._leaves, (rank, node.block))

    def first(self) -> int:
        while not self._is_valid(self._leaves[0]):
            heappop(self._leaves)
        (self._age, _), block = self._leaves[0]
        return block

    def upcoming(self, most: int) -> list[int]:
        return nsmallest(most, self._ranks, key=self._ranks.__getitem__)

    def _is_valid(self, entry: tuple[tuple[float, int], int]) -> bool:
        return self._ranks.get(entry[1]) == entry[0]


def unreferenced_for(policy: Eviction, measured: Measured) -> Unreferenced:
    return LeastRecentFirst() if isinstance(policy, LeastRecentlyUsed) else LeastValueFirst(policy, measured)
