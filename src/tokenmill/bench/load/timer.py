"""Whose time a load goes by, and waking at a given moment of it. Event loops count in milliseconds; Linux's timer
descriptors do not.

Elsewhere the loop's own timer is used, and lateness shows what that costs. A simulation's loop has a time of its own.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK_CLOEXEC = 0o4000 | 0o2000000
_TFD_TIMER_ABSTIME = 1


class Timer(Protocol):
    """Calls back once at the moment it was last set to."""

    def set(self, at_s: float) -> None: ...

    def close(self) -> None: ...


MakeTimer = Callable[[asyncio.AbstractEventLoop, Callable[[], None]], Timer]


class SystemTimer:
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


class LoopTimer:
    """The same on the scale of the loop's own time, which is exact where that time is virtual."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        self._loop = loop
        self._wake = wake
        self._handle: asyncio.TimerHandle | None = None

    def set(self, at_s: float) -> None:
        if self._handle is not None:
            if self._handle.when() == at_s:
                return
            self._handle.cancel()
        self._handle = self._loop.call_at(at_s, self._on_time)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _on_time(self) -> None:
        self._handle = None
        self._wake()


@dataclass(frozen=True, slots=True)
class Time:
    """now: seconds, from anywhere on; cpu_s: what this process has used of processors. Every tick_s a play looks how
    late it wakes, and every observe_ticks of those tells how far it is. is_real: pauses of this process show in what is
    measured."""

    now: Callable[[], float]
    make_timer: MakeTimer
    cpu_s: Callable[[], float]
    tick_s: float
    observe_ticks: int
    is_real: bool


REAL = Time(time.perf_counter, SystemTimer, time.process_time, tick_s=0.01, observe_ticks=50, is_real=True)


def time_of(loop: asyncio.AbstractEventLoop, tick_s: float = 1.0) -> Time:
    """The time of a loop that is simulated: there the load itself costs nothing."""
    return Time(loop.time, LoopTimer, lambda: 0.0, tick_s=tick_s, observe_ticks=1, is_real=False)
