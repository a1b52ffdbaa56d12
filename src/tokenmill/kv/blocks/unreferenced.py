"""The published blocks of one pool that nobody holds, and which of them is evicted first.

    LeastRecentFirst  least recently used, in O(1) without a heap
    LeastValueFirst   any other policy: a heap of leaves, O(log n) a block

A parent must outlive its children. A sequence that holds a block holds its parent too and releases the child first, so
a child always gets here before its parent. In the queue it therefore stands before its parent. The heap holds only
leaves; a parent joins them when its last child is gone.

The heap tells the policy the value of the last evicted block: by adding it, a policy makes values age. With equal
values, heap and queue give the same order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, nsmallest
from itertools import islice
from typing import Protocol

from ...core.policy import CachedBlock, Eviction, Measured
from .eviction.lru import LeastRecentlyUsed


class Leaf(CachedBlock, Protocol):
    """A block of the prefix tree, as far as it is needed here."""

    @property
    def block(self) -> int: ...

    @property
    def num_children(self) -> int: ...


class Unreferenced(Protocol):
    """Costs are a block's."""

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


def for_policy(policy: Eviction, measured: Measured) -> Unreferenced:
    return LeastRecentFirst() if isinstance(policy, LeastRecentlyUsed) else LeastValueFirst(policy, measured)


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
