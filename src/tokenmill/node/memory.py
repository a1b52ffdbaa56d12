"""The memory of this process and of its machine: what the process holds for itself, glibc's heap, which is told to give
back what it does not need, and whether the machine runs short."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
import time
from typing import NamedTuple

from ..core.units import GiB, KiB, MiB
from .machine import MemoryReader, MemoryState

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


SHORT_STALLS = 0.1
"""Share of the time in which some process waited for memory."""

LOW_STALLS = 0.01
_RESERVE_SHARE = 16
_LEAST_RESERVE = 256 * MiB
_MOST_RESERVE = 2 * GiB
_ENOUGH = 4
_AMPLE = 2


class PressureLevel(NamedTuple):
    """lacking_bytes: of the reserve. may_grow: nothing speaks against taking more memory."""

    is_short: bool
    may_grow: bool
    lacking_bytes: int


class Pressure:
    """Whether the machine is short of memory: less than a reserve is available (also below the container's limit), or
    processes wait for memory (Linux' pressure stall information) and not much is left.

    available_bytes: when the process started, of which the reserve is a share; None: those that there are now."""

    def __init__(self, available_bytes: int | None = None) -> None:
        self._reader = MemoryReader()
        if available_bytes is None:
            available_bytes = self._reader.read().available_bytes
        self._reserve_bytes = min(max(available_bytes // _RESERVE_SHARE, _LEAST_RESERVE), _MOST_RESERVE)
        self._before: tuple[float, float] | None = None

    def look(self, state: MemoryState, now: float) -> PressureLevel:
        then, stalled_s = self._before or (now, state.stalled_s)
        self._before = now, state.stalled_s
        stalls = (state.stalled_s - stalled_s) / (now - then) if now > then else 0.0
        lacking = max(self._reserve_bytes - state.available_bytes, 0)
        has_enough = state.available_bytes >= _ENOUGH * self._reserve_bytes
        is_short = lacking > 0 or (stalls > SHORT_STALLS and not has_enough)
        is_ample = state.available_bytes >= _AMPLE * self._reserve_bytes
        return PressureLevel(is_short, is_ample and stalls <= LOW_STALLS, lacking)

    def is_short(self) -> bool:
        """Of this machine, now."""
        return self.look(self._reader.read(), time.monotonic()).is_short
