"""Recompute seconds saved: a block is worth what the next hit on it saves, times how often it was used.

    value = num_uses * (1 + attention * depth)      in seconds that the first block of a prompt takes

A token costs the model's matrices, and attention to all before it, so that the end of a long prompt costs more than as
many tokens of a short one. `attention` is measured: what a block of positions costs, as a share of the rest.

GreedyDual-Size with frequency, where sizes are equal: Cao & Irani, Cost-aware WWW proxy caching algorithms (1997);
Arlitt et al., Evaluating content management techniques for web proxy caches (2000) for the frequency.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....core.policy import CachedBlock


@dataclass(frozen=True, slots=True)
class RecomputeSeconds:
    summary: str = "saves the least time, with aging"

    def value(self, block: CachedBlock, age: float, attention: float) -> float:
        return age + block.num_uses * (1.0 + attention * block.depth)
