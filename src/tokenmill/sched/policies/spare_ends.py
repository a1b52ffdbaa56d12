"""Prompts that are cut into chunks leave a ninth of the budget free, so that the end of another prompt can join the
step instead of needing its own. A step of few tokens costs nearly as much as a full one if weights are read from
memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.config import EngineConfig


@dataclass(frozen=True, slots=True)
class SpareEnds:
    """share: one in so many tokens of a step is left, in whole blocks."""

    share: int = 9

    def most_tokens(self, config: EngineConfig, num_decodes: int) -> int:
        most, size = config.max_num_batched_tokens, config.block_size
        return most - most // self.share // size * size
