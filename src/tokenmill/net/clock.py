"""The live clock: CLOCK_MONOTONIC, which all processes of one machine share, so times may cross the link."""

from __future__ import annotations

import time


class MonotonicClock:
    def now(self) -> float:
        """Seconds since an arbitrary point, never going back."""
        return time.monotonic()
