"""Least recently used: all blocks have the same value, so that only the last use counts. The default: it follows a load
that changes, and needs no use counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....core.policy import CachedBlock


@dataclass(frozen=True, slots=True)
class LeastRecentlyUsed:
    summary: str = "used longest ago"

    def value(self, block: CachedBlock, age: float, attention: float) -> float:
        return 0.0
