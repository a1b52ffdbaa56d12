"""Lets go of a mapped file's bytes that have been read, so that loading never holds a checkpoint twice."""

from __future__ import annotations

import mmap

import numpy as np


def release(view: memoryview) -> None:
    """Give up the memory of a mapped file's bytes, whole pages of it: they can be read again, from the system's cache
    or the file. Nothing happens where `view` is of other memory, or the system has no such call."""
    mapping = view.obj
    if not isinstance(mapping, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    first = _address(view) - _address(memoryview(mapping))
    begin = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (first + view.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if begin < end:
        mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
