"""What this process holds for itself, and glibc's heap, told to give back what it does not need."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys

from ..core.units import KiB

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


def forget_peak() -> None:
    """From now on the most memory that this process has had, as the system tells it when it has ended, is that of now
    and of later. Where the system cannot, what it had before goes on to count."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def private_bytes() -> int:
    """Memory that is this process's own: what it has mapped from files is not. Where the system does not tell, the most
    that it ever had, files included."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/self/status", encoding="ascii") as file:
        return int(next(line for line in file if line.startswith("RssAnon:")).split()[1]) * KiB
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * KiB
