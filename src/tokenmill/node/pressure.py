"""Whether the machine is short of memory: less than a reserve is available (also below the container's limit), or
processes wait for memory (Linux' pressure stall information) and not much is left."""

from __future__ import annotations

import time
from typing import NamedTuple

from ..core.units import GiB, MiB
from .machine import MemoryReader, MemoryState

SHORT_STALLS = 0.1
"""Share of the time in which some process waited for memory."""

QUIET_STALLS = 0.01
_RESERVE_SHARE = 16
_LEAST_RESERVE = 256 * MiB
_MOST_RESERVE = 2 * GiB
_ENOUGH = 4
_AMPLE = 2


class Verdict(NamedTuple):
    """lacking_bytes: of the reserve. is_quiet: nothing speaks against taking more."""

    is_short: bool
    is_quiet: bool
    lacking_bytes: int


class Pressure:
    """available_bytes: when the process started, of which the reserve is a share; None: those that there are now."""

    def __init__(self, available_bytes: int | None = None) -> None:
        self._reader = MemoryReader()
        if available_bytes is None:
            available_bytes = self._reader.read().available_bytes
        self._reserve_bytes = min(max(available_bytes // _RESERVE_SHARE, _LEAST_RESERVE), _MOST_RESERVE)
        self._before: tuple[float, float] | None = None

    def look(self, state: MemoryState, now: float) -> Verdict:
        then, stalled_s = self._before or (now, state.stalled_s)
        self._before = now, state.stalled_s
        stalls = (state.stalled_s - stalled_s) / (now - then) if now > then else 0.0
        lacking = max(self._reserve_bytes - state.available_bytes, 0)
        has_enough = state.available_bytes >= _ENOUGH * self._reserve_bytes
        is_short = lacking > 0 or (stalls > SHORT_STALLS and not has_enough)
        is_ample = state.available_bytes >= _AMPLE * self._reserve_bytes
        return Verdict(is_short, is_ample and stalls <= QUIET_STALLS, lacking)

    def is_short(self) -> bool:
        """Of this machine, now."""
        return self.look(self._reader.read(), time.monotonic()).is_short
