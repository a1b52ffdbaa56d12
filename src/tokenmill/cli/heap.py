"""glibc's heap, told to give back what it does not need. Elsewhere there is nothing to tell."""

from __future__ import annotations

import contextlib
import ctypes

_M_MMAP_THRESHOLD = -3
_MAPPED_BYTES = 1 << 18


def map_large_blocks() -> None:
    """Blocks of a quarter of a mebibyte or more are the system's own, and go back when they are freed. By itself glibc
    raises that limit to the size of each such block that it frees, up to 32 MiB, and keeps what is smaller."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def trim_heap() -> None:
    """Give back the pages that nothing uses. Takes a millisecond or two."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
