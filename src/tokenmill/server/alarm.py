"""A call at a time that may be moved nearer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Alarm:
    """Calls `ring` once `set` has said when; what `ring` gives is when next, None: not again until it is set."""

    def __init__(self, ring: Callable[[], float | None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None
        self._at_s = 0.0

    def set(self, at_s: float | None) -> None:
        """At that time of the loop's clock, or when it was set to, if that is sooner."""
        if at_s is None or (self._timer is not None and self._at_s <= at_s):
            return
        self.cancel()
        self._at_s = at_s
        self._timer = asyncio.get_running_loop().call_at(at_s, self._call)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _call(self) -> None:
        self._timer = None
        self.set(self._ring())
