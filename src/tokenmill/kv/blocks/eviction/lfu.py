"""Least frequently used, with aging: a system prompt that many requests begin with outlives a burst of long prompts
that are asked once each.

LFU with dynamic aging (Arlitt et al., Evaluating content management techniques for web proxy caches, 2000): the age
that is added to the count keeps what was popular once from staying for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....core.policy import CachedBlock


@dataclass(frozen=True, slots=True)
class LeastFrequentlyUsed:
    summary: str = "used least often, with aging"

    def value(self, block: CachedBlock, age: float, attention: float) -> float:
        return age + block.num_uses
