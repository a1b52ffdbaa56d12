"""Longest prefix match first: prompts whose prefix is cached now are served before it is evicted.

If more prefixes are in use than the cache holds, prompts with the same prefix run one after another instead of evicting
each other's blocks. From SGLang's RadixAttention (Zheng et al., arXiv 2312.07104, section 3), where this order can
starve prompts that match nothing. Here a hit of d tokens passes only prompts that came at most PATIENCE * d units of
work earlier, so nobody waits forever.

The cache changes while a prompt waits. Therefore due times are computed again at each step that has room for one, for
NUM_REFRESHED sequences in turn, at a few microseconds each, however many wait. Up to that number of waiting sequences,
ranks are exact as of the step's beginning. (SGLang gives the order up beyond 128.)
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.policy import Waiting
from ...core.work import PATIENCE

NUM_REFRESHED = 128


@dataclass(frozen=True, slots=True)
class LongestPrefixFirst:
    summary: str = "most in the prefix cache, with aging"
    num_refreshed: int = NUM_REFRESHED
    patience: int = 0

    def due(self, waiting: Waiting) -> int:
        return waiting.arrived - PATIENCE * waiting.num_cached
