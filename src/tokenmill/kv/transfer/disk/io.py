"""Reading and writing extents of the disk tier: past the page cache where the file system can, several slots of memory
at once. All raises OSError."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ....core.tiers import TierKey
from ..seal import BadSeal, Seal
from .extent import Extent

log = logging.getLogger(__name__)
_DIRECT = getattr(os, "O_DIRECT", 0)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_MOST_VIEWS = 1024
"""Of one call, by POSIX."""
View = Callable[[int, int], memoryview]


class DiskSlots:
    """Blocks between slots of host memory and slots of extents: as they are, or sealed on the way.

    view: to host memory, a multiple of 4096 bytes from such a multiple. Threads may share it. All raises OSError."""

    def __init__(self, block_bytes: Sequence[int], view: View, seal: Seal | None) -> None:
        self._block_bytes = block_bytes
        self._view = view
        self._seal = seal
        self._scratch: list[mmap.mmap] = []

    def read(self, extent: Extent, first: int, blocks: Sequence[tuple[TierKey, int]]) -> list[bool]:
        """Consecutive slots into host memory, blocks by key and offset; whether each opens. Where blocks are not
        sealed, none is looked at."""
        size = extent.head.slot_bytes
        if self._seal is None:
            read_slots(extent, first, [self._view(offset, size) for _, offset in blocks])
            return [True] * len(blocks)
        with self._memory(len(blocks) * size) as memory:
            read_slots(extent, first, [memory])
            return [
                self._opens(extent, first + nth, block, memory[nth * size :], self._data(block, offset))
                for nth, (block, offset) in enumerate(blocks)
            ]

    def write(self, extent: Extent, first: int, blocks: Sequence[tuple[TierKey, int, int]]) -> None:
        """Blocks by key, offset and checksum into consecutive slots."""
        size = extent.head.slot_bytes
        if self._seal is None:
            return write_slots(extent, first, [self._view(offset, size) for _, offset, _ in blocks])
        with self._memory(len(blocks) * size) as memory:
            for nth, (block, offset, sum_) in enumerate(blocks):
                sealed_bytes = self._block_bytes[block[0]] + extent.head.overhead
                sealed = memory[nth * size : nth * size + sealed_bytes]
                self._seal.seal(block, sum_, self._data(block, offset), sealed)
            write_slots(extent, first, [memory])

    @contextlib.contextmanager
    def look(self, extent: Extent, slot: int) -> Iterator[memoryview | None]:
        """The bytes of one block; None where it does not open."""
        block = extent.groups[slot], extent.key(slot)
        with self._memory(2 * extent.head.slot_bytes) as memory:
            raw, data = memory[: extent.head.slot_bytes], memory[extent.head.slot_bytes :]
            read_slots(extent, slot, [raw])
            data = (raw if self._seal is None else data)[: self._block_bytes[block[0]]]
            yield data if self._seal is None or self._opens(extent, slot, block, raw, data) else None

    def _data(self, block: TierKey, offset: int) -> memoryview:
        return self._view(offset, self._block_bytes[block[0]])

    def _opens(self, extent: Extent, slot: int, block: TierKey, raw: memoryview, data: memoryview) -> bool:
        assert self._seal is not None
        try:
            return self._seal.open(block, raw[: len(data) + extent.head.overhead], data) == extent.sums[slot]
        except BadSeal:
            return False

    @contextlib.contextmanager
    def _memory(self, num_bytes: int) -> Iterator[memoryview]:
        """Some that a disk can read into, which others had before."""
        memory = self._scratch.pop() if self._scratch else mmap.mmap(-1, num_bytes)
        if len(memory) < num_bytes:
            memory.close()
            memory = mmap.mmap(-1, num_bytes)
        with memoryview(memory) as whole:
            yield whole[:num_bytes]
        self._scratch.append(memory)


def open_data(path: Path) -> tuple[int, bool]:
    """A descriptor for an extent's slots, and whether it goes past the page cache."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    if _DIRECT:
        try:
            return os.open(path, flags | _DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, flags), False


def read_slots(extent: Extent, first: int, views: Sequence[memoryview]) -> None:
    """Consecutive slots into views of their size."""
    _move(os.preadv, extent, first, views)


def write_slots(extent: Extent, first: int, views: Sequence[memoryview]) -> None:
    _move(os.pwritev, extent, first, views)


def reserve(extent: Extent, first: int, count: int) -> None:
    """Have the file system give room to slots: what does not fit fails here, and not while it is written."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(extent.fd, extent.offset(first), count * extent.head.slot_bytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise


def punch(extent: Extent, first: int, count: int) -> bool:
    """Give the room of slots back to the file system; False where it cannot take it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate"):
        return False
    offset, size = extent.offset(first), count * extent.head.slot_bytes
    mode = _KEEP_SIZE | _PUNCH_HOLE
    return libc.fallocate(extent.fd, mode, ctypes.c_int64(offset), ctypes.c_int64(size)) == 0


def data_spans(extent: Extent) -> Iterator[tuple[int, int]]:
    """Where the data among its slots begins and ends, as far as the system tells."""
    end = extent.head.data_offset
    while end < extent.head.file_bytes:
        try:
            begin = os.lseek(extent.fd, end, os.SEEK_DATA)
            end = os.lseek(extent.fd, begin, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        yield begin, end


def write_entries(extent: Extent, offset: int, data: bytes) -> None:
    """Into the table, through the page cache: entries are smaller than what can be written past it."""
    file = os.open(extent.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        while data:
            written = os.pwrite(file, data, offset)
            data, offset = data[written:], offset + written
    finally:
        os.close(file)


def _move(call: object, extent: Extent, first: int, views: Sequence[memoryview]) -> None:
    assert callable(call)
    offset = extent.offset(first)
    for at in range(0, len(views), _MOST_VIEWS):
        left = list(views[at : at + _MOST_VIEWS])
        while left:
            num_bytes = _call(call, extent, left, offset)
            if num_bytes == 0:
                raise OSError(errno.EIO, "the file ends before its slots", str(extent.path))
            offset += num_bytes
            left = _rest(left, num_bytes)


def _call(call: object, extent: Extent, views: list[memoryview], offset: int) -> int:
    assert callable(call)
    try:
        return int(call(extent.fd, views, offset))
    except OSError as error:
        if error.errno != errno.EINVAL or not extent.is_direct:
            raise
    log.warning("%s cannot be read and written past the page cache: the disk tier is slower.", extent.path.parent)
    _go_buffered(extent)
    return int(call(extent.fd, views, offset))


def _go_buffered(extent: Extent) -> None:
    """The descriptor keeps its number, for other threads may be using it."""
    file = os.open(extent.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    os.dup2(file, extent.fd, inheritable=False)
    os.close(file)
    extent.is_direct = False


def _rest(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of views after so many bytes of them."""
    for nth, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[nth + 1 :]] if num_bytes else views[nth:]
        num_bytes -= len(view)
    return []
