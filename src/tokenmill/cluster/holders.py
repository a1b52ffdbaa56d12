"""Who holds which blocks, by one key of several of each prefix. Pure.

Who gives up blocks gives up what hangs below a block before the block, so whoever holds a deep key holds those above
it. A look-up therefore finds by bisection the deepest key that anybody holds, then the next one that more hold, and so
on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..core.block import KEY_BYTES, BlockKey


class Level(NamedTuple):
    """Those that hold exactly the first `num_blocks` blocks of a prefix, as far as is known."""

    num_blocks: int
    links: frozenset[int] | set[int]


class Holders:
    """Holders by number. stride: one block in so many is kept, the last of each `stride`."""

    def __init__(self, stride: int) -> None:
        self._stride = stride
        self._of: dict[BlockKey, int | set[int]] = {}

    def __len__(self) -> int:
        """Keys that are kept."""
        return len(self._of)

    def add(self, link: int, key: BlockKey) -> None:
        there = self._of.get(key)
        if there is None:
            self._of[key] = link
        elif isinstance(there, int):
            if there != link:
                self._of[key] = {there, link}
        else:
            there.add(link)

    def strike(self, link: int, key: BlockKey) -> None:
        there = self._of.get(key)
        if isinstance(there, int):
            if there == link:
                del self._of[key]
        elif there is not None:
            there.discard(link)
            if len(there) == 1:
                (self._of[key],) = there

    def of(self, key: BlockKey) -> frozenset[int] | set[int]:
        there = self._of.get(key)
        if there is None:
            return frozenset()
        return frozenset((there,)) if isinstance(there, int) else there

    def of_last(self, keys: bytes) -> frozenset[int] | set[int]:
        """Who holds the last of these blocks that is kept, and so those before it."""
        end = len(keys) // (self._stride * KEY_BYTES) * self._stride * KEY_BYTES
        return self.of(keys[max(0, end - KEY_BYTES) : end])

    def num_held(self, keys: bytes) -> int:
        """Of a prefix, so many blocks somebody holds."""
        holders, span = self._of, self._stride * KEY_BYTES
        low, high = 0, len(keys) // span
        while low < high:  # the first `low` kept keys have holders
            middle = (low + high + 1) // 2
            if keys[middle * span - KEY_BYTES : middle * span] in holders:
                low = middle
            else:
                high = middle - 1
        return low * self._stride

    def levels(self, keys: bytes) -> list[Level]:
        """Who holds how much of a prefix, most first; each is in one level at most."""
        holders, span = self._of, self._stride * KEY_BYTES
        low = self.num_held(keys) // self._stride
        levels: list[Level] = []
        seen: frozenset[int] | set[int] = frozenset()
        while low:  # who holds the first `low`, and no more, are those that are not in `seen`
            there = holders[keys[low * span - KEY_BYTES : low * span]]
            links = frozenset((there,)) if isinstance(there, int) else there
            levels.append(Level(low * self._stride, links - seen))
            seen, high = links, low
            low = 0
            while high - low > 1:  # more hold the first `low`, and as many the first `high`
                middle = (low + high) // 2
                others = holders.get(keys[middle * span - KEY_BYTES : middle * span], 0)
                if (1 if isinstance(others, int) else len(others)) > len(seen):
                    low = middle
                else:
                    high = middle
        return levels

    def all(self) -> dict[BlockKey, set[int]]:
        """Slow, for tests."""
        return {key: {there} if isinstance(there, int) else set(there) for key, there in self._of.items()}


def kept(keys: bytes, depth: int, stride: int) -> Iterator[BlockKey]:
    """Those of the blocks `depth`, `depth` + 1, ... of a prefix that are kept."""
    first = (stride - 1 - depth) % stride
    step = stride * KEY_BYTES
    return (keys[at : at + KEY_BYTES] for at in range(first * KEY_BYTES, len(keys) - KEY_BYTES + 1, step))
