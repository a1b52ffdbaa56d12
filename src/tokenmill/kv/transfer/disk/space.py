"""Which slots of which extents new blocks of the disk tier get, within the bytes that the tier may take.

A slot that was ever written takes room on the disk until its extent is deleted or its room is given back, also while
nothing lies in it: the next block of its size gets it. Blocks of one prefix are to lie side by side, so that they are
read at once: one goes after its parent, and what starts a run, at the start of a stretch of slots that are all free.
Where the bytes are used up, room is taken from files that cannot be used (other models', damaged ones), oldest first,
then from free slots of other sizes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ....core.tiers import BlockFacts, TierKey
from .extent import PAGE_BYTES, EntryCodec, Extent, Head, extent_name, make_extent, padded
from .io import open_data, punch, reserve

_NUM_RECENT = 4096
_STRETCH_BYTES = 2 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)
SLOT_BITS = 16
"""Of a place: the number of the extent, then the slot."""
_MOST_EXTENTS = 256
"""Of one size, before slots anywhere are taken rather than stretches."""

Run = tuple[Extent, int, int]
"""Consecutive slots: the first, and how many."""


@dataclass
class DiskSpace:
    """extents: by number. others: files in the folder that give way to ours, oldest first, and what they take.
    overhead: bytes that a block has more here, since it is sealed. spare_bytes: the file system is to keep free for
    others. Used by one thread at a time."""

    folder: Path
    numerics_id: str
    block_bytes: tuple[int, ...]
    num_bytes: int
    codec: EntryCodec
    overhead: int = 0
    spare_bytes: int = 0
    next_number: int = 0
    extents: dict[int, Extent] = field(default_factory=dict)
    others: dict[Path, int] = field(default_factory=dict)
    _recent: OrderedDict[TierKey, int] = field(default_factory=OrderedDict)

    @property
    def taken_bytes(self) -> int:
        """Other threads may ask, too."""
        return sum(extent.num_bytes for extent in list(self.extents.values())) + sum(list(self.others.values()))

    def find(self, place: int) -> tuple[Extent | None, int]:
        """The extent and slot of a place."""
        return self.extents.get(place >> SLOT_BITS), place & ((1 << SLOT_BITS) - 1)

    def slot_bytes(self, group: int) -> int:
        return padded(self.block_bytes[group] + self.overhead)

    def take(self, blocks: Sequence[BlockFacts]) -> Iterator[tuple[Run, Sequence[BlockFacts]]]:
        """Slots for blocks, all of one size and each the child of the one before it; nothing for those that there is no
        room for. Raises OSError."""
        size = self.slot_bytes(blocks[0].block[0])
        near = self._recent.get((blocks[0].block[0], blocks[0].parent), -1)
        while blocks:
            run = self._run(near, size, len(blocks))
            if run is None:
                return
            extent, first, count = run = self._reserved(run, near, len(blocks))
            extent.set_used(first, count, True)
            near = place_of(extent, first + count - 1)
            self._remember(blocks[count - 1], near)
            yield run, blocks[:count]
            blocks = blocks[count:]

    def free(self, extent: Extent, slot: int) -> None:
        extent.forget(slot)
        extent.set_used(slot, 1, False)

    def remove(self, extent: Extent) -> None:
        """Delete an extent. Raises OSError."""
        extent.path.unlink(missing_ok=True)
        del self.extents[extent.head.number]
        os.close(extent.fd)

    def close(self) -> None:
        """Let go of all that was opened."""
        for extent in self.extents.values():
            os.close(extent.fd)
        self.extents.clear()
        self.others.clear()
        self._recent.clear()
        self.next_number = 0

    def shrink(self) -> list[Extent]:
        """Delete what is more than may be taken; gives the extents that went with blocks in them. Raises OSError."""
        self._make_room(0, 0)
        went = []
        while self.taken_bytes > self.num_bytes and self.extents:
            oldest = min(self.extents.values(), key=lambda extent: max(extent.seqs))
            self.remove(oldest)
            went.append(oldest)
        return went

    def _remember(self, facts: BlockFacts, place: int) -> None:
        self._recent[facts.block] = place
        self._recent.move_to_end(facts.block)
        if len(self._recent) > _NUM_RECENT:
            self._recent.popitem(last=False)

    def _run(self, near: int, size: int, most: int) -> Run | None:
        """Slots for `most` blocks, or for the first of them. Once the bytes are used up, those that have room in the
        file system are taken before others lose theirs."""
        if self.taken_bytes + most * size > self.num_bytes:
            run = self._with_room(near, size, most)
            if run is not None:
                return run
        extent, first, count = self._after(near, most, False) or self._stretch(size, most, False) or (None, 0, 0)
        if extent is None:
            return None
        missing = count - extent.backed.count(1, first, first + count)
        self._make_room(missing * size, size)
        count = self._fitting(extent, first, count)
        return (extent, first, count) if count else None

    def _after(self, place: int, most: int, is_full: bool) -> Run | None:
        extent, slot = self.find(place)
        if place < 0 or extent is None:
            return None
        count = min(_num_free(_taken(extent, is_full), slot + 1), most)
        return (extent, slot + 1, count) if count else None

    def _stretch(self, size: int, count: int, is_full: bool) -> Run | None:
        """A stretch of free slots where a run may start and go on; only of slots that have room where `is_full`."""
        maps = [(_taken(each, is_full), each) for each in self.extents.values() if each.head.slot_bytes == size]
        maps.sort(key=lambda pair: -pair[0].count(0))
        stride = max(1, _STRETCH_BYTES // size)
        for taken, extent in maps:
            first = _aligned(taken, stride)
            if first is not None:
                return extent, first, min(count, _num_free(taken, first))
        made = None
        if not is_full and len(maps) <= _MOST_EXTENTS:
            try:
                made = self._make(size)
            except OSError as error:
                if error.errno not in _FULL or not any(taken.count(0) for taken, _ in maps):
                    raise
        if made is not None:
            return made, 0, min(count, made.head.num_slots)
        for taken, extent in maps:
            if taken.count(0):
                first = _longest(taken, min(count, stride))
                return extent, first, min(count, _num_free(taken, first))
        return None

    def _make(self, size: int) -> Extent | None:
        """Another extent, where there is room for its table and a slot."""
        slots = max(1, min(extent_bytes(self.num_bytes) // size, 1 << SLOT_BITS))
        number, uid = self.next_number, secrets.token_hex(16)
        head = Head(self.numerics_id, self.block_bytes, size, slots, number, uid, self.overhead)
        if not self._make_room(head.data_offset + size, size):
            return None
        path = self.folder / extent_name(self.numerics_id, number)
        self.next_number += 1
        self.extents[number] = extent = make_extent(path, head, self.codec, open_data)
        return extent

    def _fitting(self, extent: Extent, first: int, count: int) -> int:
        """How many of the slots there is room for."""
        room = max(0, self.num_bytes - self.taken_bytes) // extent.head.slot_bytes
        for nth in range(count):
            room -= not extent.backed[first + nth]
            if room < 0:
                return nth
        return count

    def _reserved(self, run: Run, near: int, most: int) -> Run:
        """This run, or where the file system has no more room, one of free slots that have theirs. Raises OSError."""
        try:
            self._reserve(*run)
            return run
        except OSError as error:
            backed = self._with_room(near, run[0].head.slot_bytes, most) if error.errno in _FULL else None
            if backed is None:
                raise
            return backed

    def _with_room(self, near: int, size: int, most: int) -> Run | None:
        return self._after(near, most, True) or self._stretch(size, most, True)

    def _reserve(self, extent: Extent, first: int, count: int) -> None:
        missing = count - extent.backed.count(1, first, first + count)
        if not missing:
            return
        if self.spare_bytes:
            stat = os.statvfs(self.folder)
            if stat.f_bavail * stat.f_frsize < self.spare_bytes + missing * extent.head.slot_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))
        try:
            reserve(extent, first, count)
        except OSError:
            if missing == count:
                punch(extent, first, count)
            raise

    def _make_room(self, num_bytes: int, size: int) -> bool:
        """Whether so many bytes more may be taken for slots of this size; what is of no use gives way."""
        over = self.taken_bytes + num_bytes - self.num_bytes
        for path in list(self.others):
            if over <= 0:
                break
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                over -= self.others.pop(path)
        for extent in [each for each in self.extents.values() if each.head.slot_bytes != size]:
            if over <= 0:
                break
            before = extent.num_bytes
            if not extent.num_used:
                self.remove(extent)
                over -= before
            else:
                give_back(extent)
                over -= before - extent.num_bytes
        return over <= 0


def place_of(extent: Extent, slot: int) -> int:
    return extent.head.number << SLOT_BITS | slot


def extent_bytes(num_bytes: int) -> int:
    """Of the data of one extent, in a tier of so many: from 16 extents to a few more than 128."""
    return max(min(num_bytes // 16, 64 << 20), num_bytes // 128, PAGE_BYTES)


def give_back(extent: Extent, is_backed: bool = True) -> None:
    """To the file system, the room of slots that hold nothing; not `is_backed`: of those that should have none."""
    idle, slot = _idle(extent, is_backed), 0
    while (slot := idle.find(1, slot)) >= 0:
        end = idle.find(0, slot)
        end = len(idle) if end < 0 else end
        if not punch(extent, slot, end - slot):
            return
        extent.set_backed(slot, end - slot, False)
        slot = end


def _idle(extent: Extent, is_backed: bool) -> bytes:
    """A byte for each slot, 1 where it holds nothing and is backed, or is not."""
    return bytes(not used and backed == is_backed for used, backed in zip(extent.used, extent.backed, strict=True))


def _taken(extent: Extent, is_full: bool) -> bytes | bytearray:
    """A byte for each slot, 0 where it is free, and has room where `is_full`."""
    if not is_full:
        return extent.used
    used, backed = int.from_bytes(extent.used, "little"), int.from_bytes(extent.backed, "little")
    ones = int.from_bytes(b"\1" * extent.head.num_slots, "little")
    return (used | backed ^ ones).to_bytes(extent.head.num_slots, "little")


def _aligned(taken: bytes | bytearray, stride: int) -> int | None:
    """The first multiple of `stride` from which as many slots are free."""
    free, slot = bytes(min(stride, len(taken))), 0
    while (slot := taken.find(free, slot)) >= 0:
        if slot % stride == 0:
            return slot
        slot += stride - slot % stride
    return None


def _longest(taken: bytes | bytearray, count: int) -> int:
    """Where `count` slots are free, or half as many, and so on to 1, which must be."""
    while (slot := taken.find(bytes(count))) < 0:
        count //= 2
    return slot


def _num_free(taken: bytes | bytearray, first: int) -> int:
    end = taken.find(1, first)
    return (len(taken) if end < 0 else end) - first
