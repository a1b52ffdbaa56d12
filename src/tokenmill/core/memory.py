"""Memory of the process's own, straight from the system, that goes back to it when its owner says so: not when the last
reference is collected. In large pages where the system has them, and committed page by page as it is touched."""

from __future__ import annotations

import contextlib
import mmap


def map_private(num_bytes: int) -> mmap.mmap:
    """Zeros. They count against no limit before they are touched."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, num_bytes)
    # Private, for shared memory gets huge pages on few machines.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    mapping = mmap.mmap(-1, num_bytes, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: only slower
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def give_back(mapping: mmap.mmap) -> None:
    """Its memory, at once, where the system can. Views that others still hold stay valid, and read as zeros."""
    if hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)
