"""Short prompts pass long ones for a while: the default.

A prompt is due PATIENCE times its own work after its arrival (`core.work.due`). So a prompt that is shorter by d tokens
goes first, unless it comes PATIENCE * d units of work later: short prompts hardly wait, long ones are hardly delayed,
and nobody waits forever. Tokens in the prefix cache when a prompt arrives do not count as work. Shortest job first with
aging: Kleinrock, Queueing Systems, volume 2 (1976), chapter 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.policy import Waiting
from ...core.work import PATIENCE, due


@dataclass(frozen=True, slots=True)
class ShortPromptsFirst:
    summary: str = "least to compute, with aging"
    num_refreshed: int = 0
    patience: int = PATIENCE

    def due(self, waiting: Waiting) -> int:
        return due(waiting.arrived, waiting.num_tokens - waiting.num_cached, self.patience)
