"""The real clock: CLOCK_MONOTONIC. Each process reads its own; messages carry ages instead of times (see `codec`)."""

from __future__ import annotations

import time


class MonotonicClock:
    def now(self) -> float:
        """Seconds since an arbitrary point, never going back."""
        return time.monotonic()
