"""Waking at a given moment. Event loops count in milliseconds; Linux's timer descriptors do not.

Elsewhere the loop's own timer is used, and lateness shows what that costs.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import sys
import time
from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK_CLOEXEC = 0o4000 | 0o2000000
_TFD_TIMER_ABSTIME = 1


class Timer:
    """Calls `wake` once at the moment it was last set to, on time.perf_counter's scale. `close` it in the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop = loop
        self._wake = wake
        self._handle: asyncio.TimerHandle | None = None
        self._libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
        self._descriptor = -1
        if self._libc is not None:
            self._descriptor = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK_CLOEXEC)
        if self._descriptor >= 0:
            loop.add_reader(self._descriptor, self._on_readable)

    def set(self, at_s: float) -> None:
        """Replaces the moment set before. One that has passed wakes at once."""
        if self._descriptor < 0:
            if self._handle is not None:
                self._handle.cancel()
            self._handle = self._loop.call_later(max(0.0, at_s - time.perf_counter()), self._wake)
            return
        assert self._libc is not None
        whole_ns = max(1, int(at_s * 1e9))
        seconds, nanoseconds = divmod(whole_ns, 1_000_000_000)
        setting = struct.pack("qqqq", 0, 0, seconds, nanoseconds)
        if self._libc.timerfd_settime(self._descriptor, _TFD_TIMER_ABSTIME, setting, None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        if self._descriptor >= 0:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _on_readable(self) -> None:
        try:
            os.read(self._descriptor, 8)
        except BlockingIOError:
            return
        self._wake()
