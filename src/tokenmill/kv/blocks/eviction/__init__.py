"""Eviction policies by name, each in its own file with its reason."""

from __future__ import annotations

from collections.abc import Mapping

from ....core.config import OwnPolicy, check_name
from ....core.policy import Eviction
from .lfu import LeastFrequentlyUsed
from .lru import LeastRecentlyUsed
from .recompute import RecomputeSeconds

EVICTIONS: Mapping[str, Eviction] = {
    "lru": LeastRecentlyUsed(),
    "lfu": LeastFrequentlyUsed(),
    "recompute-seconds": RecomputeSeconds(),
}


def pick(name: str) -> Eviction:
    """The policy of this name, or one's own. Raises ConfigError naming the nearest."""
    check_name(name, EVICTIONS, "eviction_policy")
    eviction: Eviction = name.make() if isinstance(name, OwnPolicy) else EVICTIONS[name]
    return eviction
