"""Memory allocated directly from the system, which returns to it when the owner releases it, not when the last
reference is collected. It uses large pages if the system has them, and is committed page by page when first touched.
"""

from __future__ import annotations

import contextlib
import ctypes
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


def write_protect(mapping: mmap.mmap) -> None:
    """Whoever writes it from now on, in this process or one forked from it, ends by SIGSEGV. Where the system cannot,
    nothing happens."""
    libc, view = ctypes.CDLL(None, use_errno=True), ctypes.c_char.from_buffer(mapping)
    if hasattr(libc, "mprotect"):
        libc.mprotect(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(len(mapping)), mmap.PROT_READ)


def give_range_back(address: int, num_bytes: int) -> None:
    """Memory of this process, whole pages of it, which read as zeros from now on. Where the system cannot, nothing
    happens."""
    begin, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None)
    if hasattr(mmap, "MADV_DONTNEED") and hasattr(libc, "madvise") and end > begin:
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def give_back(mapping: mmap.mmap) -> None:
    """Its memory, at once, where the system can. Views that others still hold stay valid, and read as zeros."""
    if hasattr(mmap, "MADV_DONTNEED"):
        mapping.madvise(mmap.MADV_DONTNEED)
