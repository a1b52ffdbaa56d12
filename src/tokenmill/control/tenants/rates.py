"""Buckets that refill: what a tenant may use a minute, and when there will be enough. Pure.

A bucket holds what one minute allows and refills evenly. What a call uses is taken when it enters, as far as it can be
known then, and put right when it ends; a bucket that was overdrawn lets nobody in until it has refilled. A call may
take more than a bucket holds: it waits for a full one.
"""

from __future__ import annotations

from typing import NamedTuple

MINUTE_S = 60.0
_NEARLY = 1e-6
"""Of a limit: what is missing only because a clock's seconds are rounded is there."""


class Bucket(NamedTuple):
    """level: what is left, below 0: owed; at_s: when that was so."""

    level: float
    at_s: float

    def at(self, now_s: float, limit: int) -> Bucket:
        """As it is now, under this limit. A clock that was set back refills nothing."""
        grown = self.level + max(0.0, now_s - self.at_s) * limit / MINUTE_S
        return Bucket(min(float(limit), grown), now_s)

    def wait_s(self, amount: float, limit: int) -> float:
        """Until so much is there, if nobody else takes any; 0: it is there."""
        missing = min(amount, limit) - self.level
        return missing * MINUTE_S / limit if missing > _NEARLY * limit else 0.0

    def less(self, amount: float) -> Bucket:
        return Bucket(self.level - amount, self.at_s)


class Standing(NamedTuple):
    """Of a limit, for headers: how much of it is left, and seconds until it is whole again."""

    limit: int
    remaining: int
    reset_s: float


def standing(bucket: Bucket, limit: int) -> Standing:
    return Standing(limit, max(0, int(bucket.level + _NEARLY * limit)), bucket.wait_s(limit, limit))


def duration_text(seconds: float) -> str:
    """As OpenAI writes them: 12ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds, 3), 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"
