"""Slots of host memory: which part of the arena may be filled by whom; no bytes.

The arena is cut into extents of equal size, a few MiB each. An extent belongs to blocks of one size while it holds any;
empty ones are anybody's. Some of the empty are kept for whoever comes next, the others go back to the system.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from .replacement import TierBlock

_EXTENT_BYTES = 4 << 20
_FEWEST_EXTENTS = 16


class _Extent:
    """blocks: what is in each slot, as far as it is known; free: slots, is_taken: of each. is_leaving: no slot of it is
    taken any more."""

    __slots__ = ("blocks", "free", "is_leaving", "is_taken", "slot_bytes", "start")

    def __init__(self, start: int, slot_bytes: int, num_slots: int) -> None:
        self.start = start
        self.slot_bytes = slot_bytes
        self.blocks: list[TierBlock | None] = [None] * num_slots
        self.free = list(range(num_slots - 1, -1, -1))
        self.is_taken = bytearray(num_slots)
        self.is_leaving = False

    @property
    def is_empty(self) -> bool:
        return len(self.free) == len(self.blocks)


class HostSlots:
    """slot_bytes: of each KV group. num_bytes: of the arena.

    extent_bytes  of each extent
    freed         (offset, bytes) that hold nothing any more, for `TierEffects`
    """

    def __init__(self, slot_bytes: Sequence[int], num_bytes: int) -> None:
        self.extent_bytes = _extent_bytes(slot_bytes, num_bytes)
        self.freed: list[tuple[int, int]] = []
        self._slot_bytes = tuple(slot_bytes)
        self._extents: dict[int, _Extent] = {}  # by index, those in use
        self._open: dict[int, dict[int, None]] = {size: {} for size in slot_bytes}  # by slot size: with free slots
        self._spare: deque[int] = deque()  # empty, and not given back
        self._unused = list(range(num_bytes // self.extent_bytes - 1, -1, -1))
        self._most = len(self._unused)
        self._num_spare = max(1, self._most // 32)
        self.used_bytes = 0

    @property
    def num_bytes(self) -> int:
        """That blocks may take together now, as far as slots allow."""
        return self._most * self.extent_bytes

    @property
    def num_excess(self) -> int:
        """Extents in use that are more than there may be, those on the way out not counted."""
        return sum(not extent.is_leaving for extent in self._extents.values()) - self._most

    def take(self, group: int) -> int | None:
        """The offset of a free slot, unless there is none."""
        size = self._slot_bytes[group]
        open_ = self._open[size]
        if not open_ and not self._begin_extent(size):
            return None
        index = next(reversed(open_))
        extent = self._extents[index]
        slot = extent.free.pop()
        extent.is_taken[slot] = True
        if not extent.free:
            del open_[index]
        self.used_bytes += size
        return extent.start + slot * size

    def give(self, offset: int) -> None:
        """Nobody reads or writes this slot any more."""
        index = offset // self.extent_bytes
        extent = self._extents[index]
        slot = (offset - extent.start) // extent.slot_bytes
        assert extent.is_taken[slot], offset
        extent.blocks[slot] = None
        extent.is_taken[slot] = False
        extent.free.append(slot)
        self.used_bytes -= extent.slot_bytes
        if extent.is_empty:
            self._end_extent(index)
        elif not extent.is_leaving:
            self._open[extent.slot_bytes][index] = None

    def put(self, block: TierBlock) -> None:
        """This block lies in its slot."""
        extent = self._extents[block.place // self.extent_bytes]
        extent.blocks[(block.place - extent.start) // extent.slot_bytes] = block

    def beside(self, block: TierBlock) -> list[TierBlock]:
        """The blocks of its extent, its own included."""
        extent = self._extents[block.place // self.extent_bytes]
        return [other for other in extent.blocks if other is not None]

    def suits(self, block: TierBlock, group: int) -> bool:
        """Whether the slot of this block would do for one of the group."""
        return self._slot_bytes[block.kind.group] == self._slot_bytes[group]

    def resize(self, num_bytes: int) -> None:
        """Use so much of the arena at most; `num_excess` tells what has to leave."""
        most = max(1, num_bytes // self.extent_bytes)
        self._most = min(most, len(self._extents) + len(self._spare) + len(self._unused))
        while self._spare and len(self._extents) + len(self._spare) > self._most:
            self._give_back(self._spare.popleft())
        excess = self.num_excess
        for index, extent in self._extents.items():
            if excess < 0 and extent.is_leaving:
                excess += 1
                extent.is_leaving = False
                if extent.free:
                    self._open[extent.slot_bytes][index] = None

    def leave(self, block: TierBlock) -> None:
        """Take no slot of this block's extent any more: it is given back when it is empty."""
        index = block.place // self.extent_bytes
        extent = self._extents[index]
        extent.is_leaving = True
        self._open[extent.slot_bytes].pop(index, None)

    def leave_rest(self) -> None:
        """As many extents as are too many have to go, though somebody uses all that is in them."""
        for index, extent in self._extents.items():
            if self.num_excess <= 0:
                break
            if not extent.is_leaving:
                extent.is_leaving = True
                self._open[extent.slot_bytes].pop(index, None)

    def is_leaving(self, block: TierBlock) -> bool:
        """Whether this block's extent is to go."""
        return self._extents[block.place // self.extent_bytes].is_leaving

    def taken(self) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of the slots in use."""
        for extent in self._extents.values():
            for slot, is_taken in enumerate(extent.is_taken):
                if is_taken:
                    yield extent.start + slot * extent.slot_bytes, extent.slot_bytes

    def _begin_extent(self, size: int) -> bool:
        if len(self._extents) >= self._most or not (self._spare or self._unused):
            return False
        index = self._spare.pop() if self._spare else self._unused.pop()
        self._extents[index] = _Extent(index * self.extent_bytes, size, self.extent_bytes // size)
        self._open[size][index] = None
        return True

    def _end_extent(self, index: int) -> None:
        extent = self._extents.pop(index)
        self._open[extent.slot_bytes].pop(index, None)
        if extent.is_leaving:
            self._give_back(index)
            return
        self._spare.append(index)
        if len(self._spare) > self._num_spare or len(self._extents) + len(self._spare) > self._most:
            self._give_back(self._spare.popleft())

    def _give_back(self, index: int) -> None:
        self._unused.append(index)
        self.freed.append((index * self.extent_bytes, self.extent_bytes))


def _extent_bytes(slot_bytes: Sequence[int], num_bytes: int) -> int:
    """Some MiB of which slots of each size leave little over; less where that would be few extents."""
    largest = max(slot_bytes)
    fewest = max(1, min(-(-_EXTENT_BYTES // largest), num_bytes // (_FEWEST_EXTENTS * largest)))
    sizes = [num * largest for num in range(fewest, 2 * fewest)]
    return min(sizes, key=lambda size: (sum(size % slot / size for slot in set(slot_bytes)), size))
