"""Blocks that are kept whatever else is wanted, each until its time is over; those that are not here yet, too.

Operators pin for ever, and clients for a while: where there is no room for both, the pins that would end first do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from ...core.tiers import TierKey
from .replacement import TierBlock
from .space import TierSpace

MOST_PINS = 1 << 18
FOR_EVER = float("inf")


class Pins:
    """num_refused: pins beyond the most that there may be. unpinned: told of blocks that are as any others again."""

    def __init__(self, spaces: Sequence[TierSpace], unpinned: Callable[[TierSpace, TierBlock, float], None]) -> None:
        self.num_refused = 0
        self._unpinned = unpinned
        self._spaces = spaces
        self._pins: dict[TierKey, tuple[float, str]] = {}  # until when, whose
        self._ends: list[tuple[float, TierKey]] = []  # a heap; one that differs from the pin is out of date

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[tuple[TierKey, float, str]]:
        return ((block, until, owner) for block, (until, owner) in self._pins.items())

    def __contains__(self, block: TierKey) -> bool:
        return block in self._pins

    @property
    def next_s(self) -> float | None:
        """When the first is over, or was to be."""
        return self._ends[0][0] if self._ends else None

    def pin(self, block: TierKey, until: float, owner: str, now: float) -> bool:
        """Whether it is pinned from now on: until <= now ends a pin; one that lasts longer stays as it is."""
        if until <= now:
            self._end(block, now)
            return False
        before = self._pins.get(block)
        if before is None and len(self._pins) >= MOST_PINS and not (until == FOR_EVER and self._end_first(now)):
            self.num_refused += 1
            return False
        if before is not None and before[0] >= until:
            until, owner = before
        self._pins[block] = until, owner
        if until != FOR_EVER:
            heappush(self._ends, (until, block))
            if len(self._ends) > 2 * len(self._pins) + 64:
                self._ends = [end for end in self._ends if self._pins.get(end[1], (0.0, ""))[0] == end[0]]
                heapify(self._ends)
        for space in self._spaces:
            if (found := space.find(block)) is not None:
                while not space.has_room_for(found) and until == FOR_EVER and self._end_first(now):
                    pass
                if space.holds(found):
                    space.pin(found)
        return True

    def arrived(self, space: TierSpace, block: TierBlock) -> None:
        if self._pins and block.block in self._pins:
            space.pin(block)

    def lapse(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            until, block = heappop(self._ends)
            if self._pins.get(block, (0.0, ""))[0] == until:
                self._end(block, now)

    def _end_first(self, now: float) -> bool:
        """Before its time; whether there was one."""
        while self._ends:
            until, block = heappop(self._ends)
            if self._pins.get(block, (0.0, ""))[0] == until:
                self._end(block, now)
                return True
        return False

    def _end(self, block: TierKey, now: float) -> None:
        if self._pins.pop(block, None) is not None:
            for space in self._spaces:
                if (found := space.find(block)) is not None:
                    space.unpin(found, now)
                    self._unpinned(space, found, now)
