"""In which pool an engine serves. It has no role: a pool says what front ends give it. Pure."""

from __future__ import annotations

from ..core.events import PoolChanged, SetPool
from ..core.outbox import Outbox


class Membership:
    """pool    "" until a front end put it into one
    epoch   of that change
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.pool = ""
        self.epoch = 0

    def set_pool(self, event: SetPool, now: float) -> None:
        """The highest epoch decides; of two front ends with the same one, who came first."""
        if event.epoch > self.epoch:
            self.pool, self.epoch = event.pool, event.epoch
        self._outbox.answers.append(PoolChanged(self.pool, self.epoch))
