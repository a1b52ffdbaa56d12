"""Reading and writing extents of the disk tier: past the page cache where the file system can, several slots of memory
at once. All raises OSError."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from .extent import Extent

log = logging.getLogger(__name__)

_DIRECT = getattr(os, "O_DIRECT", 0)
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_MOST_VIEWS = 1024
"""Of one call, by POSIX."""


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
    """From and to where the file has something among its slots, as far as the system tells."""
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
