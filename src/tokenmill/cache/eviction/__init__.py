"""Eviction policies by name, each in its own file with its reason."""

from __future__ import annotations

from collections.abc import Mapping

from ...core.config import check_name
from ...core.policy import Eviction
from .lfu import LeastFrequentlyUsed
from .lru import LeastRecentlyUsed
from .recompute import RecomputeSeconds

EVICTIONS: Mapping[str, Eviction] = {
    "lru": LeastRecentlyUsed(),
    "lfu": LeastFrequentlyUsed(),
    "recompute-seconds": RecomputeSeconds(),
}


def pick(name: str) -> Eviction:
    """The policy of this name. Raises ConfigError naming the nearest."""
    check_name(name, EVICTIONS, "eviction_policy")
    return EVICTIONS[name]
