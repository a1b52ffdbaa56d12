"""Longest prefix match first: what the prefix cache has now is served before it is evicted.

Where more prefixes are in use than the cache holds, prompts with the same prefix then run after each other instead of
driving out each other's blocks. From SGLang's RadixAttention (Zheng et al., arXiv 2312.07104, section 3), where this
order can starve prompts that match nothing. Here a hit of d tokens passes only what came up to PATIENCE * d units of
work earlier, so that nobody waits for ever.

What the cache has changes while a prompt waits, so that places are asked for again at each step that has room for one:
of NUM_REFRESHED sequences in turn, at a few microseconds each, however many wait. Up to that number, ranks are exact as
of the step's beginning. (SGLang gives the order up beyond 128.)
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
